"""What reaches Ray's gauges, and that nothing which goes wrong there reaches the trainer."""

import shutil
import time
from types import SimpleNamespace

import pytest

from skyrl_maze import _compat

_compat.install()

from skyrl.train.utils.callbacks import CallbackInput, TrainingControl  # noqa: E402

from skyrl_maze import exporter  # noqa: E402
from skyrl_maze.exporter import MetricsExporter  # noqa: E402
from skyrl_maze.gauges import TABLE  # noqa: E402
from skyrl_maze.runlog import EventReader, RunLog  # noqa: E402

URLS = ["http://192.0.2.1:8080/metrics"]


class FakeGauge:
    """Stands in for `ray.util.metrics.Gauge`, and keeps its rules for tags."""

    made: dict[str, "FakeGauge"]

    def __init__(self, name, description, tag_keys):
        assert name not in self.made, "a gauge is made once"
        self.description, self.tag_keys, self.values = description, tag_keys, {}
        self.made[name] = self

    def set(self, value, tags):
        assert set(tags) == set(self.tag_keys)
        assert all(isinstance(tag, str) for tag in tags.values())
        self.values[tuple(tags.values())] = value


@pytest.fixture
def gauges(monkeypatch):
    monkeypatch.setattr(FakeGauge, "made", {}, raising=False)
    monkeypatch.setattr(exporter, "Gauge", FakeGauge)
    monkeypatch.setattr(exporter, "discover_ray_metrics_urls", lambda: URLS)
    return FakeGauge.made


@pytest.fixture
def tell(tmp_path):
    """Tells an exporter what a trainer does."""
    exporting, control = MetricsExporter(tmp_path, "mine", RunLog(tmp_path)), TrainingControl()

    def told(event, step, logs=None):
        now = CallbackInput(global_step=step, epoch=0, total_steps=6, steps_per_epoch=3, logs=logs)
        trainer = SimpleNamespace(
            all_metrics={"adapter/step": 4, "adapter/attempt": 1}, all_timings={"save_checkpoints": 2.5}
        )
        getattr(exporting, event)(trainer, now, control)

    return told


def values(gauges):
    return {name.removeprefix("skyrl_maze_"): gauge.values for name, gauge in gauges.items()}


def test_a_run_is_seen_from_its_start(gauges, tell, tmp_path):
    events, before_s = EventReader(tmp_path), time.time()
    tell("on_train_start", 4)
    found = values(gauges)
    assert (found["step"], found["planned_steps"]) == ({("mine",): 4}, {("mine",): 6})
    assert (found["adapter_step"], found["adapter_attempt"]) == ({("mine",): 4}, {("mine",): 1})
    assert before_s <= found["last_step_timestamp_seconds"][("mine",)] <= time.time()
    assert found["run_folder_size_bytes"] == {("mine",): shutil.disk_usage(tmp_path).total}
    [event] = events.new()
    assert (event["event"], event["urls"]) == ("exporting_metrics", URLS)


def test_a_gauge_holds_the_last_step(gauges, tell):
    tell("on_log", 1, {"train/solve_rate": 0.25, "generate/masked_episodes": 3, "generate/lost_engine": 3})
    tell("on_log", 2, {"train/solve_rate": 0.5, "generate/masked_episodes": 0})
    found = values(gauges)
    assert (found["step"], found["train_solve_ratio"]) == ({("mine",): 2}, {("mine",): 0.5})
    assert found["lost_episodes"][("mine", "engine")] == 0
    assert {tags[0] for gauge in found.values() for tags in gauge} == {"mine"}


def test_a_checkpoint_is_no_step(gauges, tell):
    tell("on_save", 3)
    assert values(gauges) == {"checkpoint_seconds": {("mine",): 2.5}}


def test_every_metric_of_the_table_gets_its_gauge(gauges, tell):
    tell("on_log", 1, {exported.logged: 1.0 for exported in TABLE})
    assert {name: gauge.description for name, gauge in gauges.items()} == {
        exported.gauge: exported.description for exported in TABLE
    }
    assert all(gauge.values for gauge in gauges.values())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("Gauge", "exporting metrics failed: RuntimeError: no agent"),
        ("discover_ray_metrics_urls", "finding Ray's metrics endpoints failed: RuntimeError: no agent"),
    ],
)
def test_what_fails_is_said_once_and_goes_no_further(gauges, tell, tmp_path, monkeypatch, broken, said):
    def fail(*_):
        raise RuntimeError("no agent")

    monkeypatch.setattr(exporter, broken, fail)
    events = EventReader(tmp_path)
    for _ in range(3):
        tell("on_train_start", 0)
        tell("on_log", 1, {"train/solve_rate": 0.25})
    assert [e["text"] for e in events.new() if e["event"] == "note"] == [f"{said}; training goes on"]


def test_a_file_system_that_cannot_be_asked_costs_its_two_metrics_alone(gauges, tell, tmp_path, monkeypatch):
    def fail(_path):
        raise OSError("stale file handle")

    monkeypatch.setattr(exporter.shutil, "disk_usage", fail)
    events = EventReader(tmp_path)
    tell("on_log", 1, {"train/solve_rate": 0.25})
    tell("on_log", 2, {"train/solve_rate": 0.5})
    assert values(gauges)["train_solve_ratio"] == {("mine",): 0.5}
    assert not {name for name in values(gauges) if name.startswith("run_folder")}
    assert ["stale file handle" in event["text"] for event in events.new()] == [True]


def test_rays_own_gauge_takes_names_descriptions_and_tags():
    """Its checks need no cluster, and a name that it does not take it only warns of."""
    for exported in TABLE:
        tags = {"run_id": "a", **({"cause": exported.cause} if exported.cause else {})}
        exporter.Gauge(exported.gauge, exported.description, tuple(tags)).set(1.0, tags)
