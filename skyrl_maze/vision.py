"""What a model and its processor say about pictures: token ids, the merge size, and a picture as tensors."""

import asyncio
import io
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from loguru import logger
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from skyrl_maze.pictures import PictureError, data_of, describe
from skyrl_maze.trajectory import Picture

# Names under which Hugging Face configs and tokenizers keep such ids; `_index` is the older ending.
_CONFIG_FIELD = re.compile(r"(image|video|vision|media|boi|eoi)_(\w+_)?token_(id|index)")
_TOKEN_NAME = re.compile(r"<\|(image|video|vision)_\w+\|>")
BANNED_BIAS = -100.0
"""Added to the logits of banned ids, by the engine when it samples and by the trainer when it looks back."""
_TOKEN_ATTRIBUTES = ("image_token", "video_token", "boi_token", "eoi_token")


@dataclass(frozen=True)
class VisionTokens:
    """Ids that stand for pictures."""

    image_id: int | None
    """One part of a picture; None for a model without pictures."""
    banned_ids: frozenset[int]
    """All that a policy may not sample: no picture would stand behind them."""


def vision_tokens(tokenizer: Any, config: Any = None) -> VisionTokens:
    """The ids that a model's config names, and those of the tokenizer's added tokens that are named so.

    Args:
        tokenizer: a Hugging Face tokenizer.
        config: the model's config, if there is one at hand.
    """
    named = dict(_fields(config.to_dict())) if config is not None else {}
    added = tokenizer.get_added_vocab()
    special = {getattr(tokenizer, name, None) for name in _TOKEN_ATTRIBUTES}
    from_tokenizer = {i for token, i in added.items() if _TOKEN_NAME.fullmatch(token) or token in special}
    candidates = [named.get("image_token_id"), named.get("image_token_index"), added.get("<|image_pad|>")]
    image_id = next((i for i in candidates if i is not None), None)
    ids = {*named.values(), *from_tokenizer}
    return VisionTokens(image_id, frozenset(i for i in ids if isinstance(i, int) and i >= 0))


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values that tell of pictures' tokens, those of nested configs before those above them."""
    for value in config.values():
        if isinstance(value, dict):
            yield from _fields(value)
    yield from ((name, value) for name, value in config.items() if _CONFIG_FIELD.fullmatch(str(name)))


def vocabulary_size(tokenizer: Any, config: Any) -> int:
    """How many ids there are: the tokenizer's, and those that only fill up the model's embedding."""
    text_config = getattr(config, "text_config", None) or config
    return max(len(tokenizer), getattr(text_config, "vocab_size", None) or 0)


def model_config(path: str | None) -> Any:
    """The config of the model at `path`, a folder or a hub id; None if it cannot be had."""
    try:
        return AutoConfig.from_pretrained(path) if path else None
    except (OSError, ValueError) as error:
        logger.warning(f"the config of {path!r} cannot be read, so only the tokenizer is asked: {error}")
        return None


def context_window(generator_cfg: Any, config: Any) -> int | None:
    """Tokens that fit into the engine's context: as configured, else what the model can; None if unknown."""
    configured = generator_cfg.inference_engine.engine_init_kwargs.get("max_model_len")
    if isinstance(configured, int) and configured > 0:  # else the engine fits it itself
        return configured
    text_config = getattr(config, "text_config", None) or config
    window = getattr(text_config, "max_position_embeddings", None)
    return None if window is None else int(window)


class PictureReader:
    """Makes of a picture's address what the trainer takes, with the model's own image processor.

    The file is decoded by the engine's code, so that both see the same pixels.
    """

    def __init__(self, model_path: str) -> None:
        self.processor: Any = AutoImageProcessor.from_pretrained(model_path)
        self.merge = int(self.processor.merge_size)

    def tokens(self, url: str) -> int:
        """How many language tokens the picture at a `data:` address fills; raises PictureError if none is."""
        grid = self._tensors(url, lambda data: Image.open(io.BytesIO(data)).convert("RGB"))["image_grid_thw"]
        return int(grid.prod()) // self.merge**2

    def read(self, url: str, dtype: Any = None) -> Picture:
        """One picture; raises PictureError if it is none.

        Args:
            url: a `data:` address.
            dtype: torch dtype of the pixel values; None leaves the processor's.
        """
        from vllm.multimodal.media.image import ImageMediaIO

        tensors = self._tensors(url, lambda data: ImageMediaIO().load_bytes(data).media)
        pixel_values = tensors["pixel_values"]
        return picture(url, pixel_values if dtype is None else pixel_values.to(dtype), tensors, self.merge)

    def _tensors(self, url: str, load: Callable[[bytes], Any]) -> Any:
        data = data_of(url)
        try:
            return self.processor(images=[load(data)], return_tensors="pt")
        except (ValueError, OSError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
            raise PictureError(f"cannot read the picture {describe(url)}: {error}") from error


def picture(url: str, pixel_values: Any, tensors: Any, merge: int, features: Any = None) -> Picture:
    """A `Picture` from an image processor's or an engine's tensors of it."""
    time, height, width = tensors["image_grid_thw"].reshape(-1, 3)[0].tolist()
    tokens = math.prod((time, height, width)) // merge**2
    return Picture(url, (time, height, width), tokens, pixel_values, features)


class Shelf:
    """Keeps the last pictures made, and makes one that several episodes ask for at once a single time.

    The samples of a group begin with the same picture, and a move into a wall shows the last one again.
    """

    def __init__(self, make: Callable[[str], Awaitable[Picture]], room: int = 128) -> None:
        self._make, self._room = make, room
        self._tasks: OrderedDict[str, asyncio.Task[Picture]] = OrderedDict()

    async def get(self, url: str) -> Picture:
        """The picture at `url`; a failure is not kept."""
        task = self._tasks.get(url)
        if not settled(task):
            task = self._tasks[url] = asyncio.ensure_future(self._make(url))
        self._tasks.move_to_end(url)
        while len(self._tasks) > self._room:
            self._tasks.popitem(last=False)
        return await asyncio.shield(task)  # type: ignore[arg-type]


def settled(task: "asyncio.Task[Any] | None") -> bool:
    """Whether this task has a result, or will have one in this event loop."""
    if task is None:
        return False
    if not task.done():
        return task.get_loop() is asyncio.get_running_loop()
    return not task.cancelled() and task.exception() is None
