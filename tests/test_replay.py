"""GIFs: one frame for each position, with the pictures that the model saw."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image, ImageSequence
from walks import solved, walked

from skyrl_maze.errors import RecordError
from skyrl_maze.maze import Maze
from skyrl_maze.render import THEMES, render
from skyrl_maze.replay import FRAME_MS, LAST_FRAME_MS, encode_gif, write_gif


@pytest.mark.parametrize("theme", THEMES)
def test_the_frames_are_the_pictures(theme):
    record = solved(seed=3, size=7)
    maze = Maze.from_text(record.maze)
    positions = [maze.start, *(turn.position for turn in record.turns)]
    distinct = [position for position, _ in itertools.groupby(positions)]  # stop moves nothing
    with Image.open(io.BytesIO(encode_gif(record, theme))) as gif:
        assert gif.info["loop"] == 0
        frames = [(np.array(f.convert("RGB")), f.info["duration"]) for f in ImageSequence.Iterator(gif)]
    assert len(frames) == len(distinct)
    for (frame, _), position in zip(frames, distinct, strict=True):
        assert np.array_equal(frame, render(maze, position, theme))
    assert sum(duration for _, duration in frames) == FRAME_MS * len(record.turns) + LAST_FRAME_MS


def test_an_episode_without_turns_is_one_picture(tmp_path):
    path = write_gif(tmp_path / "gifs", walked([], index=7, sample=2), "tokens")
    assert path == tmp_path / "gifs" / "maze-007-2.gif"
    with Image.open(path) as gif:
        assert getattr(gif, "n_frames", 1) == 1


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "gifs").touch()
    with pytest.raises(RecordError, match="cannot write"):
        write_gif(tmp_path / "gifs", solved(), "tokens")
