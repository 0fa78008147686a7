"""What a real vLLM engine on the CPU computes with, by its own workers' account and by what it answers."""

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import peft
import pytest
import safetensors.torch
import torch

from skyrl_maze import _compat

_compat.install()

from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration  # noqa: E402

from benchmarks.generator import server  # noqa: E402
from skyrl_maze.adapter import peft_config  # noqa: E402
from skyrl_maze.errors import AdapterError  # noqa: E402
from skyrl_maze.probe import Probed, probe_engines, probe_ids  # noqa: E402
from skyrl_maze.serving import WITNESS, EngineServer, Published, serve_everywhere  # noqa: E402
from skyrl_maze.tiny import save_random_model  # noqa: E402

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(400)]

POLICY = "policy"
RANK = 8


class Engine:
    """The server's address, and adapters for its model."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        model = Qwen3VLForConditionalGeneration.from_pretrained(folder / "model")
        config = peft.LoraConfig(
            r=RANK, lora_alpha=3 * RANK, target_modules="all-linear", exclude_modules=".*visual.*"
        )
        tuned = peft.get_peft_model(model, config)
        self.matrices = {
            name.replace(".default.", "."): matrix.detach()
            for name, matrix in tuned.named_parameters()
            if "lora_" in name
        }
        self.config = peft_config(dataclasses.asdict(config), "base")
        self.prompt = probe_ids(AutoTokenizer.from_pretrained(folder / "model"))
        self.steps = 0

    def adapter(self, largest_b: float, renamed: tuple[str, str] = ("", "")) -> Path:
        """A folder with an adapter whose lora_B are random up to this size."""
        self.steps += 1
        folder = self.folder / "versions" / f"{self.steps}.0" / "adapter"
        folder.mkdir(parents=True)
        source = torch.Generator().manual_seed(self.steps)
        written = {
            name.replace(*renamed): (
                (torch.rand(matrix.shape, generator=source) * 2 - 1) * largest_b
                if ".lora_B." in name
                else matrix
            ).contiguous()
            for name, matrix in self.matrices.items()
        }
        safetensors.torch.save_file(written, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        return folder

    def serve(self, adapter: Path, previous: Path | None = None) -> Any:
        return asyncio.run(serve_everywhere([self.url], POLICY, adapter, previous, witnessed=True))

    def probe(self, largest_b: float) -> Probed:
        names = "base", POLICY
        return asyncio.run(probe_engines([self.url], *names, self.prompt, f"{self.steps}.0", largest_b))

    def load_and_compare(self, adapter: Path, other: Path) -> list[dict[str, Any]]:
        """What each worker says that it computes with after loading `adapter`, compared with `other`."""

        async def ask() -> list[dict[str, Any]]:
            async with aiohttp.ClientSession() as session:
                engine = EngineServer(self.url, session)
                body = {"lora_name": POLICY, "lora_path": str(adapter)}
                loaded = await engine.request("POST", "/skyrl/v1/load_lora_adapter", body)
                return await engine.ask_workers("skyrl_maze_applied_lora", loaded["lora_int_id"], str(other))

        return asyncio.run(ask())


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    save_random_model(folder / "model", ["user assistant Where to?"])
    arguments = ["--enable-lora", "--max-lora-rank", str(RANK), "--worker-extension-cls", WITNESS]
    arguments += ["--tensor-parallel-size", str(request.param), "--distributed-executor-backend", "mp"]
    with server(folder, cache_gb=0.1, max_turns=1, more=arguments) as (url, _):
        yield Engine(folder, url)


def test_an_adapter_that_learned_is_applied_and_seen(engine: Engine) -> None:
    first, second = engine.adapter(0.1), engine.adapter(0.1)
    modules = len(engine.matrices) // 2
    for adapter, previous in ((first, None), (second, first)):
        served = engine.serve(adapter, previous)
        assert (served.engines, served.modules, served.proven) == (1, modules, True)
        assert engine.probe(0.1).difference > 0.01


def test_an_adapter_of_zeros_is_applied_and_changes_nothing(engine: Engine) -> None:
    assert engine.serve(engine.adapter(0.0)).proven
    assert engine.probe(0.0).difference == pytest.approx(0, abs=1e-6)
    with pytest.raises(AdapterError, match="answers as the base model does"):
        engine.probe(0.1)


def test_a_very_small_change_is_seen(engine: Engine) -> None:
    engine.serve(engine.adapter(1e-5))
    assert 0 < engine.probe(1e-5).difference < 1e-3


def test_the_comparison_is_one_of_every_value(engine: Engine) -> None:
    adapter = engine.adapter(0.1)
    changed = adapter.parents[1] / "changed"
    shutil.copytree(adapter, changed)
    file = changed / "adapter_model.safetensors"
    matrices = safetensors.torch.load_file(file)
    name = sorted(matrices)[0]
    matrices[name][0, 0] += 0.25
    safetensors.torch.save_file(matrices, file)
    modules = {name.rpartition(".lora_")[0] for name in matrices}
    for report in engine.load_and_compare(adapter, adapter):
        assert (set(report["applied"]), report["other"]) == (modules, [])
    for report in engine.load_and_compare(adapter, changed):
        assert report["other"] == [name.rpartition(".lora_")[0]]
        assert set(report["applied"]) == modules - {*report["other"]}


def test_names_that_the_engine_ignores_are_found_out(engine: Engine) -> None:
    good = engine.adapter(0.1)
    engine.serve(good)
    all_wrong = engine.adapter(0.1, ("language_model.layers.", "language_model.layer."))
    with pytest.raises(AdapterError, match=r"all serve \d+\.0 as before") as caught:
        engine.serve(all_wrong, good)
    assert f"applies 0 of the adapter's {len(engine.matrices) // 2} LoRA modules" in str(caught.value)
    some_wrong = engine.adapter(0.1, ("layers.1.mlp.", "layers.7.mlp."))
    with pytest.raises(AdapterError, match=r"it ignores .*layers\.7\.mlp\.down_proj"):
        engine.serve(some_wrong, good)
    assert engine.probe(0.1).difference > 0.01


def test_files_that_no_worker_sees_are_never_loaded(engine: Engine) -> None:
    # Tried three times, and the engine still answers in step afterwards.
    good, gone = engine.adapter(0.1), engine.adapter(0.1)
    engine.serve(good)
    body = (gone / "adapter_config.json").read_bytes()
    (gone / "adapter_config.json").write_bytes(body[:-1])
    answers = asyncio.run(_seen(engine.url, gone, {"adapter_config.json": len(body)}))
    assert f"have {{'adapter_config.json': {len(body) - 1}}} bytes here" in answers
    (gone / "adapter_config.json").unlink()
    answers = asyncio.run(_seen(engine.url, gone, {"adapter_config.json": len(body)}))
    assert "FileNotFoundError" in answers
    assert engine.serve(good).proven


async def _seen(url: str, folder: Path, sizes: dict[str, int]) -> str:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(AdapterError) as caught:
            await EngineServer(url, session).see(Published(folder, frozenset(), sizes))
    return str(caught.value)
