"""What the launcher must know of the puzzle: its settings, its boards, and what its episodes show."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skyrl.train.config.config import BaseConfig, DataConfig, EnvironmentConfig, SkyRLGymConfig

from skyrl_maze import tiny
from skyrl_maze.console import Progress
from skyrl_maze.dataset import write_rows
from skyrl_maze.settings import TrainConfig
from skyrl_maze.task import LongestMessages, Task
from sliding_puzzle.env import ENV_ID, SlidingPuzzleConfig, SlidingPuzzleEnv, answer, register
from sliding_puzzle.puzzle import SLIDES, Board, draw


@dataclass
class BoardsConfig(BaseConfig):
    """The boards of a run: distinct ones, dealt to training and evaluation."""

    folder: str = "data/boards"
    size: int = 3
    """Cells along each side."""
    slides: int = 5
    """What a board needs at most."""
    train: int = 40
    eval: int = 10
    seed: int = 0


@dataclass
class PuzzleDataConfig(DataConfig):
    boards: BoardsConfig = field(default_factory=BoardsConfig)


@dataclass
class PuzzleGymConfig(SkyRLGymConfig):
    sliding_puzzle: SlidingPuzzleConfig = field(default_factory=SlidingPuzzleConfig)


@dataclass
class PuzzleEnvironmentConfig(EnvironmentConfig):
    env_class: str = ENV_ID
    skyrl_gym: PuzzleGymConfig = field(default_factory=PuzzleGymConfig)


@dataclass
class PuzzleTrainConfig(TrainConfig):
    """The settings of a run on puzzles."""

    data: PuzzleDataConfig = field(default_factory=PuzzleDataConfig)
    environment: PuzzleEnvironmentConfig = field(default_factory=PuzzleEnvironmentConfig)


class SlidingPuzzleTask(Task[PuzzleTrainConfig]):
    """Boards to be put in order by looking at them."""

    env_class = ENV_ID
    config = PuzzleTrainConfig

    def register(self) -> None:
        register()

    def rows(self, cfg: PuzzleTrainConfig) -> int:
        return cfg.data.boards.train

    def write_data(self, cfg: PuzzleTrainConfig) -> tuple[Path, Path]:
        boards = cfg.data.boards
        drawn = _boards(boards)
        # The name holds all that the content follows from, so that other settings meet no old file.
        name = f"{boards.size}x{boards.size}-{boards.slides}-{boards.train}-{boards.eval}-{boards.seed}"
        train, evaluation = (
            Path(boards.folder).absolute() / f"{kind}-{name}.parquet" for kind in ("train", "eval")
        )
        write_rows(train, [_row(board) for board in drawn[: boards.train]])
        write_rows(evaluation, [_row(board) for board in drawn[boards.train :]])
        return train, evaluation

    def longest_messages(self, cfg: PuzzleTrainConfig) -> LongestMessages:
        env = _env(cfg, Board.solved(cfg.data.boards.size).slide("up"), cfg.generator.max_turns + 1)
        opening, _ = env.init()
        observations = [env.step(said)["observations"] for said in ("", answer("left"))]
        return LongestMessages(opening, observations)

    def problems(self, cfg: PuzzleTrainConfig) -> list[str]:
        boards, cell_px = cfg.data.boards, cfg.environment.skyrl_gym.sliding_puzzle.cell_px
        if not 2 <= boards.size <= 4 or not 1 <= boards.slides <= 12:
            return [
                f"data.boards: size={boards.size} must be from 2 to 4, slides={boards.slides} from 1 to 12"
            ]
        found = []
        try:
            _boards(boards)
        except ValueError as error:
            found.append(f"data.boards: {error}; lower train or eval, or raise slides")
        if not 4 <= cell_px <= 512:
            found.append(f"environment.skyrl_gym.sliding_puzzle.cell_px={cell_px}: must be from 4 to 512")
        return found

    def warnings(self, cfg: PuzzleTrainConfig) -> list[str]:
        turns, slides = cfg.generator.max_turns, cfg.data.boards.slides
        if turns >= slides:
            return []
        return [f"generator.max_turns={turns}: some boards need {slides} slides"]

    def folders(self, cfg: PuzzleTrainConfig) -> list[str]:
        return [cfg.data.boards.folder]

    def build_model(self, cfg: PuzzleTrainConfig, progress: Progress) -> Path | None:
        if cfg.trainer.policy.model.path != tiny.MODEL_ID:
            return None
        progress.doing("building the tiny Qwen3-VL")
        warm_up = tiny.WarmUp(steps=cfg.run.warm_up_steps)
        puzzle, boards = asdict(cfg.environment.skyrl_gym.sliding_puzzle), asdict(cfg.data.boards)
        settings = [ENV_ID, puzzle, boards, cfg.generator.max_turns]
        return tiny.build_tiny_model(settings, _random_play(cfg, warm_up), warm_up, progress.warming_up)


def _boards(boards: BoardsConfig) -> list[Board]:
    return draw(boards.size, boards.slides, boards.train + boards.eval, boards.seed)


def _row(board: Board) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "A sliding puzzle."}]  # the environment writes its own
    return {"prompt": prompt, "env_class": ENV_ID, "board": board.to_text()}


def _env(cfg: PuzzleTrainConfig, board: Board, max_turns: int) -> SlidingPuzzleEnv:
    extras = {"board": board.to_text(), "max_turns": max_turns}
    return SlidingPuzzleEnv(cfg.environment.skyrl_gym.sliding_puzzle, extras)


def _random_play(cfg: PuzzleTrainConfig, warm_up: tiny.WarmUp) -> Iterator[list[dict[str, Any]]]:
    boards = _boards(cfg.data.boards)[: cfg.data.boards.train]
    return tiny.random_episodes(
        lambda rng: _env(cfg, rng.choice(boards), cfg.generator.max_turns),
        lambda rng: answer(rng.choice(list(SLIDES))),
        warm_up,
    )
