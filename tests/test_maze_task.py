"""The maze as a task: what it asks of the launcher, and what it says of settings that cannot work."""

from skyrl_maze import _compat, dataset

_compat.install()

from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.maze_task import MazeTask  # noqa: E402

TASK = MazeTask()


def cfg_of(recipe, *overrides):
    return build_config([f"+recipe={recipe}", *overrides])


def test_a_budget_below_the_longest_path_is_warned_of():
    assert TASK.warnings(cfg_of("maze")) == []
    [warning] = TASK.warnings(cfg_of("maze", "generator.max_turns=15"))
    assert warning == (
        "generator.max_turns=15 lets at most 50 of 64 evaluation mazes be solved (78.1%); 17 turns allow all"
    )
    cfg = cfg_of("maze_cpu")
    assert TASK.warnings(cfg) == []
    longest = max(dataset.turns_needed(m, "reach") for m in dataset.mazes_of(cfg.data.mazes.eval))
    assert longest <= cfg.generator.max_turns


def test_both_sets_are_written(tmp_path):
    cfg = cfg_of("maze_cpu", f"run.root={tmp_path}")
    train, evaluation = TASK.write_data(cfg)
    assert train.parent == evaluation.parent == tmp_path / "data"
    assert TASK.folders(cfg) == [str(tmp_path / "data")]
    assert TASK.rows(cfg) == 12


def test_the_longest_messages_show_the_largest_maze_in_every_kind_of_turn():
    cfg = cfg_of("maze_cpu", "data.mazes.train.sizes=[5, 9]")
    longest = TASK.longest_messages(cfg)
    texts = [message["content"][1]["text"] for messages in longest.observations for message in messages]
    assert "9 by 9 cells" in longest.opening[-1]["content"][1]["text"]
    assert len(texts) == 9, "four moves, all of them at once, and four that are not understood"
    assert len(set(texts)) > 4


def test_a_model_that_lies_somewhere_is_not_built():
    assert TASK.build_model(cfg_of("maze"), progress=None) is None
