"""Evaluations inside training: what is logged and what lies in the folder are one and the same."""

import asyncio
import itertools
import random
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from bare_trainer import playing_trainer
from fake_engine import FakeEngine
from skyrl.train.dataset import PromptDataset
from skyrl.train.utils.trainer_utils import build_dataloader
from test_results import room_for

from skyrl_maze import dataset, recorder
from skyrl_maze.evaluate import figures, metrics
from skyrl_maze.maze import generate_maze
from skyrl_maze.narrator import Narrator
from skyrl_maze.recorder import EvaluationRecorder
from skyrl_maze.results import read_result, step_folder
from skyrl_maze.runlog import EventReader, RunLog, read_metrics

# Said by torchdata's loader to torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

MAZES = [generate_maze(5, seed) for seed in (0, 1, 2, 3, 5)]
SAYINGS = [f"<action>{word}</action>" for word in (*["right", "up", "left", "down"] * 5, "hm", "stop")]

ROOM = "generator.eval_sampling_params.max_generate_length=40"


class Run:
    """A trainer of the rehearsal that evaluates on five mazes, three samples each, two mazes a batch."""

    def __init__(self, root, model, *settings):
        over = ("trainer.eval_batch_size=2", "generator.eval_n_samples_per_prompt=3", ROOM, *settings)
        self.trainer, self.root = playing_trainer(model, *over), root
        self.recorder, self.asked = EvaluationRecorder(root, RunLog(root)), Counter()
        self.trainer._callback_handler.callbacks = [self.recorder, Narrator(RunLog(root))]
        self.generator = self.trainer.generator
        self.generator._observe = self.recorder.observe
        self.generator.max_turns = self.trainer.cfg.generator.max_turns = 16
        engine = self.generator.inference_engine_client
        assert isinstance(engine, FakeEngine)
        tokenizer = self.trainer.tokenizer
        said = [tokenizer.encode(f"{text}<|im_end|>") for text in SAYINGS]

        def answer(prompt, room):
            """Drawn for this prompt and how often it came, whatever else is asked meanwhile."""
            key = repr(prompt)
            self.asked[key] += 1
            return random.Random(f"{key} {self.asked[key]}").choice(said)[:room], "stop"

        engine.answer = answer
        self.engine = engine
        path = root / "eval.parquet"
        dataset.write_rows(path, dataset.rows(MAZES, "mine"))
        rows = PromptDataset([str(path)], tokenizer, 512, num_workers=1)
        self.trainer.eval_dataloader = build_dataloader(self.trainer.cfg, rows, is_train=False)

    def evaluate(self, step):
        """What SkyRL's `train` does around an evaluation; returns the metrics that its tracker gets."""
        trainer = self.trainer
        trainer.global_step = step
        trainer._fire("on_eval_start")
        found = asyncio.run(trainer.eval())
        trainer._fire("on_eval_end", metrics=found)
        trainer._fire("on_log", logs=found)
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def run(tmp_path, model):
    return Run(tmp_path, model)


def eval_metrics(logged):
    names = ("solve_rate", "solve_rate_low", "solve_rate_high", "spl", "mean_excess_steps", "errors")
    counts = ("turns", "parse_failures", "wall_bumps")
    wanted = {f"eval/{name}" for name in (*names, *counts)}
    return {name: value for name, value in logged.items() if name in wanted}


def test_the_log_says_what_the_folder_says(run):
    logged = run.evaluate(5)
    result = read_result(run.root)
    assert result.folder == step_folder(run.root, 5)
    assert eval_metrics(logged) == metrics(figures(result.episodes))
    assert 0 < logged["eval/solve_rate"] < 1, "an evaluation that is worth the comparison"
    [record] = read_metrics(run.root)
    assert (record["step"], eval_metrics(record)) == (5, eval_metrics(logged))
    # SkyRL's own way to the same figures, through `Episode.metrics`.
    for ours, theirs in (("solve_rate", "success"), ("spl", "spl")):
        assert logged[f"eval/{ours}"] == pytest.approx(logged[f"eval/all/environment/{theirs}"])
    assert logged["eval/wall_bumps"] == pytest.approx(logged["eval/all/environment/wall_bumps"] * 15)


def test_every_sample_of_every_maze_has_its_place(run):
    run.evaluate(0)
    episodes = read_result(run.root).episodes
    assert [(e.index, e.sample) for e in episodes] == [(i, s) for i in range(5) for s in range(3)]
    assert [e.maze for e in episodes[::3]] == [maze.to_text() for maze in MAZES]
    assert all(e.seconds is not None and e.error is None for e in episodes)
    assert {turn.text for e in episodes for turn in e.turns} <= set(SAYINGS)


