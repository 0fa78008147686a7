"""HyperPod's hung-job detection: which line shows that a run goes on, told to the agent of each GPU node.

The agent reads what Ray keeps of a worker's stdout. SkyRL turns a rank's output away from there, and logs its
own steps to stderr, so a rank prints a line of its own. Without agent or toolkit nothing is imported or said.

Source: https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-ray-hung-job-detection.html
"""

import importlib.util
import os
import threading
from dataclasses import dataclass
from typing import Any

from skyrl_maze import _compat
from skyrl_maze.errors import closest

AGENT_HOST = "HYPERPOD_JMA_HOST"
"""Names the node that the pod is on; the toolkit reads it, and would try localhost for a minute without."""
TOOLKIT = "toolkit_for_ray_on_sagemaker_ai"
ACTIONS = ("notify", "cancel")

# RE2, at most 256 characters, found anywhere in a line.
PROGRESS = r"skyrl_maze: the engines have the weights of step \d+"
END = "skyrl_maze: training is over"


@dataclass
class HangConfig:
    """When HyperPod calls a run hung, `run.hang` in a recipe."""

    minutes: int = 60
    """Minutes without a training step; an evaluation and a checkpoint may fall between two of them."""
    start_minutes: int = 60
    """Minutes from the start of the job to the first weights at the engines."""
    action: str = "notify"
    """`notify` writes an event; `cancel` also ends the process, so that the job fails and can be repeated."""

    def problems(self) -> list[str]:
        """What cannot work, one line a setting, each beginning with its name."""
        found = [
            f"{name}={getattr(self, name)}: must be from 1 to 10080"
            for name in ("minutes", "start_minutes")
            if not 1 <= getattr(self, name) <= 7 * 24 * 60
        ]
        if self.action not in ACTIONS:
            hint = closest(self.action, ACTIONS)
            found.append(f"action={self.action!r}{hint}; allowed: {', '.join(ACTIONS)}")
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The toolkit's rules, field by field as in its README."""
        return [
            {
                "name": "skyrl_maze_progress",
                "type": "log_pattern",
                "enabled": True,
                "log_pattern": PROGRESS,
                "timeout_minutes": self.minutes,
                "start_timeout_minutes": self.start_minutes,
                "stop_pattern": END,
            }
        ]


class Progress:
    """What a rank tells the agent; made before SkyRL turns the process's stdout away."""

    def __init__(self) -> None:
        expected = os.environ.get(AGENT_HOST) and importlib.util.find_spec(TOOLKIT)
        self._stdout = os.dup(1) if expected else None
        self._watched = False

    def watch(self, config: HangConfig) -> threading.Thread | None:
        """Tell the agent what to look for, in a thread: without an answer the toolkit tries for a minute.

        Returns:
            The thread; None where there is no agent or no toolkit.
        """
        if self._stdout is None:
            return None
        self._watched = True
        thread = threading.Thread(target=self._register, args=(config,), name="hang-detection", daemon=True)
        thread.start()
        return thread

    def _register(self, config: HangConfig) -> None:
        try:
            from toolkit_for_ray_on_sagemaker_ai import log_monitoring

            _compat.let_this_rank_tell()
            told = log_monitoring.LogMonitorConfig(rules=config.rules(), action=config.action)
            result = log_monitoring.SageMakerLogMonitoring(config=told).start().result
        except Exception as error:  # foreign code, of whatever version: no reason to end a run
            result = {"status": "error", "message": f"{type(error).__name__}: {error}"}
        self._say(f"skyrl_maze: hung-job detection: {': '.join(map(str, result.values()))}")

    def step(self, step: int) -> None:
        """The engines have the weights of a step."""
        self._say(f"skyrl_maze: the engines have the weights of step {step}")

    def end(self) -> None:
        """No further step comes, and that is no hang."""
        self._say(END)

    def _say(self, line: str) -> None:
        if self._watched and self._stdout is not None:
            os.write(self._stdout, f"{line}\n".encode())
