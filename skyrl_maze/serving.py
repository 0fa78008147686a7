"""Loads one version of the adapter into every engine, with a proof from each; engines never stay mixed.

An engine proves it by its workers' comparison of what they compute with and the files (see `applied_lora`).
Engines that were started without that class cannot be asked; then only the probe tells (see `probe`).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from safetensors import SafetensorError, safe_open
from tenacity import retry, stop_after_attempt, wait_random_exponential

from skyrl_maze.adapter import CONFIG_FILE, WEIGHTS_FILE
from skyrl_maze.errors import AdapterError
from skyrl_maze.faults import cause_of

WITNESS = "skyrl_maze.applied_lora.LoraWitness"
"""What vLLM's `worker_extension_cls` must be for its workers to give a proof."""
# With the merge before it, all of this together ends before the ranks' collectives give up (ten minutes).
_LOAD_LIMIT_S = 60.0
_ASK_LIMIT_S = 10.0
_ATTEMPTS = 3
_SHOWN = 3
_retried = retry(stop=stop_after_attempt(_ATTEMPTS), wait=wait_random_exponential(max=5), reraise=True)


@dataclass(frozen=True)
class Served:
    """One version, loaded everywhere."""

    engines: int
    modules: int
    """LoRA modules of the adapter, all of which every engine computes with if `proven`."""
    proven: bool
    seconds: float


@dataclass(frozen=True)
class Published:
    """An adapter as rank 0 sees it."""

    path: Path
    modules: frozenset[str]
    sizes: dict[str, int]
    """Bytes of each file."""


@dataclass(frozen=True)
class EngineServer:
    """One server of SkyRL's fleet. What goes wrong with it is raised as AdapterError."""

    url: str
    session: aiohttp.ClientSession

    async def request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON object that it answers."""
        async with self.session.request(method, self.url + path, json=body) as response:
            text = await response.text(errors="replace")
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if response.status != 200:
            error = answer.get("error") if isinstance(answer, dict) else None
            said = error.get("message") if isinstance(error, dict) else text
            raise AdapterError(f"{path} was answered with HTTP {response.status}: {str(said)[:300]}")
        if not isinstance(answer, dict):
            raise AdapterError(f"{path} was answered with {text[:80]!r}, which is no JSON object")
        return answer

    async def see(self, published: Published) -> None:
        """Have all workers look at the files; nothing changes."""
        await self.ask_workers("skyrl_maze_sees", str(published.path), published.sizes)

    async def load(self, name: str, published: Published, witnessed: bool) -> None:
        """Load through SkyRL's endpoint, and have the workers prove that they compute with it."""
        body = {"lora_name": name, "lora_path": str(published.path)}
        loaded = await self.request("POST", "/skyrl/v1/load_lora_adapter", body)
        if loaded.get("status") != "ok" or type(loaded.get("lora_int_id")) is not int:
            raise AdapterError(f"it answered {json.dumps(loaded)[:80]} when asked to load")
        if not witnessed:
            return
        reports = await self.ask_workers(
            "skyrl_maze_applied_lora", loaded["lora_int_id"], str(published.path)
        )
        if problems := _proof_problems(reports, published.modules):
            raise AdapterError("; ".join(problems))

    async def ask_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """What each worker of this engine answers."""
        answer = await self.request("POST", "/collective_rpc", {"method": method, "args": args})
        answers = answer.get("results")
        if not isinstance(answers, list) or not answers or not all(isinstance(a, dict) for a in answers):
            raise AdapterError(f"its workers answered {json.dumps(answer)[:80]} to {method}")
        if errors := [str(a["error"])[:300] for a in answers if "error" in a]:
            raise AdapterError(f"its workers answered {errors[0]}")
        return answers

    async def served(self, name: str) -> str:
        """The version that it says it serves, as `<step>.<attempt>`."""
        cards = (await self.request("GET", "/v1/models"))["data"]
        return next((label(Path(card["root"])) for card in cards if card["id"] == name), "no adapter")


def label(adapter: Path) -> str:
    """`<step>.<attempt>` of a version's adapter."""
    return adapter.parent.name


def _proof_problems(reports: list[dict[str, Any]], modules: frozenset[str]) -> list[str]:
    """What keeps the workers' reports from proving that all these modules are applied."""
    applied = [frozenset(report["applied"]) for report in reports]
    other = sorted({module for report in reports for module in report["other"]})
    ignored = sorted(modules.difference(other, *applied))
    problems = []
    if other or ignored:
        count = len(modules) - len(other) - len(ignored)
        problems.append(f"it applies {count} of the adapter's {len(modules)} LoRA modules")
    if ignored:
        problems.append(f"it ignores {_some(ignored)}")
    if other:
        problems.append(f"it computes with other values than the files hold in {_some(other)}")
    # Workers hold parts of the same modules (tensor parallel) or other layers (pipeline parallel).
    if any(a != b and (a & b or not a) for a in applied for b in applied):
        problems.append(f"its workers disagree: they apply {', '.join(str(len(a)) for a in applied)} modules")
    return problems


