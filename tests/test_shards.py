"""Shards: whole or not there, exactly what was held, and nothing in a manifest taken on trust."""

import json
import os
import shutil
from dataclasses import asdict

import adapter_files
import pytest
import torch
from adapter_files import RUN, name_of, part_of, tensors_of, write_all
from blake3 import blake3
from safetensors.torch import load_file

from skyrl_maze import durable, shards
from skyrl_maze.errors import AdapterError, SetupError
from skyrl_maze.shards import read_manifest, read_manifests, write_shard

WHO = {"run_id": RUN, "step": 1, "attempt": 0}


def write_one(folder, tensors=None, **kwargs):
    return write_shard(folder, 0, 1, part_of(tensors or tensors_of(1), 0, 1), **{**WHO, **kwargs})


def forge(path, **changes):
    """Rewrite a manifest with a good seal."""
    record = durable.read_sealed(path) | changes
    path.write_bytes(durable.sealed(record))


def forge_tensor(path, **changes):
    tensors = durable.read_sealed(path)["tensors"]
    forge(path, tensors=[tensors[0] | changes, *tensors[1:]])


# --- writing


def test_a_shard_is_a_safetensors_file_of_the_local_rows(tmp_path):
    tensors = tensors_of()
    write_all(tmp_path, tensors, world_size=3)
    for rank in range(3):
        held = load_file(tmp_path / f"rank-{rank:05d}.safetensors")
        part = part_of(tensors, rank, 3)
        assert {name: rows.tolist() for name, rows in held.items()} == {
            name: rows.tolist() for name, (rows, _, _) in part.items()
        }


def test_the_manifest_comes_back_as_it_was_written(tmp_path):
    written = write_all(tmp_path, tensors_of(), world_size=6)
    assert read_manifests(tmp_path) == written
    assert any(tensor.rows == 0 for tensor in written[5].tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"rank-{rank:05d}.{ending}" for rank in range(6) for ending in ("json", "safetensors")
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_rounded_once_to_the_wire_dtype(tmp_path, dtype):
    tensors = tensors_of(1)
    write_one(tmp_path, tensors, wire_dtype=dtype)
    held = load_file(tmp_path / "rank-00000.safetensors")
    assert all(torch.equal(held[name], whole.to(dtype)) for name, whole in tensors.items())


def test_bfloat16_is_the_default(tmp_path):
    assert {tensor.dtype for tensor in write_one(tmp_path).tensors} == {"BF16"}


def test_rows_may_be_strided_and_require_gradients(tmp_path):
    name = name_of("q", "A")
    whole = torch.randn(6, 4).T.requires_grad_()
    write_shard(tmp_path, 0, 1, {name: (whole, (4, 6), 0)}, torch.float32, **WHO)
    assert torch.equal(load_file(tmp_path / "rank-00000.safetensors")[name], whole.detach())


@pytest.mark.parametrize("empty", [torch.empty(0, 6), torch.empty(0)])
def test_a_rank_without_rows_says_so(tmp_path, empty):
    manifest = write_shard(tmp_path, 5, 6, {name_of("q", "A"): (empty, (4, 6), 4)}, **WHO)
    assert [(t.rows, t.row_offset, t.shape) for t in manifest.tensors] == [(0, 4, (4, 6))]
    assert read_manifests(tmp_path) == [manifest]


@pytest.mark.parametrize("taken", ["rank-00000.safetensors", "rank-00000.json"])
def test_nothing_is_overwritten(tmp_path, taken):
    (tmp_path / taken).write_text("mine")
    with pytest.raises(AdapterError, match=f"{taken}: it exists and is never overwritten"):
        write_one(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "mine"


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "file"

    def write():
        with durable.new_file(path) as file:
            file.write(b"new")
            path.write_text("mine")

    with pytest.raises(AdapterError, match="never overwritten"):
        write()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "mine")]


