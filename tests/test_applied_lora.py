"""What a real vLLM engine on the CPU computes with, by its own workers' account and by what it answers."""

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import peft
import pytest
import safetensors.torch
import torch
from adapter_files import name_of, published

from skyrl_maze import _compat

_compat.install()

from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration  # noqa: E402

from benchmarks.generator import server  # noqa: E402
from skyrl_maze.adapter import peft_config  # noqa: E402
from skyrl_maze.applied_lora import LoraWitness, applied_lora  # noqa: E402
from skyrl_maze.errors import AdapterError  # noqa: E402
from skyrl_maze.probe import Probed, probe_engines, probe_ids  # noqa: E402
from skyrl_maze.serving import WITNESS, EngineServer, Published, serve_everywhere  # noqa: E402
from skyrl_maze.tiny import save_random_model  # noqa: E402

pytestmark = pytest.mark.timeout(400)
on_an_engine = pytest.mark.rehearsal

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


class Layer:
    """A layer of an engine with these pairs (A, B) in the second of its two slots."""

    tp_size = 1

    def __init__(self, pairs: list[list[torch.Tensor]]) -> None:
        self.n_slices = len(pairs)
        stacked = []
        for side in (0, 1):
            buffers = [torch.zeros(2, 1, 9, 9) for _ in pairs]
            for buffer, pair in zip(buffers, pairs, strict=True):
                rows, columns = pair[side].shape
                buffer[1, 0, :rows, :columns] = pair[side]
            stacked.append(tuple(buffers))
        self.lora_a_stacked, self.lora_b_stacked = stacked


def manager_of(adapter: Path) -> Any:
    """vLLM's manager once it loaded such an adapter; its engine fuses two of the modules in one layer."""
    matrices = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    doubled = {"A": 1, "B": 2}  # alpha 8 of rank 4
    down, first, second = (
        [matrices[name_of(f"layers.{at}", side)] * doubled[side] for side in "AB"]
        for at in ("0.down_proj", "0.q_proj", "1.q_proj")
    )
    loras = {
        "model.layers.0.down_proj": SimpleNamespace(lora_a=down[0], lora_b=down[1]),
        "model.fused": SimpleNamespace(lora_a=[first[0], second[0]], lora_b=[first[1], second[1]]),
    }
    return SimpleNamespace(
        model=SimpleNamespace(),
        modules={
            "model.layers.0.down_proj": Layer([down]),
            "model.fused": Layer([first, second]),
            "model.without": Layer([down]),
        },
        packed_modules={"model.fused": ["model.layers.0.q_proj", "model.layers.1.q_proj"]},
        lora_index_to_id=[None, 7],
        get_adapter=lambda lora_id: SimpleNamespace(get_lora=loras.get) if lora_id == 7 else None,
    )


def test_only_what_lies_in_the_buffers_counts(tmp_path: Path) -> None:
    adapter = published(tmp_path, 4).adapter
    names = [f"base_model.model.model.layers.{at}" for at in ("0.down_proj", "0.q_proj", "1.q_proj")]
    manager = manager_of(adapter)
    assert applied_lora(manager, 7, adapter) == {"applied": names, "other": []}
    assert applied_lora(manager, 8, adapter) == {"applied": [], "other": []}, "another adapter"
    manager.modules["model.fused"].lora_b_stacked[1][1, 0, 2, 3] += 1
    assert applied_lora(manager, 7, adapter) == {"applied": names[:1], "other": []}
    manager.lora_index_to_id = [7, None]
    assert applied_lora(manager, 7, adapter) == {"applied": [], "other": []}, "another slot"


def test_other_values_than_the_files_hold_are_told_apart(tmp_path: Path) -> None:
    before, now = published(tmp_path, 3).adapter, published(tmp_path, 4).adapter
    report = applied_lora(manager_of(before), 7, now)
    assert (report["applied"], len(report["other"])) == ([], 3)


def test_a_worker_that_fails_answers_all_the_same(tmp_path: Path) -> None:
    witness = LoraWitness()
    assert "FileNotFoundError" in witness.skyrl_maze_sees(str(tmp_path), {"adapter_config.json": 1})["error"]
    assert "AttributeError" in witness.skyrl_maze_applied_lora(7, str(tmp_path))["error"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One of two workers, which hold halves; the rehearsal's has one worker."""
    folder = tmp_path_factory.mktemp("engine")
    save_random_model(folder / "model", ["user assistant Where to?"])
    arguments = ["--enable-lora", "--max-lora-rank", str(RANK), "--worker-extension-cls", WITNESS]
    arguments += ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    with server(folder, cache_gb=0.1, max_turns=1, more=arguments) as (url, _):
        yield Engine(folder, url)


@on_an_engine
def test_an_adapter_that_learned_is_applied_and_seen(engine: Engine) -> None:
    first, second = engine.adapter(0.1), engine.adapter(0.1)
    modules = len(engine.matrices) // 2
    for adapter, previous in ((first, None), (second, first)):
        served = engine.serve(adapter, previous)
        assert (served.engines, served.modules, served.proven) == (1, modules, True)
        assert engine.probe(0.1).difference > 0.01


@on_an_engine
def test_an_adapter_of_zeros_is_applied_and_changes_nothing(engine: Engine) -> None:
    assert engine.serve(engine.adapter(0.0)).proven
    assert engine.probe(0.0).difference == pytest.approx(0, abs=1e-6)
    with pytest.raises(AdapterError, match="answers as the base model does"):
        engine.probe(0.1)


@on_an_engine
def test_a_very_small_change_is_seen(engine: Engine) -> None:
    engine.serve(engine.adapter(1e-5))
    assert 0 < engine.probe(1e-5).difference < 1e-3


@on_an_engine
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


@on_an_engine
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


@on_an_engine
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
