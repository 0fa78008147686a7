"""The maze as a Gymnasium environment, for agents that see pixels and do not speak.

Needs the optional package `gymnasium`: `pip install 'skyrl_maze[gymnasium]'`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_maze.actions import ACTIONS, STOP, Action
from skyrl_maze.episode import Episode
from skyrl_maze.errors import ConfigError, MazeError, SetupError
from skyrl_maze.maze import Maze, check_size, generate_maze
from skyrl_maze.render import picture_side_px, render
from skyrl_maze.reward import RewardWeights

try:
    import gymnasium
    from gymnasium import spaces
except ImportError as error:
    raise SetupError(
        f"cannot use skyrl_maze.gymnasium_env: {error}; install it with: pip install 'skyrl_maze[gymnasium]'"
    ) from error

ENV_ID = "skyrl_maze/Maze-v0"


class MazeGymnasiumEnv(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """A maze to be walked by looking at it.

    Description:
        The rules are those of `MazeEnv`, from the same `Episode`. `reset` draws a new maze from the seeded
        generator of the environment, or takes `options={"maze": text}` with the text of `Maze.to_text()`.

    Actions:
        `Discrete(5)`: 0 right, 1 up, 2 left, 3 down, 4 stop.

    Observation:
        `Box(0, 255, [H, W, 3], uint8)`: the picture of the maze as it is, H = W = size * cell_px.

    Reward:
        See `reward`; an action of a `Discrete` space is always understood, so `format` is paid in full.

    Termination:
        Terminated: stop, or under goal rule `reach` arriving at the goal. Truncated: turn `max_turns` ends
        without either. A step after the end raises MazeError.

    Configuration:
        size, braid: see `maze.generate_maze`.
        theme, cell_px: see `render.render`.
        goal_rule: see `actions.GoalRule`.
        max_turns: the turn budget; None is no budget.
        success_weight, format_weight, shaping_weight: see `reward.RewardWeights`.
        render_mode: None or "rgb_array".

    `info` holds `position` (row, col), `distance` (moves to the goal) and `action_mask` (int8 [5], 1 for stop
    and for each move that no wall blocks).

    Raises:
        ConfigError: the goal rule, the turn budget, a weight or the render mode cannot be used.
        MazeError: the size, the braid, the theme or the cell size cannot be used.
    """

    # Not a ClassVar: the base class declares it otherwise.
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        size: int = 9,
        braid: float = 0.0,
        theme: str = "tokens",
        cell_px: int | None = None,
        goal_rule: str = "stop",
        max_turns: int | None = 100,
        success_weight: float = 1.0,
        format_weight: float = 0.0,
        shaping_weight: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(f"unknown render_mode {render_mode!r}; choose None or 'rgb_array'")
        self.size = check_size(size)
        self.braid, self.theme, self.cell_px = braid, theme, cell_px
        self.goal_rule, self.max_turns = goal_rule, max_turns
        self.weights = RewardWeights(success_weight, format_weight, shaping_weight)
        self.render_mode = render_mode
        side_px = picture_side_px(size, theme, cell_px)
        self.action_space = spaces.Discrete(len(ACTIONS))
        self.observation_space = spaces.Box(0, 255, (side_px, side_px, 3), np.uint8)
        # An episode stands from the start, so that every bad argument shows here.
        self._episode = self._new_episode(generate_maze(size, 0, braid))
        self._started = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode in a new maze, or in `options["maze"]`.

        Raises:
            ConfigError: `options` has another key.
            MazeError: the given maze is not valid or not of this environment's size.
        """
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"maze"}:
            raise ConfigError(f"unknown reset options {sorted(map(str, unknown))}; the only one is 'maze'")
        if options.get("maze") is None:
            maze = generate_maze(self.size, int(self.np_random.integers(2**63)), self.braid)
        else:
            maze = Maze.from_text(options["maze"])
        if maze.size != self.size:
            raise MazeError(
                f"cannot reset to a maze of size {maze.size}: this environment shows mazes of size "
                f"{self.size}; make one with size={maze.size}"
            )
        self._episode, self._started = self._new_episode(maze), True
        return self._picture(), self._info()

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Take one action.

        Raises:
            MazeError: the action is not one of 0 to 4, the episode has ended, or `reset` was never called.
        """
        if not self._started:
            raise MazeError("cannot step: the episode has not begun; call reset() first")
        if not self.action_space.contains(action):
            raise MazeError(f"cannot take action {action!r}: give an int from 0 to {len(ACTIONS) - 1}")
        turn = self._episode.take(ACTIONS[int(action)])
        return self._picture(), turn.reward, turn.terminated, turn.truncated, self._info()

    def render(self) -> NDArray[np.uint8] | None:
        """The picture, uint8 [H, W, 3], in render mode `rgb_array`; else None."""
        return self._picture() if self.render_mode == "rgb_array" else None

    def _new_episode(self, maze: Maze) -> Episode:
        return Episode(maze, self.goal_rule, self.max_turns, self.weights)

    def _picture(self) -> NDArray[np.uint8]:
        return render(self._episode.maze, self._episode.position, self.theme, self.cell_px)

    def _info(self) -> dict[str, Any]:
        maze, position = self._episode.maze, self._episode.position

        def allowed(action: Action) -> bool:
            return action is STOP or maze.step(position, action) != position

        return {
            "position": position,
            "distance": int(maze.distance_to_goal[position]),
            "action_mask": np.array([allowed(action) for action in ACTIONS], dtype=np.int8),
        }


def register_gymnasium() -> None:
    """Make the environment known to Gymnasium as `skyrl_maze/Maze-v0`; calling it again does nothing."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(id=ENV_ID, entry_point="skyrl_maze.gymnasium_env:MazeGymnasiumEnv")