@pytest.mark.parametrize("piece", [1, 3, 16, 50])
def test_a_file_knows_the_checksum_of_what_was_written(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(durable, "CHUNK_BYTES", 16)
    content = bytes(range(200))
    with durable.new_file(tmp_path / "file") as file:
        for start in range(0, len(content), piece):
            file.write(content[start : start + piece])
    assert (tmp_path / "file").read_bytes() == content
    assert file.record("file") == durable.record_of(tmp_path, "file")
    assert file.hexdigest() == blake3(content).hexdigest()


def test_without_hard_links_files_are_renamed(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    manifest = write_one(tmp_path)
    assert read_manifests(tmp_path) == [manifest]
    with pytest.raises(AdapterError, match="never overwritten"):
        write_one(tmp_path)


def test_a_folder_that_was_cleaned_away_is_not_made_again(tmp_path):
    with pytest.raises(AdapterError, match=r"cannot write the shard of rank 0 in .*No such file"):
        write_one(tmp_path / "gone" / "shards")
    assert write_one(tmp_path / "shards")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(2, 5), (4, 6), 0), r"local rows are torch.float32 \[2, 5\]; allowed: .* \[4, 6\]"),
        ((torch.zeros(2, 6, dtype=torch.int64), (4, 6), 0), "allowed: floating point rows"),
        ((torch.zeros(2, 6), (4, 6), 3), "rows=2: must be a whole number from 0 to 1"),
        ((torch.zeros(2, 6), (4, 6), -1), "row_offset=-1: must be"),
        ((torch.zeros(0, 6), (0, 6), 0), "must be 1 to 8 whole numbers above 0"),
    ],
)
def test_impossible_rows_are_refused_before_anything_is_written(tmp_path, given, message):
    with pytest.raises(AdapterError, match=message):
        write_shard(tmp_path, 0, 1, {name_of("q", "A"): given}, **WHO)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "../other"}, "run_id='../other': must be a folder's name"),
        ({"step": -1}, "step=-1: must be a whole number from 0"),
        ({"attempt": True}, "attempt=True: must be a whole number"),
        ({"wire_dtype": torch.float64}, "cannot write a shard as torch.float64; allowed: float32"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path, changes, message):
    with pytest.raises(AdapterError, match=message):
        write_one(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_seen_before_the_write(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(SetupError) as caught:
        write_one(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "1,000 bytes free and 1,0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_cannot_be_written_takes_its_shard_along(tmp_path, monkeypatch):
    def fail(_record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "sealed", fail)
    with pytest.raises(SetupError, match=r"bytes free and .* are needed"):
        write_one(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- reading


def test_every_damaged_bit_of_a_manifest_is_seen(tmp_path):
    manifest = write_one(tmp_path)
    path = tmp_path / "rank-00000.json"
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            read = read_manifest(path)
        except AdapterError:
            continue
        assert read == manifest  # a space became other white space


@pytest.mark.parametrize("kept", [0, 1, 100, -2])
def test_a_torn_manifest_is_refused(tmp_path, kept):
    write_one(tmp_path)
    path = tmp_path / "rank-00000.json"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(AdapterError, match=r"rank-00000.json is torn or no JSON"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is damaged"),
        ('{"a": 1, "a": 2}', "a key stands twice"),
        ("[" * 100_000, "is torn or no JSON"),
        ("\x00", "is torn or no JSON"),
    ],
)
def test_other_content_is_refused(tmp_path, text, message):
    path = tmp_path / "rank-00000.json"
    path.write_text(text)
    with pytest.raises(AdapterError, match=message):
        read_manifest(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema=2: must be a whole number from 1 to 1"),
        ({"run_id": "../x"}, "run_id='../x': must be a folder's name"),
        ({"run_id": ".."}, "run_id='..': must be a folder's name"),
        ({"step": "1"}, "step='1': must be a whole number"),
        ({"step": 1.0}, "step=1.0: must be a whole number"),
        ({"rank": 1}, "rank=1: must be a whole number from 0 to 0"),
        ({"world_size": 0}, "world_size=0: must be a whole number from 1"),
        ({"world_size": True}, "world_size=True: must be a whole number"),
        ({"file": "../rank-00000.safetensors"}, "file='../rank-00000.safetensors': must be 'rank-00000"),
        ({"file": "/etc/passwd"}, "file='/etc/passwd': must be"),
        ({"bytes": 5}, "bytes=5: must be a whole number from"),
        ({"blake3": "A" * 64}, "blake3=.*must be 64 hexadecimal digits"),
        ({"tensors": {}}, "tensors={}: must be a list"),
        ({"tensors": [1]}, "must be an object with exactly the keys name"),
        ({"more": 1}, "must be an object with exactly the keys schema"),
    ],
)
def test_a_manifest_that_says_something_impossible_is_refused(tmp_path, changes, message):
    write_one(tmp_path)
    forge(tmp_path / "rank-00000.json", **changes)
    with pytest.raises(AdapterError, match=message) as caught:
        read_manifest(tmp_path / "rank-00000.json")
    assert "rank-00000.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../a"}, r"name='../a': must be a parameter's name"),
        ({"name": name_of("layers.0.q_proj", "A")}, "names a tensor twice"),
        ({"name": "zzz"}, "not in the order of their data"),
        ({"shape": []}, r"shape=\[\]: must be 1 to 8 whole numbers"),
        ({"shape": [4, 0]}, "must be 1 to 8 whole numbers above 0"),
        ({"shape": [4, 6.0]}, "must be 1 to 8 whole numbers above 0"),
        ({"row_offset": 99}, "row_offset=99: must be a whole number from 0 to 4"),
        ({"rows": 99}, "rows=99: must be a whole number from 0 to 4"),
        ({"dtype": "I8"}, "dtype='I8': must be one of F32, F16, BF16"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tmp_path, changes, message):
    write_one(tmp_path)
    forge_tensor(tmp_path / "rank-00000.json", **changes)
    with pytest.raises(AdapterError, match=message):
        read_manifest(tmp_path / "rank-00000.json")


