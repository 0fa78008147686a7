"""What HyperPod's agent is told, with the real toolkit and a stand-in for the agent."""

import os
import subprocess
import sys
from pathlib import Path

import hang_agent
import pyarrow.compute
import pytest
from toolkit_for_ray_on_sagemaker_ai.log_monitoring import _client

from skyrl_maze import hang_detection
from skyrl_maze.hang_detection import AGENT_HOST, END, HangConfig, Progress

HOST = "127.0.0.89"
# The fields that the toolkit's README names.
FIELDS = {
    *("name", "type", "enabled", "log_pattern", "timeout_minutes", "start_timeout_minutes", "stop_pattern"),
    *("metric_evaluation_data_points", "fault_on_match"),
}


def found(pattern: str, lines: list[str]) -> list[bool]:
    """In which lines RE2, the agent's engine, finds a pattern."""
    answer: list[bool] = pyarrow.compute.match_substring_regex(lines, pattern).to_pylist()
    return answer


class Rank:
    """A process's stdout as Ray keeps it; what was printed on it can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved = os.dup(1)
        with path.open("w") as file:
            os.dup2(file.fileno(), 1)
        self.progress = Progress()
        os.dup2(self.saved, 1)  # as SkyRL turns it away
        os.close(self.saved)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A rank of a pod that has the agent's address; Ray's ids are made up."""
    monkeypatch.setenv(AGENT_HOST, HOST)
    monkeypatch.setattr(_client, "_get_job_id", lambda: "01000000")
    monkeypatch.setattr(_client, "_get_worker_id", lambda: "5eed")
    monkeypatch.setattr(_client, "_RETRY_DELAY", 0)
    monkeypatch.setenv("LOCAL_RANK", "2")  # as SkyRL has it, the number of a GPU
    return Rank(tmp_path / "worker.out")


def registered(rank: Rank, config: HangConfig) -> list[str]:
    thread = rank.progress.watch(config)
    assert thread is not None
    thread.join(60)
    return rank.lines()


def test_the_agent_is_told_the_rules(rank: Rank) -> None:
    config = HangConfig(minutes=7, start_minutes=9, action="cancel")
    with hang_agent.serve(HOST) as told:
        assert registered(rank, config) == ["skyrl_maze: hung-job detection: configured"]
    assert told == [
        {
            "path": "/configure-hang-detection-rules",
            "job_id": "01000000",
            "worker_id": "5eed",
            "rules_content": {
                "enabled": True,
                "rules": config.rules(),
                "action_policy": {"action": "cancel"},
            },
        }
    ]


def test_the_rules_fit_what_a_rank_prints(rank: Rank) -> None:
    with hang_agent.serve(HOST):
        registered(rank, HangConfig())
    for step in (0, 1, 160):
        rank.progress.step(step)
    rank.progress.end()
    (rule,) = HangConfig().rules()
    assert found(rule["log_pattern"], rank.lines()) == [False, True, True, True, False]
    assert found(rule["stop_pattern"], rank.lines()) == [False, False, False, False, True]


def test_the_rules_are_what_the_toolkit_documents() -> None:
    (rule,) = HangConfig().rules()
    assert set(rule) <= FIELDS
    assert max(len(rule["log_pattern"]), len(rule["stop_pattern"])) <= 256
    assert {type(rule["timeout_minutes"]), type(rule["start_timeout_minutes"])} == {int}


def test_what_the_agent_refuses_is_said(rank: Rank) -> None:
    with hang_agent.serve(HOST, status=400):
        lines = registered(rank, HangConfig())
    assert lines == ["skyrl_maze: hung-job detection: error: log_pattern is refused"]


def test_an_agent_that_does_not_answer_is_said(rank: Rank) -> None:
    (line,) = registered(rank, HangConfig())
    assert line.startswith(
        "skyrl_maze: hung-job detection: warning: Could not reach monitoring service after 6"
    )


def test_a_toolkit_that_breaks_ends_no_run(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit_for_ray_on_sagemaker_ai import log_monitoring

    monkeypatch.delattr(log_monitoring, "LogMonitorConfig")
    (line,) = registered(rank, HangConfig())
    assert line.startswith("skyrl_maze: hung-job detection: error: AttributeError: ")


def test_a_rank_that_is_not_watched_says_nothing(rank: Rank) -> None:
    rank.progress.step(1)
    rank.progress.end()
    assert rank.lines() == []


_NOTHING = """
import sys
sys.modules.update(dict.fromkeys({missing}))  # an import of one of these fails
from skyrl_maze.hang_detection import HangConfig, Progress
progress = Progress()
print(progress.watch(HangConfig()))
progress.step(1)
progress.end()
print([name for name in ("toolkit_for_ray_on_sagemaker_ai", "requests", "ray") if sys.modules.get(name)])
"""


@pytest.mark.parametrize(
    ("missing", "host"), [("['toolkit_for_ray_on_sagemaker_ai']", HOST), ("[]", "")], ids=["toolkit", "agent"]
)
def test_without_toolkit_or_agent_nothing_happens(missing: str, host: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _NOTHING.format(missing=missing)],
        env={**os.environ, AGENT_HOST: host},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("None\n[]\n", "")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (HangConfig(minutes=0), "minutes=0: must be from 1 to 10080"),
        (HangConfig(start_minutes=10081), "start_minutes=10081: must be from 1 to 10080"),
        (
            HangConfig(action="cancle"),
            "action='cancle'; did you mean 'cancel'?; allowed: notify, cancel",
        ),
    ],
)
def test_what_cannot_work_is_said(config: HangConfig, problem: str) -> None:
    assert config.problems() == [problem]
    assert HangConfig().problems() == []


def test_the_end_is_no_progress() -> None:
    assert found(hang_detection.PROGRESS, [END]) == [False]