async def serve_everywhere(
    urls: Sequence[str],
    name: str,
    adapter: Path,
    previous: Path | None,
    witnessed: bool,
    limit_s: float = _LOAD_LIMIT_S,
) -> Served:
    """Load `adapter` into all engines, each time into all; if that cannot be done, go back to `previous`.

    Nothing is loaded anywhere before every worker of every engine sees the files.

    Args:
        urls: of the engines' own servers, not of a router.
        name: of the adapter at the engines.
        previous: the adapter that all of them served before, if there was one.
        witnessed: whether their workers are a `LoraWitness`. Others must not be asked: vLLM 0.30 with several
            workers an engine mixes up all later answers once a call has failed.
        limit_s: seconds that one attempt may take.

    Raises:
        AdapterError: not all could load and prove it; says of each engine what it serves now, and why.
    """
    started_s = time.monotonic()
    if not urls:
        raise AdapterError(f"no engine is there to load {adapter}; check generator.inference_engine")
    failed: dict[str, AdapterError] = {}

    def check(outcomes: dict[str, Any]) -> None:
        failed.clear()
        failed.update({u: found for u, found in outcomes.items() if isinstance(found, AdapterError)})
        if failed:
            raise next(iter(failed.values()))

    @_retried
    async def load() -> None:
        if witnessed:
            check(await of_each(engines, lambda engine: engine.see(published), _ASK_LIMIT_S))
        check(await of_each(engines, lambda engine: engine.load(name, published, witnessed), limit_s))

    published = await _retried(_read)(adapter)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit_s)) as session:
        engines = [EngineServer(url, session) for url in urls]
        try:
            await load()
        except AdapterError as error:
            said, end = await _gone_back(engines, name, previous, witnessed, limit_s)
            lines = [f"{url} serves {said[url]}; {failed.get(url, 'it did not fail')}" for url in urls]
            title = f"{len(failed)} of {len(urls)} engines failed {_ATTEMPTS} times to load {label(adapter)}"
            raise AdapterError("\n  - ".join([f"{title}; {end}:", *lines])) from error
    return Served(len(urls), len(published.modules), witnessed, time.monotonic() - started_s)


async def of_each(
    engines: Sequence[EngineServer], ask: Callable[[EngineServer], Awaitable[Any]], limit_s: float
) -> dict[str, Any]:
    """What `ask` gives for each engine, all at once, or the AdapterError that says why it gives nothing."""

    async def outcome(engine: EngineServer) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await ask(engine)
        except TimeoutError:
            return AdapterError(f"it did not answer in {limit_s:g} s")
        except AdapterError as error:
            return error
        except Exception as error:  # a connection that broke, or an answer of another shape
            return AdapterError(cause_of(error))

    outcomes = await asyncio.gather(*map(outcome, engines))
    return {engine.url: found for engine, found in zip(engines, outcomes, strict=True)}


async def _gone_back(
    engines: Sequence[EngineServer], name: str, previous: Path | None, witnessed: bool, limit_s: float
) -> tuple[dict[str, str], str]:
    """Bring all engines back to `previous` if one is there: what each serves then, and what it came to."""

    async def serving() -> dict[str, str]:
        said = await of_each(engines, lambda engine: engine.served(name), _ASK_LIMIT_S)
        return {u: f"unknown ({s})" if isinstance(s, AdapterError) else s for u, s in said.items()}

    if previous is None:
        return await serving(), "none was served before, so they may be mixed: start the run anew"
    try:
        published = await _read(previous)
        back = await of_each(engines, lambda e: e.load(name, published, witnessed), limit_s)
        why_not = "; ".join(f"{url}: {e}" for url, e in back.items() if isinstance(e, AdapterError))
    except (OSError, SafetensorError) as error:  # it is gone
        why_not = cause_of(error)
    said = await serving()
    if not why_not and set(said.values()) == {label(previous)}:
        return said, f"all serve {label(previous)} as before"
    return said, f"they could not all be brought back to {label(previous)} ({why_not}): start the run anew"


async def _read(adapter: Path) -> Published:
    """Raises OSError or SafetensorError where this node cannot see the adapter."""

    def read() -> Published:
        with safe_open(adapter / WEIGHTS_FILE, "pt") as file:
            modules = frozenset(key.rpartition(".lora_")[0] or key for key in file.keys())  # noqa: SIM118
        sizes = {name: (adapter / name).stat().st_size for name in (WEIGHTS_FILE, CONFIG_FILE)}
        return Published(adapter, modules, sizes)

    return await asyncio.to_thread(read)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
