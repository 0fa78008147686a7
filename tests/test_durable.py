"""Files that are whole or not there, and records that are read without trust."""

import errno
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.durable import NO_SPACE, explained, new_file, open_regular, read_sealed, record_of, sealed
from skyrl_maze.errors import AdapterError, SetupError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)
RECORDS = st.dictionaries(st.text(max_size=9).filter(lambda key: key != "seal"), PLAIN, max_size=5)


@given(RECORDS)
def test_a_sealed_record_comes_back(tmp_path_factory, record):
    path = tmp_path_factory.mktemp("sealed") / "record.json"
    path.write_bytes(sealed(record))
    assert read_sealed(path) == record


@given(RECORDS, st.data())
def test_a_record_with_another_byte_is_refused_or_means_the_same(tmp_path_factory, record, data):
    content = bytearray(sealed(record))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("sealed") / "record.json"
    path.write_bytes(content)
    try:
        found = read_sealed(path)
    except AdapterError:
        return
    assert found == record


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "torn or no JSON"), (b"[]", "damaged"), (b'{"a": 1, "a": 2}', "a key stands twice")],
)
def test_what_is_no_sealed_record_is_refused(tmp_path, content, said):
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(AdapterError, match=said):
        read_sealed(tmp_path / "r")


def test_a_new_file_is_what_was_written_and_is_never_replaced(tmp_path):
    pieces = [b"a" * 3, b"b" * (3 << 20), b"c"]
    with new_file(tmp_path / "f") as file:
        for piece in pieces:
            file.write(piece)
    assert (tmp_path / "f").read_bytes() == b"".join(pieces)
    assert file.record("f") == record_of(tmp_path, "f")
    with pytest.raises(AdapterError, match="never overwritten"), new_file(tmp_path / "f"):
        pytest.fail("it may not be opened")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_of_a_file_that_fails_nothing_is_left(tmp_path):
    def write_half():
        with new_file(tmp_path / "f") as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_no_link_is_followed_and_no_pipe_waited_for(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "folder").mkdir()
    for name, said in (
        ("link", "symbolic link"),
        ("folder", "not a regular file"),
        ("missing", "No such file"),
    ):
        with pytest.raises(AdapterError, match=said):
            open_regular(tmp_path, name)


@pytest.mark.parametrize("code", [*NO_SPACE, errno.EACCES])
def test_an_error_of_the_system_is_one_line(tmp_path, code):
    kind = SetupError if code in NO_SPACE else AdapterError
    with pytest.raises(kind) as caught, explained("write it", tmp_path):
        raise OSError(code, "no")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_record_is_json_that_others_can_read():
    assert json.loads(sealed({"a": 1}))["a"] == 1
