"""Pictures in messages: taken out in order, told apart by hash, and never shown as base64."""

import base64
import hashlib
import io
import json
import re
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from skyrl_maze.errors import SkyRLMazeError
from skyrl_maze.pictures import (
    PLACE,
    PictureError,
    data_of,
    describe,
    is_picture,
    readable,
    take_out,
    without_base64,
)


def url_of(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture(width=3, height=2, shade=0, kind="png"):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 90, 200)).save(buffer, kind.upper())
    return url_of(buffer.getvalue(), kind)


def png_header(width, height):
    """A few bytes that promise a picture of any size."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def shown(url):
    return {"type": "image_url", "image_url": {"url": url}}


def said(text):
    return {"type": "text", "text": text}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def base64_of(url):
    return url.partition(",")[2]


RED, BLUE = picture(shade=255), picture(shade=1)
any_picture = st.builds(
    picture,
    width=st.integers(1, 40),
    height=st.integers(1, 40),
    shade=st.integers(0, 255),
    kind=st.sampled_from(["png", "jpeg", "gif", "bmp"]),
)
# What is called a picture need not be one.
any_address = any_picture | st.builds(
    url_of, st.binary(min_size=3), st.sampled_from(["png", "svg+xml", "x-a.b"])
)
part_of = st.sampled_from(
    [
        shown,
        lambda url: {"type": "image_url", "image_url": url},
        lambda url: {"type": "image", "image": url},
        lambda url: {"type": "image", "image": {"url": url, "detail": "low"}},
    ]
)


# ---- take_out -------------------------------------------------------------------------------------


def test_pictures_are_taken_out_in_order_and_leave_their_place():
    messages = [
        {"role": "system", "content": "Be brief."},
        user(shown(RED), said("left"), shown(BLUE)),
        {"role": "assistant", "content": None},
        user(shown("https://example.org/a.png")),
        user(),
    ]
    before = json.dumps(messages)
    emptied, urls = take_out(messages)
    assert urls == [RED, BLUE, "https://example.org/a.png"]
    assert emptied == [
        messages[0],
        user(PLACE, said("left"), PLACE),
        messages[2],
        user(PLACE),
        user(),
    ]
    assert json.dumps(messages) == before


@settings(deadline=None)
@given(urls=st.lists(any_address, max_size=4), make=part_of)
def test_all_ways_to_write_a_picture_are_found(urls, make):
    parts = [make(url) for url in urls]
    assert all(map(is_picture, parts))
    emptied, found = take_out([user(*parts)])
    assert found == urls
    assert emptied == [user(*[PLACE] * len(urls))]


def test_other_fields_of_a_message_stay():
    message = {**user(shown(RED)), "name": "maze"}
    assert take_out([message])[0] == [{"role": "user", "name": "maze", "content": [PLACE]}]


@pytest.mark.parametrize(
    "part", ["image_url", None, 5, {}, said("image"), {"type": None}, {"type": ["image"]}, {"image": RED}]
)
def test_what_is_no_picture_stays_as_it_is(part):
    assert not is_picture(part)
    assert take_out([user(part)]) == ([user(part)], [])


NO_ADDRESS = [
    {"type": "image_url"},
    {"type": "image"},
    {"type": "image_url", "image_url": None},
    {"type": "image_url", "image_url": ""},
    {"type": "image_url", "image_url": {}},
    {"type": "image_url", "image_url": {"url": None}},
    {"type": "image_url", "image_url": {"url": ""}},
    {"type": "image_url", "image_url": [RED]},
    {"type": "image_url", "image_url": RED.encode()},
    {"type": "image", "image": 7},
]


@pytest.mark.parametrize("part", NO_ADDRESS)
@pytest.mark.parametrize("read", [take_out, readable])
def test_a_picture_without_address_is_refused(read, part):
    with pytest.raises(PictureError, match=r"has no address; give .*data:image/png;base64") as caught:
        read([user(said("a"), part)])
    assert str(sorted(part)) in str(caught.value)
    assert isinstance(caught.value, SkyRLMazeError)
    assert isinstance(caught.value, ValueError)


# ---- data_of --------------------------------------------------------------------------------------


@given(data=st.binary(min_size=1))
def test_data_of_gives_the_bytes_of_the_file(data):
    assert data_of(url_of(data)) == data


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/maze.png",
        "file:///etc/passwd",
        "data:image/png;base64,",
        "data:text/plain;base64,aGVsbG8=",
        "data:image/png,raw",
        "a word",
        "",
    ],
)
def test_data_of_reads_no_other_address(url):
    with pytest.raises(PictureError, match=r"only data:image/\.\.\.;base64, addresses are read") as caught:
        data_of(url)
    assert repr(url[:40]) in str(caught.value)


@pytest.mark.parametrize("damaged", ["A", "AAAAA", "AA=A", "A===", "==", "__--", RED.partition(",")[2][:-1]])
def test_data_of_refuses_damaged_base64(damaged):
    with pytest.raises(PictureError, match="its base64 is damaged"):
        data_of(f"data:image/png;base64,{damaged}")


# ---- what people read -----------------------------------------------------------------------------


@settings(deadline=None)
@given(width=st.integers(1, 40), height=st.integers(1, 40), kind=st.sampled_from(["png", "jpeg", "gif"]))
def test_a_picture_is_described_by_type_size_and_hash(width, height, kind):
    url = picture(width, height, kind=kind)
    digest = hashlib.sha256(data_of(url)).hexdigest()
    assert describe(url) == f"[image/{kind} {width}x{height} sha256:{digest[:12]}]"
    assert without_base64(f"before {url} after") == f"before {describe(url)} after"


def test_different_pictures_read_differently():
    assert describe(RED) != describe(BLUE)


@pytest.mark.parametrize("url", ["https://example.org/maze.png", "a word", ""])
def test_addresses_that_hold_no_picture_are_read_as_they_are(url):
    assert describe(url) == url
    assert without_base64(url) == url
    assert readable([user(shown(url or "x"))]) == [{"role": "user", "content": url or "x"}]


@pytest.mark.parametrize(
    "data", [b"no picture", b"\x89PNG\r\n\x1a\n", png_header(0, 0), png_header(3, 2)[:20], b"GIF89a"]
)
def test_what_is_no_picture_is_said_and_not_shown(data):
    url = url_of(data)
    assert describe(url) == f"[image/png, not a picture, {len(base64_of(url))} characters]"


def test_a_picture_that_promises_to_be_huge_is_described_too():
    # Pillow refuses it with an error of no standard type; a line of the log must not fail for that.
    url = url_of(png_header(60_000, 60_000))
    assert base64_of(url) not in describe(url)


def test_messages_are_read_as_one_text_each_with_pictures_where_they_stand():
    messages = [
        {"role": "system", "content": f"Such as {RED}."},
        user(said("left"), shown(RED), said(f"or {BLUE}"), f"bare {RED}", {"type": "audio"}, 5),
        {"role": "assistant", "content": None},
        {"content": "no role"},
        {"role": "user"},
    ]
    red, blue = describe(RED), describe(BLUE)
    assert readable(messages) == [
        {"role": "system", "content": f"Such as {red}."},
        {"role": "user", "content": f"left\n{red}\nor {blue}\nbare {red}\n\n5"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "no role"},
        {"role": "user", "content": ""},
    ]


@settings(deadline=None)
@given(url=any_address, other=any_address, make=part_of, words=st.text(alphabet="abc :,;\n\"'{}[]()"))
def test_no_base64_is_left_in_what_people_read(url, other, make, words):
    nested = {"type": "tool", "text": {"deep": [url, {"deeper": other}]}}
    messages = [
        {"role": "user", "content": f"{words} {url} {words}\n{other}"},
        user(make(url), said(f"<{other}> {words}"), f"({url})", nested),
    ]
    for read in (
        json.dumps(readable(messages)),
        without_base64(str(messages)),
        without_base64(json.dumps(messages)),
    ):
        assert ";base64," not in read
        for address in (url, other):
            # Short base64 may be an English word, so only what no description could hold is looked for.
            assert len(base64_of(address)) < 16 or base64_of(address) not in read


UNUSUAL = [
    RED.replace("data:", "DATA:"),
    RED.replace("image/png", "IMAGE/PNG"),
    RED.replace(";base64", ";BASE64"),
    RED.replace(";base64", ";charset=utf-8;base64"),
]
OTHER_KINDS = [
    RED + "\n",
    RED[:60] + "\n" + RED[60:],
    RED.replace("image/png", "application/octet-stream"),
]
LONG_BASE64 = re.compile("[A-Za-z0-9+/]{30}")


# Browsers and servers read all of these; neither a chat on disk nor a log may carry them.
@pytest.mark.parametrize("url", [*UNUSUAL, *OTHER_KINDS])
def test_an_address_written_in_an_unusual_way_shows_no_base64(url):
    assert not LONG_BASE64.search(readable([user(shown(url))])[0]["content"])


@pytest.mark.parametrize("url", UNUSUAL)
def test_a_picture_written_in_an_unusual_way_is_found_in_text(url):
    assert not LONG_BASE64.search(without_base64(f"before {url} after"))


def test_addresses_written_without_a_gap_are_described_one_by_one():
    assert without_base64(RED + BLUE) == describe(RED) + describe(BLUE)
