"""Ids that stand for pictures, wherever they lie; files of every kind, damaged ones too; the shelf."""

import asyncio
import base64
import io
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from skyrl_maze import _compat

_compat.install()

import torch  # noqa: E402
from skyrl.train.config import GeneratorConfig  # noqa: E402
from skyrl.train.config.config import InferenceEngineConfig  # noqa: E402
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig  # noqa: E402

from skyrl_maze import tiny  # noqa: E402
from skyrl_maze.pictures import PictureError  # noqa: E402
from skyrl_maze.trajectory import Picture  # noqa: E402
from skyrl_maze.vision import (  # noqa: E402
    PictureReader,
    Shelf,
    VisionTokens,
    context_window,
    model_config,
    vision_tokens,
)

PATCH = tiny.PATCH_PX
SQUARE = tiny.PATCH_PX * tiny.MERGE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_random_model(folder, ["user up down"])
    return folder


@pytest.fixture(scope="module")
def reader(model: Path) -> PictureReader:
    return PictureReader(str(model))


# Ids


def words(**added: int) -> Any:
    """A tokenizer with these added tokens, written `<|name|>`."""
    return SimpleNamespace(get_added_vocab=lambda: {f"<|{name}|>": i for name, i in added.items()})


@given(shift=st.integers(0, 10**6))
def test_ids_are_the_configs_and_the_tokenizers_wherever_they_lie(shift: int) -> None:
    tokenizer = words(im_end=shift, image_pad=shift + 1, vision_start=shift + 2, video_pad=shift + 3)
    alone = vision_tokens(tokenizer)
    assert alone == VisionTokens(shift + 1, frozenset({shift + 1, shift + 2, shift + 3}))
    config = PreTrainedConfig(
        image_token_id=shift + 11, vision_end_token_id=shift + 12, eos_token_id=shift, num_image_tokens=4
    )
    both = vision_tokens(tokenizer, config)
    assert both.image_id == shift + 11, "the config's word counts"
    assert both.banned_ids == alone.banned_ids | {shift + 11, shift + 12}


def test_the_older_ending_of_a_field_counts_too() -> None:
    config = PreTrainedConfig(image_token_index=32_000, video_token_index=32_001, image_seq_length=576)
    assert vision_tokens(words(), config) == VisionTokens(32_000, frozenset({32_000, 32_001}))
    assert vision_tokens(words(), PreTrainedConfig(image_token_index=5, image_token_id=6)).image_id == 6


def test_fields_without_an_id_are_no_ids() -> None:
    config = PreTrainedConfig(video_token_id=None, vision_start_token_id="<x>", image_token_id=3)
    assert vision_tokens(words(), config) == VisionTokens(3, frozenset({3}))
    assert vision_tokens(words(im_end=1), PreTrainedConfig(eos_token_id=1)) == VisionTokens(None, frozenset())


def test_a_real_model_agrees_with_its_tokenizer(model: Path) -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(model), model_config(str(model))
    names = ("image_pad", "video_pad", "vision_pad", "vision_start", "vision_end")
    ids = [tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names]
    assert (
        vision_tokens(tokenizer, config) == vision_tokens(tokenizer) == VisionTokens(ids[0], frozenset(ids))
    )


def test_a_config_that_cannot_be_had_is_none(tmp_path: Path) -> None:
    assert [model_config(path) for path in (None, "", str(tmp_path))] == [None] * 3


# The engine's context


def generator(**engine_init_kwargs: Any) -> GeneratorConfig:
    return GeneratorConfig(inference_engine=InferenceEngineConfig(engine_init_kwargs=engine_init_kwargs))


