"""All engines serve one version, proven, or an error says who has what; over HTTP to servers that fail."""

import asyncio
import socket
from pathlib import Path

import pytest
import tenacity
from adapter_files import published
from fake_servers import POLICY, FakeEngine, serving

from skyrl_maze import serving as under_test
from skyrl_maze.errors import AdapterError
from skyrl_maze.serving import Served, label, serve_everywhere
from skyrl_maze.versions import Version

MODULES = 4


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = tenacity.retry(stop=tenacity.stop_after_attempt(under_test._ATTEMPTS), reraise=True)
    monkeypatch.setattr(under_test, "_retried", quick)
    monkeypatch.setattr(under_test, "_ASK_LIMIT_S", 1.0)


@pytest.fixture
def old(tmp_path: Path) -> Version:
    return published(tmp_path, 3)


@pytest.fixture
def new(tmp_path: Path) -> Version:
    return published(tmp_path, 4)


def share(
    engines: list[FakeEngine],
    version: Version,
    before: Version | None = None,
    witnessed: bool = True,
    limit_s: float = 5.0,
) -> Served:
    async def run() -> Served:
        async with serving(*engines) as urls:
            for engine in engines:
                engine.serves = before.adapter if before else None
            previous = before.adapter if before else None
            return await serve_everywhere(urls, POLICY, version.adapter, previous, witnessed, limit_s)

    return asyncio.run(run())


def served_by(engines: list[FakeEngine]) -> list[str]:
    return [label(engine.serves) if engine.serves else "none" for engine in engines]


def test_all_load_and_prove_it(old: Version, new: Version) -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine("halves")]
    served = share(engines, new, old)
    assert (served.engines, served.modules, served.proven) == (3, MODULES, True)
    assert served_by(engines) == ["4.0"] * 3
    assert [engine.loads for engine in engines] == [["4.0"]] * 3


@pytest.mark.parametrize(
    "fault", ["no load", "no JSON", "no status", "applies nothing", "odd report", "stays with the old one"]
)
@pytest.mark.parametrize("failures", [1, 2])
def test_what_fails_once_or_twice_is_tried_again_by_all(
    old: Version, new: Version, fault: str, failures: int
) -> None:
    engines = [FakeEngine(), FakeEngine(fault, failures)]
    share(engines, new, old)
    assert served_by(engines) == ["4.0"] * 2
    assert [engine.loads for engine in engines] == [["4.0"] * (failures + 1)] * 2


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("no load", "HTTP 500: Worker failed with error 'No adapter found'"),
        ("no JSON", "'<html>busy</html>', which is no JSON object"),
        ("no status", "asked to load"),
        (
            "applies nothing",
            f"applies 0 of the adapter's {MODULES} LoRA modules; it ignores base_model.",
        ),
        ("applies fewer", f"applies {MODULES - 1} of the adapter's {MODULES} LoRA modules"),
        ("workers disagree", f"its workers disagree: they apply {MODULES}, {MODULES - 1} modules"),
        ("one worker applies nothing", f"its workers disagree: they apply {MODULES}, 0 modules"),
        ("odd report", "its workers answered"),
        ("stays with the old one", "computes with other values than the files hold"),
        ("no witness", "/collective_rpc was answered with HTTP 500"),
    ],
)
def test_if_one_cannot_all_go_back(old: Version, new: Version, fault: str, why: str) -> None:
    # It fails as often as it is asked to load the new version, and no more.
    failures = under_test._ATTEMPTS
    engines = [FakeEngine(), FakeEngine(fault, failures), FakeEngine()]
    with pytest.raises(AdapterError) as caught:
        share(engines, new, old)
    assert served_by(engines) == ["3.0"] * 3
    title, *lines = str(caught.value).splitlines()
    assert title == f"1 of 3 engines failed {failures} times to load 4.0; all serve 3.0 as before:"
    assert [f"{engine.url} serves 3.0" in line for engine, line in zip(engines, lines, strict=True)] == [
        True
    ] * 3
    assert why in lines[1]
    assert why not in lines[0] + lines[2]


def test_an_engine_that_fails_for_good_is_named_with_what_it_serves(old: Version, new: Version) -> None:
    engines = [FakeEngine(), FakeEngine("applies nothing")]
    with pytest.raises(AdapterError, match=r"could not all be brought back to 3\.0") as caught:
        share(engines, new, old)
    assert f"{engines[0].url} serves 3.0; it did not fail" in str(caught.value)
    assert "start the run anew" in str(caught.value)


def test_an_engine_that_is_gone_is_unknown(old: Version, new: Version) -> None:
    async def run() -> None:
        living = FakeEngine()
        async with serving(living) as urls:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
                await serve_everywhere([*urls, gone], POLICY, new.adapter, old.adapter, True)

    with pytest.raises(AdapterError, match=r"1 of 2 engines .* could not all be brought back") as caught:
        asyncio.run(run())
    text = str(caught.value)
    assert "serves 3.0; it did not fail" in text
    assert "serves unknown (ClientConnectorError" in text


def test_one_that_hangs_is_waited_for_only_so_long(old: Version, new: Version) -> None:
    engines = [FakeEngine(), FakeEngine("hangs", under_test._ATTEMPTS)]
    with pytest.raises(AdapterError, match=r"it did not answer in 0\.3 s"):
        share(engines, new, old, limit_s=0.3)
    assert served_by(engines) == ["3.0"] * 2


def test_nothing_is_loaded_anywhere_before_all_see_the_files(old: Version, new: Version) -> None:
    engines = [FakeEngine(), FakeEngine("blind", 2)]
    share(engines, new, old)
    assert [engine.loads for engine in engines] == [["4.0"]] * 2
    engines = [FakeEngine(), FakeEngine("blind", under_test._ATTEMPTS)]
    with pytest.raises(AdapterError, match=r"serves 3\.0; its workers answered FileNotFoundError"):
        share(engines, new, old)
    assert "4.0" not in engines[0].loads


def test_without_a_version_before_there_is_none_to_go_back_to(new: Version) -> None:
    engines = [FakeEngine(), FakeEngine("no load")]
    with pytest.raises(AdapterError, match="none was served before") as caught:
        share(engines, new)
    assert f"{engines[0].url} serves 4.0; it did not fail" in str(caught.value)
    assert f"{engines[1].url} serves no adapter; " in str(caught.value)


def test_a_version_that_is_gone_is_none_to_go_back_to(old: Version, new: Version) -> None:
    (old.adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"could not all be brought back to 3\.0 \(FileNotFoundError"):
        share([FakeEngine("no load", under_test._ATTEMPTS)], new, old)


def test_engines_without_a_witness_are_not_asked(new: Version) -> None:
    engines = [FakeEngine("no witness"), FakeEngine("no witness")]
    served = share(engines, new, witnessed=False)
    assert (served.engines, served.proven) == (2, False)
    assert [engine.asked for engine in engines] == [[], []]


def test_files_that_this_node_does_not_see_at_once_are_looked_for_again(
    new: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, stale = under_test._read, [True, True]

    async def late(adapter: Path) -> under_test.Published:
        if stale and stale.pop():
            raise OSError(116, "Stale file handle")
        return await read(adapter)

    monkeypatch.setattr(under_test, "_read", late)
    assert share([FakeEngine()], new).modules == MODULES
    stale.extend([True] * 3)
    with pytest.raises(OSError, match="Stale file handle"):
        share([FakeEngine()], new)


def test_no_engine_at_all_is_an_error(new: Version) -> None:
    with pytest.raises(AdapterError, match="no engine is there"):
        share([], new)
