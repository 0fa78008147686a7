"""Rows of demonstrations: read back by `datasets` and by the processor, with every picture in its place."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from skyrl_maze import tiny
from skyrl_maze.actions import GoalRule, Grammar
from skyrl_maze.demo_rows import PLACEHOLDERS, dataset_info, llama_factory_row, trl_row, trl_schema
from skyrl_maze.demonstrations import Demonstration, DemoSettings, demonstrate
from skyrl_maze.env import MazeConfig
from skyrl_maze.errors import DatasetError
from skyrl_maze.maze import generate_maze
from skyrl_maze.render import THEMES

EVERY_KIND = list(itertools.product(Grammar, GoalRule, THEMES))


def demo_of(config: MazeConfig | None = None, size: int = 7, detours: float = 0.3) -> Demonstration:
    return demonstrate(generate_maze(size, 5), DemoSettings(config or MazeConfig(), 30, detours))


def texts(messages: Any) -> list[str]:
    """What each message says, pictures left out."""
    return [
        m["content"]
        if isinstance(m["content"], str)
        else "".join(p["text"] for p in m["content"] if p["type"] == "text")
        for m in messages
    ]


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoProcessor

    folder = tmp_path_factory.mktemp("model")
    tiny.save_random_model(folder, texts(demo_of().messages), patch_px=16)
    return AutoProcessor.from_pretrained(folder)


def loaded(path: Path, rows: list[dict[str, Any]], cache: Path, per_turn: bool = False) -> Any:
    """The rows as `datasets` reads them from a parquet file."""
    import datasets

    pq.write_table(pa.Table.from_pylist(rows, trl_schema(per_turn)), path)
    return datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(cache))


def encoded(processor: Any, messages: list[dict[str, Any]], pictures: list[Any]) -> tuple[str, int, int]:
    """The text of a chat for the processor, how many picture tokens it has, and how many its grids ask for.

    Pictures are put into their places as TRL does it.
    """
    left = iter(pictures)
    filled = [
        {**m, "content": [{**p, "image": next(left)} if p["type"] == "image" else p for p in m["content"]]}
        for m in messages
    ]
    assert next(left, None) is None
    batch = processor.apply_chat_template([filled], tokenize=True, return_dict=True, return_tensors="pt")
    ids = batch["input_ids"][0]
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert len(batch["image_grid_thw"]) == len(pictures)
    wanted = int(batch["image_grid_thw"].prod(dim=1).sum()) // tiny.MERGE**2
    return processor.tokenizer.decode(ids), int((ids == pad).sum()), wanted


@pytest.mark.slow
@pytest.mark.parametrize(("grammar", "goal_rule", "theme"), EVERY_KIND)
def test_datasets_and_the_processor_read_a_row(
    processor: Any, tmp_path: Path, grammar: str, goal_rule: str, theme: str
) -> None:
    demo = demo_of(MazeConfig(theme, grammar=grammar, goal_rule=goal_rule))
    [row] = loaded(tmp_path / "demos.parquet", [trl_row(demo)], tmp_path)
    assert texts(row["messages"]) == texts(demo.messages)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * len(demo.right)
    assert [m["loss"] for m in row["messages"] if m["role"] == "assistant"] == list(demo.right)
    for picture, png in zip(row["images"], demo.pictures, strict=True):
        assert isinstance(picture, Image.Image)
        assert np.array_equal(picture.convert("RGB"), Image.open(io.BytesIO(png)).convert("RGB"))

    text, tokens, wanted = encoded(processor, row["messages"], row["images"])
    side = demo.maze.size if theme == "tokens" else round(demo.maze.size * 25 / 32)
    assert tokens == wanted == len(demo.pictures) * side**2
    said = [
        f"<|im_start|>{m['role']}\n{'<|vision_start|>' * (m['role'] == 'user')}{t}<|im_end|>\n"
        for m, t in zip(demo.messages, texts(demo.messages), strict=True)
    ]
    # What the processor made of the pictures stands between the mark and the text.
    assert text.replace("<|image_pad|>", "").replace("<|vision_end|>", "") == "".join(said)


@pytest.mark.slow
def test_a_row_for_each_answer_has_the_answer_apart(processor: Any, tmp_path: Path) -> None:
    demo = demo_of()
    parts = list(demo.up_to_each_answer())
    rows = loaded(tmp_path / "d.parquet", [trl_row(part, True) for part in parts], tmp_path, True)
    assert len(rows) == demo.right.count(True) > 3
    assert demo.wrong_turns > 0
    for row, part in zip(rows, parts, strict=True):
        assert texts([*row["prompt"], *row["completion"]]) == texts(part.messages)
        assert [m["role"] for m in row["completion"]] == ["assistant"]
        assert row["completion"][0]["loss"] is True
        assert {m["loss"] for m in row["prompt"]} <= {None, False}
        assert row["wrong_turns"] == part.wrong_turns
        _, tokens, wanted = encoded(processor, row["prompt"], row["images"])
        assert tokens == wanted == len(part.right) * 7**2


def test_what_is_known_of_an_episode_is_in_its_row() -> None:
    demo = demo_of(MazeConfig(goal_rule="reach"))
    facts = {
        "maze": demo.maze.to_text(),
        "maze_key": demo.maze.key,
        "size": 7,
        "shortest_path": len(demo.maze.shortest_path()),
        "goal_rule": "reach",
        "max_turns": 30,
        "wrong_turns": demo.wrong_turns,
    }
    row, flat = trl_row(demo), llama_factory_row(demo, [""] * len(demo.pictures))
    assert {name: row[name] for name in facts} == {name: flat[name] for name in facts} == facts
    assert list(row) == trl_schema().names
    assert list(trl_row(demo, True)) == trl_schema(True).names


@pytest.mark.parametrize(("grammar", "goal_rule", "theme"), EVERY_KIND)
def test_a_row_for_llama_factory_has_a_placeholder_for_each_picture(
    grammar: str, goal_rule: str, theme: str
) -> None:
    demo = demo_of(MazeConfig(theme, grammar=grammar, goal_rule=goal_rule))
    names = [f"{turn}.png" for turn in range(len(demo.pictures))]
    row = json.loads(json.dumps(llama_factory_row(demo, names)))
    assert row["images"] == names
    for message, text in zip(row["messages"], texts(demo.messages), strict=True):
        picture = "<image>" if message["role"] == "user" else ""
        assert message["content"] == picture + text
    assert [m["loss"] for m in row["messages"][1::2]] == list(demo.right)
    assert all("loss" not in m for m in row["messages"][::2])


def test_of_a_row_for_each_answer_the_last_one_is_learnt() -> None:
    for part in demo_of().up_to_each_answer():
        row = llama_factory_row(part, [""] * len(part.pictures), per_turn=True)
        loss = [m["loss"] for m in row["messages"][1::2]]
        assert loss == [False] * (len(loss) - 1) + [True]


@pytest.mark.parametrize("literal", PLACEHOLDERS)
def test_a_literal_placeholder_never_becomes_a_picture(processor: Any, tmp_path: Path, literal: str) -> None:
    template = tmp_path / "task.txt"
    template.write_text(f"Find the {literal} in the maze. $actions")
    demo = demo_of(MazeConfig(prompt_template=str(template)))
    assert literal in texts(demo.messages)[0]
    with pytest.raises(
        DatasetError, match=f"it holds {literal}, which would be taken for a picture of its own"
    ):
        llama_factory_row(demo, [""] * len(demo.pictures))

    [row] = loaded(tmp_path / "demos.parquet", [trl_row(demo)], tmp_path)
    text, tokens, wanted = encoded(processor, row["messages"], row["images"])
    assert f"Find the {literal} in the maze." in text
    assert tokens == wanted == len(demo.pictures) * 7**2


def test_the_words_are_kept_as_they_are(tmp_path: Path) -> None:
    """Nothing is escaped: quotes, tags, letters of any script, white space."""
    wording = '  <b>"Größe"</b> \\n {{ x }} 迷路 \t&amp; $$5'
    template = tmp_path / "task.txt"
    template.write_text(f"a{wording}b", encoding="utf-8")
    demo = demo_of(MazeConfig(prompt_template=str(template)))
    said = f"a{wording.replace('$$', '$')}b"
    [row] = loaded(tmp_path / "demos.parquet", [trl_row(demo)], tmp_path)
    assert row["messages"][0]["content"][1]["text"] == said
    flat = json.loads(json.dumps(llama_factory_row(demo, [""] * len(demo.pictures))))
    assert flat["messages"][0]["content"] == f"<image>{said}"


def test_dataset_info_names_the_columns() -> None:
    info = dataset_info("demos.jsonl")
    row = llama_factory_row(demo_of(), [])
    assert set(info["columns"].values()) <= set(row)
    tags = info["tags"]
    assert {m[tags["role_tag"]] for m in row["messages"]} == {tags["user_tag"], tags["assistant_tag"]}
    assert all(isinstance(m[tags["content_tag"]], str) for m in row["messages"])
