"""Pictures in chat messages: found, taken out, told apart by hash, and described where people read.

A picture is an `image_url` part with a `data:` address, as OpenAI's chat format has it. What is logged names
its type, size and hash; the base64 itself is never shown.
"""

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

from PIL import Image

from skyrl_maze.errors import SkyRLMazeError

Message = dict[str, Any]

PLACE = {"type": "image"}  # what chat templates look for where a picture stands
# The look-ahead parts two addresses that stand side by side.
_DATA_URL = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,((?:(?!data:)[A-Za-z0-9+/=_-])+)", re.IGNORECASE
)


class PictureError(SkyRLMazeError, ValueError):
    """A picture part of a message that holds no picture."""


def take_out(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The messages with `PLACE` where a picture stood, and the pictures' addresses, in order.

    Raises:
        PictureError: a picture part has no address.
    """
    emptied, urls = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or content is None:
            emptied.append(message)
            continue
        parts: list[Any] = []
        for part in content:
            if not is_picture(part):
                parts.append(part)
                continue
            parts.append(PLACE)
            urls.append(_address(part))
        emptied.append({**message, "content": parts})
    return emptied, urls


def is_picture(part: Any) -> bool:
    """Whether a content part is a picture."""
    return isinstance(part, dict) and part.get("type") in ("image_url", "image")


def _address(part: dict[str, Any]) -> str:
    url = part.get("image_url", part.get("image"))
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or not url:
        raise PictureError(
            f"a picture part with the keys {sorted(part)} has no address; "
            'give {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        )
    return url


def data_of(url: str) -> bytes:
    """The bytes of a picture file in a `data:` address.

    Raises:
        PictureError: the address is of another kind, or its base64 is damaged.
    """
    match = _DATA_URL.fullmatch(url)
    if match is None or not (match[1] or "").lower().startswith("image/"):
        raise PictureError(
            f"cannot read the picture at {url[:40]!r}: only data:image/...;base64, addresses are read here"
        )
    try:
        return base64.b64decode(match[2], validate=True)
    except binascii.Error as error:
        raise PictureError(f"cannot read a picture: its base64 is damaged ({error})") from error


def sample_picture(side_px: int = 64) -> str:
    """The address of a PNG in which every pixel has a colour of its own."""
    image = Image.new("RGB", (side_px, side_px))
    image.putdata([(4 * x % 256, 4 * y % 256, (x * y) % 256) for y in range(side_px) for x in range(side_px)])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def describe(url: str) -> str:
    """A picture in words, such as `[image/png 96x96 sha256:1a2b3c4d5e6f]`; links as they are."""
    match = _DATA_URL.fullmatch(url)
    if match is None and url.lstrip()[:5].lower() == "data:":
        return f"[data that is no picture, {len(url)} characters]"
    return _described(match) if match else url


def without_base64(text: str) -> str:
    """The text with every picture in it described."""
    return _DATA_URL.sub(_described, text)


def _described(match: re.Match[str]) -> str:
    try:
        data = base64.b64decode(match[2], validate=True)
        with Image.open(io.BytesIO(data)) as image:
            size = "x".join(map(str, image.size))
    except (binascii.Error, OSError, ValueError, Image.DecompressionBombError):
        return f"[{match[1]}, not a picture, {len(match[2])} characters]"
    return f"[{match[1]} {size} sha256:{hashlib.sha256(data).hexdigest()[:12]}]"


def readable(messages: Sequence[Message]) -> list[Message]:
    """The messages as people read them: one text each, with every picture described where it stands."""
    return [{"role": m.get("role", "user"), "content": _text(m.get("content"))} for m in messages]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return without_base64(content or "")
    parts = []
    for part in content:
        if is_picture(part):
            parts.append(describe(_address(part)))
        else:
            parts.append(without_base64(str(part.get("text", "") if isinstance(part, dict) else part)))
    return "\n".join(parts)