def test_a_manifest_under_another_ranks_name_is_refused(tmp_path):
    write_all(tmp_path, tensors_of(1), world_size=2)
    (tmp_path / "rank-00001.json").write_bytes((tmp_path / "rank-00000.json").read_bytes())
    with pytest.raises(AdapterError, match="is the manifest of rank 0; it has the wrong name"):
        read_manifest(tmp_path / "rank-00001.json")


def test_links_pipes_and_missing_manifests_are_refused(tmp_path):
    write_one(tmp_path)
    path = tmp_path / "rank-00000.json"
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match=r"cannot read .*rank-00000.json: No such file"):
        read_manifest(path)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="it is a symbolic link"):
        read_manifest(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(AdapterError, match="it is not a regular file"):
        read_manifest(path)


def test_all_bad_manifests_of_a_folder_are_listed(tmp_path):
    write_all(tmp_path, tensors_of(1), world_size=3)
    for rank in (0, 2):
        (tmp_path / f"rank-0000{rank}.json").write_text("{")
    with pytest.raises(AdapterError) as caught:
        read_manifests(tmp_path)
    assert "rank-00000.json" in str(caught.value)
    assert "rank-00002.json" in str(caught.value)
    assert "rank-00001.json" not in str(caught.value)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(AdapterError, match="holds no shards"):
        read_manifests(tmp_path)


def test_a_manifest_is_plain_json(tmp_path):
    manifest = write_one(tmp_path)
    record = json.loads((tmp_path / "rank-00000.json").read_text())
    assert record.pop("seal")
    assert record.pop("schema") == 1
    assert record == json.loads(json.dumps(asdict(manifest)))


def test_the_fixture_splits_as_fsdp_does():
    assert adapter_files.even_cuts(9, 4) == [0, 3, 6, 9, 9]