def test_the_context_is_the_engines_else_the_models_else_unknown(model: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    assert config.text_config.max_position_embeddings == 8192
    assert context_window(generator(max_model_len=100), config) == 100
    assert context_window(generator(max_model_len=100), None) == 100
    assert context_window(generator(), config) == 8192
    assert context_window(generator(max_model_len=None), config) == 8192
    assert context_window(generator(), PreTrainedConfig(max_position_embeddings=77)) == 77
    assert context_window(generator(), PreTrainedConfig()) is None
    assert context_window(generator(), None) is None


@pytest.mark.parametrize("fits_itself", [-1, "auto"])
def test_a_context_that_vllm_fits_to_its_memory_is_the_models_at_most(model: Path, fits_itself: Any) -> None:
    assert context_window(generator(max_model_len=fits_itself), AutoConfig.from_pretrained(model)) == 8192


# Pictures


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def file_of(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind.upper(), **options)
    return buffer.getvalue()


def pixels(reader: PictureReader, image: Image.Image) -> torch.Tensor:
    return reader.read(url_of(file_of(image))).pixel_values


def test_pictures_of_any_mode_are_read_as_their_colours(reader: PictureReader) -> None:
    blocks = Image.new("RGB", (3 * SQUARE, 2 * SQUARE), (200, 30, 90))
    blocks.paste((10, 250, 0), (0, 0, SQUARE, SQUARE))
    expected = pixels(reader, blocks)
    assert torch.equal(pixels(reader, blocks.convert("RGBA")), expected)
    assert torch.equal(pixels(reader, blocks.convert("P", palette=Image.Palette.ADAPTIVE)), expected)
    assert torch.equal(
        pixels(reader, blocks.convert("L")), pixels(reader, blocks.convert("L").convert("RGB"))
    )
    # What can be seen through is white, as in vLLM.
    clear = Image.new("RGBA", blocks.size, (200, 30, 90, 0))
    assert torch.equal(pixels(reader, clear), pixels(reader, Image.new("RGB", blocks.size, "white")))


@pytest.mark.parametrize("kind", ["I;16", "1", "LA"])
def test_pictures_of_one_channel_are_read(reader: PictureReader, kind: str) -> None:
    url = url_of(file_of(Image.new(kind, (2 * SQUARE, SQUARE))))
    seen = reader.read(url)
    assert (seen.url, seen.grid, seen.tokens) == (url, (1, 2, 4), 2)


def test_a_jpeg_is_read_and_is_not_square(reader: PictureReader) -> None:
    image = Image.new("RGB", (4 * SQUARE, 2 * SQUARE), (90, 90, 90))
    seen = reader.read(url_of(file_of(image, "jpeg", quality=100), "jpeg"))
    assert (seen.grid, seen.tokens) == ((1, 4, 8), 8)
    assert seen.pixel_values.shape == (32, 3 * 2 * PATCH**2)
    torch.testing.assert_close(seen.pixel_values, pixels(reader, image), atol=0.02, rtol=0)


def test_pixels_have_the_engines_type(reader: PictureReader) -> None:
    url = url_of(file_of(Image.new("RGB", (SQUARE, SQUARE), "red")))
    seen = reader.read(url, torch.bfloat16).pixel_values
    assert seen.dtype == torch.bfloat16
    assert torch.equal(seen, reader.read(url).pixel_values.to(torch.bfloat16))


@given(
    width=st.integers(8, 150),
    height=st.integers(8, 150),
    mode=st.sampled_from(["RGB", "RGBA", "P", "L", "I;16"]),
)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_are_those_of_the_picture_when_read(
    reader: PictureReader, width: int, height: int, mode: str
) -> None:
    url = url_of(file_of(Image.new(mode, (width, height))))
    seen = reader.read(url)
    assert reader.tokens(url) == seen.tokens == len(seen.pixel_values) // tiny.MERGE**2


NOISE = file_of(Image.effect_noise((64, 64), 90))
NO_PICTURES = {
    "a link": "https://example.org/a.png",
    "a file": "file:///etc/hostname",
    "text": "data:text/plain;base64,AAAA",
    "damaged base64": "data:image/png;base64,AAA",
    "no picture": url_of(b"not a picture"),
    "half a picture": url_of(NOISE[:900]),
    "a strip": url_of(file_of(Image.new("L", (1000, 2)))),
    "two headers": url_of(file_of(Image.new("L", (9, 9)))[:33] * 2),
    # The length of the data is wrong, so that a chunk with an impossible name seems to follow.
    "a broken chunk": url_of(NOISE[:33] + b"\0\0\0\x14" + NOISE[37:]),
    "a promise of 9e8 pixels": url_of(
        file_of(Image.new("RGB", (30, 30)), "bmp").replace(b"\x1e\0\0\0" * 2, b"\x30\x75\0\0" * 2), "bmp"
    ),
}


@pytest.mark.parametrize("url", NO_PICTURES.values(), ids=NO_PICTURES)
@pytest.mark.parametrize("way", ["read", "tokens"])
def test_what_is_no_picture_is_said(reader: PictureReader, way: str, url: str) -> None:
    with pytest.raises(PictureError, match="cannot read"):
        getattr(reader, way)(url)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_a_damaged_file_is_a_picture_or_an_error_of_ours(reader: PictureReader, kind: str) -> None:
    rng = random.Random(0)
    data = file_of(Image.effect_noise((40, 24), 90), kind)
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            reader.read(url_of(bytes(damaged[: rng.randint(8, 2 * len(damaged))]), kind))
        except PictureError:
            continue


# The shelf


class Maker:
    """Makes pictures when it is allowed to; remembers which, and fails for addresses in `fails`."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.fails: set[str] = set()
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, url: str) -> Picture:
        self.made.append(url)
        await self.open.wait()
        if url in self.fails:
            raise PictureError(f"no {url}")
        return Picture(url, (1, 2, 2), 1, None)


def test_many_who_ask_at_once_get_one_picture() -> None:
    async def ask() -> None:
        maker = Maker()
        maker.open.clear()
        shelf = Shelf(maker)
        asking = [asyncio.ensure_future(shelf.get(url)) for url in "ab" * 50]
        await asyncio.sleep(0)
        asking[0].cancel()  # who goes away does not take it from the others
        await asyncio.sleep(0)
        maker.open.set()
        got = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(got[0], asyncio.CancelledError)
        assert len({id(picture) for picture in got[1:]}) == 2
        assert [picture.url for picture in got[1:]] == list("b" + "ab" * 49)
        assert maker.made == ["a", "b"]
        assert await shelf.get("a") is got[2], "it is kept"

    asyncio.run(ask())


def test_a_failure_is_told_to_all_and_not_kept() -> None:
    async def ask() -> None:
        maker = Maker()
        maker.fails = {"a"}
        shelf = Shelf(maker)
        got = await asyncio.gather(*[shelf.get("a") for _ in range(3)], return_exceptions=True)
        assert [str(error) for error in got] == ["no a"] * 3
        assert maker.made == ["a"]
        maker.fails = set()
        assert (await shelf.get("a")).url == "a"
        assert maker.made == ["a", "a"]

    asyncio.run(ask())


def test_beyond_its_room_the_one_asked_for_longest_ago_goes() -> None:
    async def ask() -> None:
        maker = Maker()
        shelf = Shelf(maker, room=2)
        for url in "abac":  # b is older than a now
            await shelf.get(url)
        assert maker.made == ["a", "b", "c"]
        for url in "ac":
            await shelf.get(url)
        assert maker.made == ["a", "b", "c"]
        await shelf.get("b")
        assert maker.made == ["a", "b", "c", "b"]
        at_once = await asyncio.gather(*map(shelf.get, "wxyz"))  # more than there is room for
        assert [picture.url for picture in at_once] == list("wxyz")

    asyncio.run(ask())
