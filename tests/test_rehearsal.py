"""The rehearsal, run as a user runs it: Ray, SkyRL's trainer, two FSDP ranks, a vLLM server, LoRA."""

import contextlib
import json
import os
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from prometheus_scrape import Scraper
from test_observability import ASKED

from skyrl_maze import checkpoints, complete, deploy, versions
from skyrl_maze.evaluate import figures, metrics
from skyrl_maze.gauges import TABLE
from skyrl_maze.report import gather
from skyrl_maze.results import read_result, step_folder
from skyrl_maze.runlog import EVENTS_FILE, read_metrics

pytestmark = pytest.mark.rehearsal

COMMAND = Path(sysconfig.get_path("scripts")) / "skyrl.entrypoints.main_base"
STEPS = 6
# Ports that SkyRL's engine and router, Ray's dashboard and its client would take first.
BUSY_PORTS = (8000, 8265, 10001, 29000)
# What the dashboard asks for and only a GPU has.
ONLY_WITH_GPUS = {"ray_node_gpus_utilization", "ray_node_gram_used"}


@dataclass
class Rehearsal:
    done: subprocess.CompletedProcess[str]
    root: Path
    metrics: list[dict[str, float]]
    exported: Scraper


@contextlib.contextmanager
def _listening(ports: tuple[int, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # taken by something else, which serves as well
                listener.bind(("0.0.0.0", port))
                listener.listen()
        yield


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Rehearsal:
    folder = tmp_path_factory.mktemp("rehearsal")
    root = folder / "runs/maze-cpu"
    with _listening(BUSY_PORTS), Scraper(root) as exported:
        done = subprocess.run(
            [str(COMMAND), "+recipe=maze_cpu"],
            cwd=folder,
            # Ray sends metrics on every ten seconds, which is longer than a step here may be.
            env={**os.environ, "XDG_CACHE_HOME": str(model_cache), "RAY_metrics_report_interval_ms": "1000"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return Rehearsal(done, root, read_metrics(root), exported)


@pytest.mark.timeout(1000)
def test_it_ends_with_a_table_and_shows_each_step(rehearsal: Rehearsal) -> None:
    out = rehearsal.done.stdout
    for step in range(1, STEPS + 1):
        assert f"training step {step} of {STEPS}" in out
    for row in ("solve rate before", "solve rate after", "seconds per step", "checkpoint", "adapter", "logs"):
        assert row in out
    assert "none" not in out
    assert out.splitlines()[0].startswith("  drawing the data sets"), "no noise before the first line"
    assert len(out.splitlines()) < 40, "the noise belongs into the log file"
    assert (rehearsal.root / "logs/console.log").stat().st_size > 10_000


def test_pictures_go_as_files_and_no_episode_is_lost(rehearsal: Rehearsal) -> None:
    assert "pictures go to the engine as files" in rehearsal.done.stdout
    trained = [r for r in rehearsal.metrics if "train/solve_rate" in r]
    assert [r["generate/masked_episodes"] for r in trained] == [0] * STEPS


def test_the_trainer_computes_what_the_engine_said(rehearsal: Rehearsal) -> None:
    trained = [r for r in rehearsal.metrics if "train/solve_rate" in r]
    assert all(r["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-3 for r in trained)
    assert all(r["policy/rollout_train_logprobs_abs_diff_max"] < 0.1 for r in trained)


def test_examples_in_the_log_hold_no_base64(rehearsal: Rehearsal) -> None:
    log = (rehearsal.root / "logs/console.log").read_text(encoding="utf-8", errors="replace")
    assert "[image/png 80x80 sha256:" in log
    assert "base64," not in log


def test_the_solve_rate_is_logged_under_a_plain_name(rehearsal: Rehearsal) -> None:
    trained = [r for r in rehearsal.metrics if "train/solve_rate" in r]
    evaluated = [r for r in rehearsal.metrics if "eval/solve_rate" in r]
    assert [r["step"] for r in trained] == list(range(1, STEPS + 1))
    assert [r["step"] for r in evaluated] == [0, STEPS]
    for record in trained:
        assert record["train/solve_rate"] == record["environment/success"]
    for record in evaluated:
        assert record["eval/solve_rate"] == record["eval/all/environment/success"]
        assert 0 <= record["eval/solve_rate"] <= 1


def test_the_run_can_be_served(rehearsal: Rehearsal) -> None:
    settings = deploy.recorded(rehearsal.root)
    adapter, passed_over = deploy.newest(rehearsal.root, settings)
    assert (adapter.step, adapter.exported, passed_over) == (STEPS, True, [])
    found = deploy.plan(settings, adapter)
    assert (found.max_lora_rank, found.max_model_len, found.pictures) == (8, 2048, 12)
    assert Path(found.base, "config.json").is_file()


def test_the_run_can_be_shown(rehearsal: Rehearsal) -> None:
    (shown,) = gather([rehearsal.root])["runs"]
    evaluated = [r for r in rehearsal.metrics if "eval/solve_rate" in r]
    assert shown["notes"] == []
    assert [(point["step"], point["rate"]) for point in shown["curve"]] == [
        (record["step"], record["eval/solve_rate"]) for record in evaluated
    ]
    for point in shown["curve"]:
        assert point["episodes"] == len(point["evaluation"]["episodes"]) > 0


def test_the_policy_walks_and_learns_from_it(rehearsal: Rehearsal) -> None:
    trained = [r for r in rehearsal.metrics if "train/solve_rate" in r]
    assert max(r["policy/grad_norm"] for r in trained) > 0
    assert all(r["environment/turns"] > 1 for r in trained)
    first = trained[0]
    assert first["environment/parse_failures"] < first["environment/turns"] / 3


def test_the_adapter_changed_and_every_version_was_served(rehearsal: Rehearsal) -> None:
    synced = safetensors.torch.load_file(_adapter(rehearsal, STEPS))
    grown = [tensor for name, tensor in synced.items() if "lora_B" in name]  # zero before the first update
    assert grown
    assert all(torch.isfinite(tensor).all() for tensor in grown)
    assert all(tensor.abs().max() > 0 for tensor in grown)
    assert not [name for name in synced if "visual" in name]
    events = map(json.loads, (rehearsal.root / EVENTS_FILE).read_text(encoding="utf-8").splitlines())
    shared = [event for event in events if event["event"] == "shared"]
    assert [event["step"] for event in shared] == list(range(STEPS + 1))
    for event in shared:
        assert (event["engines"], event["modules"]) == (1, len(synced) // 2)
        # Zero before the first update, and then the engine does not answer as the base model does.
        assert (event["largest_b"] > 0) == (event["probe_difference"] > 1e-6) == (event["step"] > 0)
    trained = [r for r in rehearsal.metrics if "train/solve_rate" in r]
    assert all(r["adapter/modules"] == len(synced) // 2 for r in trained)
    assert all(r["adapter/step"] == r["step"] for r in trained)
    [log] = (rehearsal.root / "logs").glob("infra-*.log")
    text = log.read_text(encoding="utf-8", errors="replace")
    assert text.count('"POST /skyrl/v1/load_lora_adapter HTTP/1.1" 200') == STEPS + 1


def test_the_checkpoint_holds_what_is_trained_and_nothing_else(rehearsal: Rehearsal) -> None:
    folder = rehearsal.root / "checkpoints"
    found = checkpoints.newest(folder, "maze-cpu", pytest.fail)
    assert found is not None
    state = checkpoints.read_state(found)
    assert (state.step, state.position, state.ranks) == (STEPS, STEPS, 2)
    assert (folder / "latest_ckpt_global_step.txt").read_text(encoding="utf-8") == str(STEPS)
    saved = _saved_tensors(found.path)
    trained = {name: tensor for name, tensor in saved.items() if not name.startswith("state.")}
    served = safetensors.torch.load_file(_adapter(rehearsal, STEPS))
    assert {name.replace(".default.", "."): tensor.shape for name, tensor in trained.items()} == {
        name: tensor.shape for name, tensor in served.items()
    }
    for name, tensor in trained.items():
        assert torch.equal(tensor, served[name.replace(".default.", ".")])
        assert saved[f"state.{name}.step"] == STEPS
        assert saved[f"state.{name}.exp_avg_sq"].shape == tensor.shape


def _saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What two ranks saved, put together by the rows."""
    parts = [safetensors.torch.load_file(path) for path in sorted(folder.glob("shard-*.safetensors"))]
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, rows in part.items():
            whole[name] = torch.cat([whole[name], rows]) if name in whole and rows.ndim else rows
    return whole


def test_the_merged_adapter_lies_beside_the_checkpoint(rehearsal: Rehearsal) -> None:
    exported = rehearsal.root / f"exports/global_step_{STEPS}/policy"
    assert complete.verify(exported, "maze-cpu").step == STEPS
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (exported / name).read_bytes() == _adapter(rehearsal, STEPS).with_name(name).read_bytes()


def _events(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "events.jsonl").read_text("utf-8").splitlines()]


def test_nothing_is_written_outside_the_run(rehearsal: Rehearsal) -> None:
    folder = rehearsal.root.parents[1]
    assert [path.name for path in folder.iterdir()] == ["runs"]
    assert [path.name for path in (folder / "runs").iterdir()] == ["maze-cpu"]


def _adapter(rehearsal: Rehearsal, step: int) -> Path:
    version = rehearsal.root / f"lora_sync/maze-cpu/versions/{step}.0"
    return version / "adapter/adapter_model.safetensors"


def test_the_head_node_merged_what_two_ranks_wrote(rehearsal: Rehearsal) -> None:
    events = _events(rehearsal.root)
    placed = next(event for event in events if event["event"] == "placed")
    assert placed["merger_node"] not in placed["rank_nodes"], "the ranks are on another node than the head"
    shared = [event for event in events if event["event"] == "shared"]
    assert [event["step"] for event in shared] == list(range(STEPS + 1))
    assert all(event["on_head"] for event in shared)
    folder = rehearsal.root / "lora_sync"
    assert [v.step for v in versions.complete_versions(folder, "maze-cpu", content=True)] == [4, 5, 6]
    newest = versions.latest(folder, "maze-cpu")
    assert newest is not None
    assert {path.name for path in newest.shards.iterdir()} == {
        "adapter_config.json",
        *(f"rank-0000{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")),
    }


def test_the_shards_can_be_merged_by_hand(rehearsal: Rehearsal, tmp_path: Path) -> None:
    version, out = _adapter(rehearsal, STEPS).parents[1], tmp_path / "adapter"
    program = Path(sysconfig.get_path("scripts")) / "skyrl-maze"
    for arguments in (["merge", str(version / "shards"), str(out)], ["verify", str(out)]):
        done = subprocess.run([str(program), "lora", *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    merged = next(out.rglob("adapter_model.safetensors"))
    assert merged.read_bytes() == _adapter(rehearsal, STEPS).read_bytes()


def test_every_metric_that_a_panel_or_rule_names_is_exported(rehearsal: Rehearsal) -> None:
    """From Ray's own endpoints; what needs a GPU is told apart by name."""
    assert ASKED - set(rehearsal.exported.seen) == ONLY_WITH_GPUS


def test_what_is_exported_is_what_was_logged(rehearsal: Rehearsal) -> None:
    for row in TABLE:
        seen = rehearsal.exported.seen[row.series]
        assert {dict(labels)["run_id"] for labels, _ in seen} == {"maze-cpu"}
        values = {value for labels, value in seen if dict(labels).get("cause") == row.cause}
        assert values
        if row.logged.startswith("run/"):
            continue
        logged = {float(record[row.logged]) for record in rehearsal.metrics if row.logged in record}
        unlogged = values - logged - ({0.0} if row.cause else set())
        # The adapter that is shared before there is a record.
        assert len(unlogged) <= ("adapter" in row.logged), row.logged
    assert max(value for _, value in rehearsal.exported.seen["ray_skyrl_maze_step"]) >= STEPS - 1


def test_every_evaluation_lies_in_the_run_and_says_what_was_logged(rehearsal: Rehearsal) -> None:
    logged = {r["step"]: r for r in rehearsal.metrics if "eval/solve_rate" in r}
    assert sorted(path.name for path in (rehearsal.root / "evaluations").iterdir()) == [
        f"step-{step:08d}" for step in (0, STEPS)
    ]
    for step in (0, STEPS):
        result = read_result(step_folder(rehearsal.root, step))
        assert (result.summary.step, result.summary.adapter) == (step, f"{step}.0")
        assert [(e.index, e.sample) for e in result.episodes] == [(i, s) for i in range(4) for s in range(8)]
        found = metrics(figures(result.episodes))
        assert found == {name: logged[step][name] for name in found}


def test_an_evaluation_can_be_printed(rehearsal: Rehearsal) -> None:
    program = Path(sysconfig.get_path("scripts")) / "skyrl-maze"
    for folder in (rehearsal.root, rehearsal.root / "evaluations/step-00000000"):
        done = subprocess.run([program, "evaluate", folder], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "95 % interval" in done.stdout


@dataclass
class Leg:
    """A part of a run that goes on from what the part before it saved."""

    metrics: list[dict[str, float]]
    step: int
    """Of what the engines served first."""
    served: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def legs(rehearsal: Rehearsal, model_cache: Path) -> list[Leg]:
    """The rehearsal, gone on with for a step on 1 rank, then for one on 2 again, then not at all."""
    found = []
    for ranks, last in ((1, STEPS + 1), (2, STEPS + 2), (2, STEPS + 2)):
        settings = [
            "trainer.resume_mode=latest",
            f"trainer.max_training_steps={last}",
            f"trainer.placement.policy_num_gpus_per_node={ranks}",
            f"trainer.placement.ref_num_gpus_per_node={ranks}",
            "trainer.epochs=3",
            "trainer.eval_interval=-1",
        ]
        before = (len(read_metrics(rehearsal.root)), len(_events(rehearsal.root)))
        done = subprocess.run(
            [str(COMMAND), "+recipe=maze_cpu", *settings],
            cwd=rehearsal.root.parents[1],
            env={**os.environ, "XDG_CACHE_HOME": str(model_cache)},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        events = _events(rehearsal.root)[before[1] :]
        first = next(event for event in events if event["event"] == "shared")
        # Now: the next leg's versions will take its place.
        served = safetensors.torch.load_file(Path(first["path"]) / "adapter_model.safetensors")
        found.append(Leg(read_metrics(rehearsal.root, before[0]), first["step"], served))
    return found


@pytest.mark.timeout(2000)
def test_a_run_goes_on_with_fewer_ranks_and_back(rehearsal: Rehearsal, legs: list[Leg]) -> None:
    """Also over the end of an epoch, which step 6 is."""
    assert [[record["step"] for record in leg.metrics] for leg in legs] == [[STEPS + 1], [STEPS + 2], []]
    states = []
    for step in (STEPS, STEPS + 1, STEPS + 2):
        found = checkpoints.at(rehearsal.root / f"checkpoints/global_step_{step}")
        state, saved = checkpoints.read_state(found), _saved_tensors(found.path)
        states.append((found.attempt, state.ranks, state.position))
        assert {int(value) for name, value in saved.items() if name.endswith(".step")} == {step}
    assert states == [(0, 2, STEPS), (1, 1, STEPS + 1), (2, 2, STEPS + 2)]
    for before, leg in zip((STEPS, STEPS + 1, STEPS + 2), legs, strict=True):
        # What the engines serve first is what was saved, to the bit.
        exported = rehearsal.root / f"exports/global_step_{before}/policy/adapter_model.safetensors"
        saved = safetensors.torch.load_file(exported)
        assert leg.step == before
        assert leg.served.keys() == saved.keys()
        assert all(torch.equal(leg.served[name], saved[name]) for name in saved)


@pytest.mark.timeout(1000)
def test_a_random_model_and_faults_everywhere_end_no_run(tmp_path: Path, model_cache: Path) -> None:
    """The worst case: a model that says anything, a tenth of all steps and engine calls failing."""
    settings = [
        "run.id=worst",
        "run.warm_up_steps=0",
        "generator.rollouts.fault_rate=0.1",
        "generator.rollouts.max_failed_share=0.95",
        "trainer.max_training_steps=2",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
    ]
    done = subprocess.run(
        [str(COMMAND), "+recipe=maze_cpu", *settings],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(model_cache)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [r for r in read_metrics(tmp_path / "runs/worst") if "train/solve_rate" in r]
    assert [r["step"] for r in steps] == [1, 2]
    for record in steps:
        assert record["generate/lost_environment"] > 0
        assert record["generate/retries"] > 0
        # A call of the engine rarely fails four times in a row.
        lost = record["generate/lost_environment"] + record.get("generate/lost_engine", 0)
        assert record["generate/masked_episodes"] == lost
        assert "generate/violations" not in record
    assert "episodes lost" in done.stdout
