"""Demonstrations as the rows that trainers read.

Parquet is for TRL: `messages` whose content is a list of typed parts, and `images` in the order of their
places; or `prompt` and `completion`, of which TRL learns the second alone. Pictures are files within the
table, which `datasets` decodes. See "Dataset formats" in the documentation, `prepare_multimodal_messages` in
`trl/data_utils.py` and `DataCollatorForVisionLanguageModeling` in `trl/trainer/sft_trainer.py` (1.16).

JSON lines are for LLaMA-Factory: `messages` whose content is text with `<image>` where a picture stands, and
`images` as paths. See `data/README.md`, `SharegptDatasetConverter` in `data/converter.py` and
`Qwen2VLPlugin` in `data/mm_plugin.py` (0.9.5). ms-swift reads the same lines.

An answer's `loss` says whether it is to be learnt. ms-swift reads it (`swift/loss_scale/base.py`, 4.6); TRL
and LLaMA-Factory read no such mark: for them there are rows that end with the one answer to learn.
"""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from skyrl_maze.demonstrations import Demonstration
from skyrl_maze.errors import DatasetError
from skyrl_maze.pictures import PLACE, Message

Row = dict[str, Any]

IMAGE = "<image>"
# What LLaMA-Factory and ms-swift put a picture, a video or a sound in place of, wherever it stands.
PLACEHOLDERS = (IMAGE, "<video>", "<audio>")

_PART = pa.struct([("type", pa.string()), ("text", pa.string())])
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.list_(_PART)), ("loss", pa.bool_())])
_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_FACTS = [
    ("maze", pa.string()),
    ("maze_key", pa.string()),
    ("size", pa.int32()),
    ("shortest_path", pa.int32()),
    ("goal_rule", pa.string()),
    ("max_turns", pa.int32()),
    ("wrong_turns", pa.int32()),
]


def trl_row(demo: Demonstration, per_turn: bool = False) -> Row:
    """A row of `trl_schema(per_turn)`; `per_turn` is for a chat of which only the last answer is learnt."""
    messages = [_typed(message) for message in _with_loss(demo, per_turn)]
    chat = {"prompt": messages[:-1], "completion": messages[-1:]} if per_turn else {"messages": messages}
    return {**chat, "images": [{"bytes": png, "path": None} for png in demo.pictures], **_facts(demo)}


def trl_schema(per_turn: bool = False) -> pa.Schema:
    """The columns of a parquet file for TRL, with the note by which `datasets` knows pictures as such."""
    chats = ("prompt", "completion") if per_turn else ("messages",)
    columns = [*((name, pa.list_(_MESSAGE)) for name in chats), ("images", pa.list_(_PICTURE)), *_FACTS]
    features = {name: _feature(kind) for name, kind in columns}
    return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def _feature(kind: pa.DataType) -> Any:
    """An Arrow type as `datasets` writes it; a list of one is a list in every version of it."""
    if kind == _PICTURE:
        return {"_type": "Image"}
    if pa.types.is_list(kind):
        return [_feature(kind.value_type)]
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    return {"dtype": str(kind), "_type": "Value"}


def llama_factory_row(demo: Demonstration, picture_paths: Sequence[str], per_turn: bool = False) -> Row:
    """A row for LLaMA-Factory; `picture_paths` are those of the pictures, relative to its `media_dir`.

    Raises:
        DatasetError: the wording holds a placeholder, which would be taken for a picture.
    """
    messages = [{**message, "content": _flat(message["content"])} for message in _with_loss(demo, per_turn)]
    return {"messages": messages, "images": list(picture_paths), **_facts(demo)}


def dataset_info(file_name: str) -> dict[str, Any]:
    """What LLaMA-Factory's `dataset_info.json` says of such a file of rows."""
    return {
        "file_name": file_name,
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }


def _facts(demo: Demonstration) -> Row:
    """What else is known of an episode; no trainer reads it."""
    return {
        "maze": demo.maze.to_text(),
        "maze_key": demo.maze.key,
        "size": demo.maze.size,
        "shortest_path": int(demo.maze.distance_to_goal[demo.maze.start]),
        "goal_rule": str(demo.goal_rule),
        "max_turns": demo.max_turns,
        "wrong_turns": demo.wrong_turns,
    }


def _with_loss(demo: Demonstration, per_turn: bool) -> list[Message]:
    """The messages, those of the assistant with `loss`: whether to learn it, all right ones or the last."""
    last = len(demo.right) - 1
    loss = iter([right and (not per_turn or turn == last) for turn, right in enumerate(demo.right)])
    return [
        {**message, "loss": next(loss)} if message["role"] == "assistant" else message
        for message in demo.messages
    ]


def _typed(message: Message) -> Message:
    """A message whose content is a list of parts."""
    content = message["content"]
    return {
        **message,
        "content": [{"type": "text", "text": content}] if isinstance(content, str) else content,
    }


def _flat(content: str | list[dict[str, Any]]) -> str:
    """Content as one text; nothing lies between its parts, as in the prompts of a rollout."""
    if isinstance(content, str):
        return content
    for part in content:
        text = part.get("text", "")
        if found := next((place for place in PLACEHOLDERS if place in text), None):
            raise DatasetError(
                f"cannot write this wording for LLaMA-Factory: it holds {found}, which would be taken for a "
                "picture of its own; reword the prompt template, or write parquet, where it is plain text"
            )
    return "".join(IMAGE if part == PLACE else part["text"] for part in content)