def test_the_conditions_are_those_of_the_run(run):
    run.trainer.generator.adapter_version = "5.1"
    run.evaluate(5)
    summary = read_result(run.root).summary
    assert (summary.step, summary.adapter, summary.endpoint, summary.mazes) == (5, "5.1", None, None)
    assert (summary.goal_rule, summary.max_turns, summary.grammar, summary.theme) == (
        *("reach", 16, "keyword", "tokens"),
    )
    assert (summary.policy, summary.temperature) == ("skyrl-maze/tiny-qwen3-vl", 1.0)


def test_a_step_that_is_evaluated_again_has_the_newer_result(run):
    run.evaluate(5)
    first = read_result(run.root)
    again = run.evaluate(5)
    second = read_result(run.root)
    assert second.episodes != first.episodes
    assert eval_metrics(again) == metrics(second.summary)
    assert len(list((run.root / "evaluations").iterdir())) == 1


def test_a_lost_episode_counts_as_unsolved(tmp_path, model):
    run = Run(tmp_path, model, "generator.rollouts.retries=0")

    calls = itertools.count()

    def trouble():
        if next(calls) in (7, 40, 50):
            raise ConnectionError("the engine is gone")

    run.engine.trouble = trouble
    logged = run.evaluate(1)
    episodes = read_result(run.root).episodes
    lost = [episode for episode in episodes if episode.error is not None]
    assert len(lost) == 3
    assert len(episodes) == 15
    assert logged["eval/errors"] == len(lost)
    assert all("engine" in episode.error and not episode.success for episode in lost)
    solved = sum(episode.success for episode in episodes)
    assert logged["eval/solve_rate"] == solved / 15, "not only of those that were not lost"


def test_an_episode_whose_environment_never_began_is_there(run):
    kept = []

    def take(batch, output):
        output["records"][1], output["masked_because"][1] = None, "environment: no thread"
        kept.append(len(batch["prompts"]))
        run.recorder.observe(batch, output)

    run.generator._observe = take
    run.evaluate(1)
    episodes = read_result(run.root).episodes
    assert (episodes[1].turns, episodes[1].error) == ((), "environment: no thread")
    assert len(kept) == 3


def test_training_batches_are_not_taken(run):
    batch = {"prompts": [0], "batch_metadata": SimpleNamespace(training_phase="train")}
    run.recorder.observe(batch, {})
    run.recorder.observe({"prompts": [0]}, {})
    assert run.recorder._taken == []


def test_without_mazes_nothing_is_written_and_skyrls_rate_stays(run):
    run.generator._observe = lambda _batch, _output: None
    logged = run.evaluate(1)
    assert not (run.root / "evaluations").exists()
    assert logged["eval/solve_rate"] == logged["eval/all/environment/solve_rate"]
    assert "eval/spl" not in logged


def test_figures_are_logged_once(run):
    run.evaluate(1)
    logs = {"loss": 1.0}
    run.trainer._fire("on_log", logs=logs)
    assert logs == {"loss": 1.0}


def test_a_full_disk_is_one_line_and_costs_no_figure(run):
    events = EventReader(run.root)
    with room_for(3500):
        logged = run.evaluate(5)
    assert "eval/solve_rate_low" in logged
    notes = [event["text"] for event in events.new() if event["event"] == "note"]
    assert len(notes) == 1
    assert notes[0].startswith("the evaluation is not kept: cannot write the evaluation ")
    assert not step_folder(run.root, 5).exists()
    assert run.evaluate(6)
    assert read_result(run.root).summary.step == 6


def test_a_disk_that_hangs_is_not_waited_for(tmp_path, model, monkeypatch):
    run = Run(tmp_path, model)
    run.recorder._write_limit_s = 0.05
    hung = threading.Event()
    monkeypatch.setattr(recorder, "write_result", lambda *_: hung.wait(60))
    events = EventReader(run.root)
    assert "eval/spl" in run.evaluate(5)
    hung.set()
    [note] = [event["text"] for event in events.new() if event["event"] == "note"]
    assert note.endswith("takes longer than 0.05 s; check its disk")


def test_a_fault_of_this_package_does_not_end_training(run, monkeypatch):
    def fail(_records):
        raise KeyError("oh")

    monkeypatch.setattr(recorder, "figures", fail)
    events = EventReader(run.root)
    logged = run.evaluate(5)
    assert logged["eval/solve_rate"] == logged["eval/all/environment/solve_rate"]
    assert [e["text"] for e in events.new() if e["event"] == "note"] == ["the evaluation is not kept: 'oh'"]
