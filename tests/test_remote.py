"""A version in a store is complete or not to be used, is never overwritten, and no message tells a secret."""

import hashlib
import json
import pickle
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze import remote
from skyrl_maze.errors import AdapterError, SetupError
from skyrl_maze.remote import upload_adapter

FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"w" * 1000,
    "README.md": b"about",
    "sub/notes.txt": b"",
}
ADDRESS, ROOT = "memory://bucket/adapters", "/bucket/adapters/v1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    """An empty store in memory, and no waits between tries."""
    monkeypatch.setattr(remote, "_LONGEST_WAIT_S", 0.0)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return fsspec.filesystem("memory")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "adapter" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "adapter" / name).write_bytes(content)
    return tmp_path / "adapter"


def failing(monkeypatch, method, faults, match=""):
    """Let calls of the store about paths that hold `match` raise the faults in turn; gives those paths."""
    working, calls, left = getattr(MemoryFileSystem, method), [], list(faults)

    def call(self, *args, **options):
        path = args[1] if method == "put_file" else args[0]
        if match in path:
            calls.append(path)
            if left:
                raise left.pop(0)
        return working(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, method, call)
    return calls


def refusal(folder: Path, address: str = ADDRESS, name: str = "v1") -> str:
    with pytest.raises(AdapterError) as caught:
        upload_adapter(folder, address, name)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("address", [ADDRESS, f"{ADDRESS}/"])
def test_a_version_is_complete(store: MemoryFileSystem, folder: Path, address: str) -> None:
    (folder / ".hidden").touch()
    (folder / "COMPLETE").write_text("of another place")
    steps = []
    assert upload_adapter(folder, address, "v1", lambda *step: steps.append(step)) == f"{ADDRESS}/v1"
    assert set(store.find(ROOT)) == {f"{ROOT}/{name}" for name in [*FILES, "COMPLETE"]}
    assert all(store.cat_file(f"{ROOT}/{name}") == content for name, content in FILES.items())
    assert json.loads(store.cat_file(f"{ROOT}/COMPLETE")) == {
        "files": {
            name: {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in FILES.items()
        }
    }
    assert steps[-1] == (1007, 1007)
    assert [total for _, total in steps] == [1007] * len(FILES)


def test_the_marker_comes_last(
    store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    working = MemoryFileSystem.pipe_file

    def note(self, path, value, **options):
        if path.endswith("COMPLETE"):
            seen.append(set(self.find(ROOT)))
        return working(self, path, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", note)
    upload_adapter(folder, ADDRESS, "v1")
    assert seen == [{f"{ROOT}/{name}" for name in FILES}]


def test_a_version_is_not_overwritten(store: MemoryFileSystem, folder: Path) -> None:
    upload_adapter(folder, ADDRESS, "v1")
    before = {path: store.cat_file(path) for path in store.find("/")}
    (folder / "README.md").write_text("other")
    assert refusal(folder) == (
        f"cannot publish to {ADDRESS}/v1: it is there and COMPLETE, and nothing is overwritten; "
        "give another name"
    )
    assert {path: store.cat_file(path) for path in store.find("/")} == before
    upload_adapter(folder, ADDRESS, "v2")


def test_what_an_interrupted_upload_left_is_completed(store: MemoryFileSystem, folder: Path) -> None:
    store.pipe_file(f"{ROOT}/adapter_model.safetensors", b"half")
    upload_adapter(folder, ADDRESS, "v1")
    assert store.cat_file(f"{ROOT}/adapter_model.safetensors") == FILES["adapter_model.safetensors"]


def test_objects_of_something_else_are_not_mixed_in(store: MemoryFileSystem, folder: Path) -> None:
    store.pipe_file(f"{ROOT}/optimizer.json", b"?")
    store.pipe_file("/bucket/adapters/v10/other.json", b"a neighbour whose name begins alike")
    assert f"{ADDRESS}/v1: it holds optimizer.json, which {folder} does not" in refusal(folder)
    assert set(store.find(ROOT)) == {f"{ROOT}/optimizer.json"}


def test_faults_that_pass_are_tried_again(
    store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [ConnectionResetError("reset"), TimeoutError(), OSError(16, "slow down")]
    tries = failing(monkeypatch, "put_file", faults, "adapter_model")
    upload_adapter(folder, ADDRESS, "v1")
    assert tries == [f"{ROOT}/adapter_model.safetensors"] * 4
    assert store.exists(f"{ROOT}/COMPLETE")


@pytest.mark.parametrize(
    ("method", "match"),
    [("info", "COMPLETE"), ("find", ROOT), ("put_file", "README"), ("pipe_file", "COMPLETE")],
)
def test_a_fault_that_stays_leaves_no_marker(
    store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, match: str
) -> None:
    tries = failing(monkeypatch, method, [ConnectionResetError("reset by peer")] * 99, match)
    assert refusal(folder) == (
        f"cannot publish {folder} to {ADDRESS}/v1: ConnectionResetError: reset by peer; without its COMPLETE "
        "it is not to be used: check the address, the rights and the network, then upload again"
    )
    assert len(tries) == 4
    assert f"{ROOT}/COMPLETE" not in store.store


@pytest.mark.parametrize(
    "fault", [PermissionError("Access Denied"), FileNotFoundError("no bucket"), KeyError("x")]
)
def test_a_fault_that_lasts_is_tried_once(
    store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    tries = failing(monkeypatch, "put_file", [fault] * 99)
    assert f"{type(fault).__name__}: {fault}" in refusal(folder)
    assert len(tries) == 1


def test_faults_of_botocores_network_pass() -> None:
    timeout = type("ReadTimeoutError", (type("HTTPClientError", (Exception,), {}),), {})
    assert remote._passes(timeout())
    assert not remote._passes(type("NoCredentialsError", (Exception,), {})())


def test_lost_bytes_are_noticed(
    store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self, local, path, **_options):
        self.pipe_file(path, Path(local).read_bytes()[:500])

    monkeypatch.setattr(MemoryFileSystem, "put_file", half)
    message = refusal(folder)
    assert (
        f"the upload to {ADDRESS}/v1 arrived incomplete: adapter_model.safetensors: 500 bytes of 1000;"
        in message
    )
    assert f"{ROOT}/COMPLETE" not in store.store


def test_of_two_markers_the_first_stays(
    store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = MemoryFileSystem.put_file

    def other_writer(self, local, path, **options):
        self.store.pop(f"{ROOT}/COMPLETE", None)
        self.pipe_file(f"{ROOT}/COMPLETE", b"another's")
        return working(self, local, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", other_writer)
    assert "it is there and COMPLETE" in refusal(folder)
    assert store.cat_file(f"{ROOT}/COMPLETE") == b"another's"


def test_a_marker_whose_answer_was_lost_counts(
    store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, calls = MemoryFileSystem.pipe_file, []

    def lose_the_answer(self, path, value, **options):
        calls.append(path)
        working(self, path, value, **options)
        if len(calls) == 1:
            raise ConnectionResetError

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lose_the_answer)
    assert upload_adapter(folder, ADDRESS, "v1") == f"{ADDRESS}/v1"
    assert calls == [f"{ROOT}/COMPLETE"] * 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: (f / "adapter_config.json").unlink(),
            "adapter_config.json missing; give the folder of a saved",
        ),
        (
            lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
            "adapter_model.safetensors missing",
        ),
        (
            lambda f: (f / "sub" / "optimizer.pt").touch(),
            "sub/optimizer.pt may run code where they are loaded",
        ),
    ],
)
def test_a_folder_that_is_not_published(store: MemoryFileSystem, folder: Path, spoil, message: str) -> None:
    spoil(folder)
    assert message in refusal(folder)
    assert store.store == {}


@pytest.mark.parametrize(
    "address",
    ["", "bucket/prefix", "/tmp/x", "s3://", "s3://b/p?x=1", "s3://a b", "simplecache::s3://b/p", "s3://b#c"],
)
def test_an_address_that_is_none(folder: Path, address: str) -> None:
    assert "give an address such as s3://bucket/prefix" in refusal(folder, address)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-v", "a b", "v" * 129, "v\n"])
def test_a_name_that_is_none(folder: Path, name: str) -> None:
    assert f"cannot publish a version named {name!r}" in refusal(folder, name=name)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}", fullmatch=True))
def test_names_that_are_fine(name: str) -> None:
    remote._check_target(ADDRESS, name)


def test_an_unknown_scheme_is_said(folder: Path) -> None:
    assert "nosuchstore://bucket/v1: ValueError: Protocol not known: nosuchstore" in refusal(
        folder, "nosuchstore://bucket"
    )


def test_a_missing_driver_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        SetupError, match=r"driver for s3:// is not installed .*pip install 'skyrl_maze\[s3\]'"
    ):
        upload_adapter(folder, "s3://bucket/prefix", "v1")


def test_a_missing_fsspec_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(SetupError, match=r"pip install 'skyrl_maze\[s3\]'"):
        upload_adapter(folder, "s3://bucket/prefix", "v1")


@pytest.mark.parametrize(
    "said",
    [
        "PUT https://user:hunter2secret@host/x failed",
        "https://b/k?X-Amz-Credential=hunter2secret&X-Amz-Signature=hunter2secret was refused",
        "aws_secret_access_key = hunter2secret",
        "Token: hunter2secret",
        "the key AKIAHUNTER2SECRET000 is unknown",
        "cannot sign with from-the-environment",
    ],
)
def test_no_message_tells_a_secret(
    store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    failing(monkeypatch, "put_file", [PermissionError(said)])
    with pytest.raises(AdapterError) as caught:
        upload_adapter(folder, ADDRESS, "v1")
    message = str(caught.value)
    assert "***" in message
    assert "hunter2" not in message.lower()
    assert "from-the-environment" not in message
    assert caught.value.__suppress_context__


def test_a_password_in_an_address_is_refused_and_not_repeated(folder: Path) -> None:
    message = refusal(folder, "s3://me:hunter2@bucket/prefix")
    assert "hunter2" not in message
    assert "'s3://***@bucket/prefix'" in message
