"""Files of demonstrations: whole or absent, the same every time, written while they are made."""

import errno
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from skyrl_maze import demo_files, demonstrations
from skyrl_maze.dataset import MazeSetSpec
from skyrl_maze.demo_files import Report, write_demonstrations
from skyrl_maze.demonstrations import Demonstrations, DemoSettings
from skyrl_maze.env import MazeConfig
from skyrl_maze.errors import ConfigError, DatasetError, SetupError

KINDS = ("demos.parquet", "demos", "demos.jsonl")
CONFIG = MazeConfig(cell_px=8)


def some(count: int = 40, config: MazeConfig = CONFIG, seed: int = 0) -> Demonstrations:
    return Demonstrations(MazeSetSpec(sizes=[9], count=count, seed=seed), DemoSettings(config, 30, 0.3, seed))


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("per_turn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_bytes(tmp_path: Path, kind: str, per_turn: bool) -> None:
    reports = []
    for name in "ab":
        (tmp_path / name).mkdir()
        reports.append(write_demonstrations(tmp_path / name / kind, some(), per_turn))
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert reports[0] == reports[1]
    assert len(content(tmp_path / "a")) == (1 if kind.endswith("parquet") else len(distinct_pictures()) + 2)


def distinct_pictures() -> set[tuple[str, Any]]:
    return {(demo.maze.key, position) for demo in some() for position in demo.positions}


def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "import test_demo_files as t; t.write_demonstrations(Path(sys.argv[1]), t.some(5))"
    )
    for seed in "12":
        command = [sys.executable, "-c", script, tmp_path / f"{seed}.parquet", Path(__file__).parent]
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()


def test_another_seed_gives_others(tmp_path: Path) -> None:
    first, second = (write_demonstrations(tmp_path / f"{s}.parquet", some(seed=s)).sha256 for s in (0, 1))
    assert first != second


def test_the_report_counts_what_was_written(tmp_path: Path) -> None:
    demos = list(some())
    reports = [
        write_demonstrations(tmp_path / f"{per_turn}-{kind}", some(), per_turn)
        for kind in KINDS
        for per_turn in (False, True)
    ]
    turns = sum(len(demo.right) for demo in demos)
    wrong = sum(demo.wrong_turns for demo in demos)
    assert wrong > 0
    for report, per_turn in zip(reports, itertools.cycle([False, True]), strict=False):
        rows = turns - wrong if per_turn else 40
        sha256 = reports[0].sha256
        assert report == Report(40, rows, turns, wrong, turns, report.bytes, sha256), "whatever the form"
    assert reports[0].bytes == (tmp_path / "False-demos.parquet").stat().st_size
    folder = content(tmp_path / "True-demos")
    assert reports[3].bytes == sum(map(len, folder.values())) - len(folder["dataset_info.json"])


def test_parquet_holds_every_episode_in_groups(tmp_path: Path) -> None:
    path = tmp_path / "demos.parquet"
    write_demonstrations(path, some(130))
    with pq.ParquetFile(path) as file:
        assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [64, 64, 2]
        rows = file.read().to_pylist()
    for row, demo in zip(rows, some(130), strict=True):
        assert row["maze"] == demo.maze.to_text()
        assert [image["bytes"] for image in row["images"]] == list(demo.pictures)
        assert len(row["messages"]) == len(demo.messages)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("per_turn", [False, True])
def test_a_folder_is_read_by_datasets_with_every_picture_in_its_place(tmp_path: Path, per_turn: bool) -> None:
    import datasets

    folder = tmp_path / "demos"
    write_demonstrations(folder, some(), per_turn)
    assert folder.stat().st_mode & 0o777 == 0o755
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))["demonstrations"]
    rows = datasets.load_dataset(
        "json", data_files=str(folder / info["file_name"]), split="train", cache_dir=str(tmp_path / "cache")
    )
    parts = [part for demo in some() for part in (demo.up_to_each_answer() if per_turn else [demo])]
    for row, part in zip(rows, parts, strict=True):
        placeholders = sum(m["content"].count("<image>") for m in row[info["columns"]["messages"]])
        assert placeholders == len(row["images"]) == len(part.pictures)
        for name, png in zip(row["images"], part.pictures, strict=True):
            assert (folder / name).read_bytes() == png
            assert not Path(name).is_absolute()
    with Image.open(folder / rows[0]["images"][0]) as picture:
        assert picture.size == (72, 72)


def test_a_file_of_lines_joins_what_lies_there(tmp_path: Path) -> None:
    mine = {"mine": {"file_name": "mine.json"}, "größe": 1}
    (tmp_path / "dataset_info.json").write_text(json.dumps(mine), encoding="utf-8")
    write_demonstrations(tmp_path / "maze.jsonl", some())
    info = json.loads((tmp_path / "dataset_info.json").read_text(encoding="utf-8"))
    assert info.pop("maze")["file_name"] == "maze.jsonl"
    assert info == mine
    for row in lines_of(tmp_path / "maze.jsonl"):
        assert all((tmp_path / name).is_file() for name in row["images"])
    assert {path.name for path in tmp_path.iterdir()} == {"dataset_info.json", "maze.jsonl", "maze-pictures"}
    write_demonstrations(tmp_path / "more.jsonl", some())
    assert set(json.loads((tmp_path / "dataset_info.json").read_text(encoding="utf-8"))) == {
        *("mine", "größe", "maze", "more")
    }


def test_entries_that_others_add_meanwhile_are_kept(tmp_path: Path) -> None:
    info = tmp_path / "dataset_info.json"
    write_demonstrations(
        tmp_path / "maze.jsonl", some(3), progress=lambda *_: info.write_text('{"other": {}}') and None
    )
    assert set(json.loads(info.read_text(encoding="utf-8"))) == {"other", "maze"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is no JSON"),
        ("[]", "it holds no object"),
        ('{"demos": {}}', "it has an entry 'demos'"),
    ],
)
def test_a_list_of_data_sets_that_cannot_be_added_to_is_left_alone(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "dataset_info.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        write_demonstrations(tmp_path / "demos.jsonl", some())
    assert content(tmp_path) == {"dataset_info.json": text.encode()}


# Whole or not there


class Stop(BaseException):
    """Like an interrupt."""


@pytest.mark.parametrize("at", [0, 10, 35, 39])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, at: int
) -> None:
    made, demonstrate = itertools.count(), demonstrations.demonstrate

    def interrupted(*args: Any) -> Any:
        if next(made) == at:
            raise Stop
        return demonstrate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(demonstrations, "demonstrate", interrupted)
        with pytest.raises(Stop):
            write_demonstrations(tmp_path / kind, some())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_files_that_belong_together_get_their_names_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The folder of pictures, the lines and `dataset_info.json` are renamed one after the other."""
    calls = itertools.count(1)

    def interrupted(rename: Callable[..., None]) -> Callable[..., None]:
        def rename_or_stop(*args: Any) -> None:
            if next(calls) == failing:
                raise Stop
            rename(*args)

        return rename_or_stop

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted(os.rename))
        patch.setattr(os, "replace", interrupted(os.replace))
        with pytest.raises(Stop):
            write_demonstrations(tmp_path / "demos.jsonl", some(3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["demos.parquet", "demos", "demos.jsonl", "demos-pictures"])
def test_what_exists_is_never_overwritten(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")
    if name == kind or (name, kind) == ("demos-pictures", "demos.jsonl"):
        with pytest.raises(ConfigError, match=f"{tmp_path / name} exists; give another name"):
            write_demonstrations(tmp_path / kind, some(3))
        assert content(tmp_path) == {name: b"mine"}
    else:
        write_demonstrations(tmp_path / kind, some(3))
        assert (tmp_path / name).read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["demos.json", "demos.csv", "demos.v2"])
def test_a_name_that_says_nothing_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"give FILE\.parquet"):
        write_demonstrations(tmp_path / name, some(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_missing_is_told(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "none" / kind
    with pytest.raises(DatasetError, match=f"cannot write demonstrations to {path}: No such file or dir"):
        write_demonstrations(path, some(3))


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("demos.parquet", "tempfile.mkstemp"),
        ("demos.parquet", "os.fsync"),
        ("demos", "tempfile.mkdtemp"),
        ("demos", "os.rename"),
        ("demos", "os.sync"),
        ("demos.jsonl", "tempfile.mkdtemp"),
        ("demos.jsonl", "os.rename"),
        ("demos.jsonl", "os.replace"),
        ("demos.jsonl", "pathlib.Path.write_bytes"),
    ],
)
def test_a_disk_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, call: str
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(DatasetError, match="No space left on device; free space or give another place"):
            write_demonstrations(tmp_path / kind, some(3))
    assert list(tmp_path.iterdir()) == []


def disk(free_bytes: int, free_files: int, all_files: int = 10**9) -> Callable[[Path], Any]:
    """What `os.statvfs` says of such a disk."""
    return lambda _: SimpleNamespace(
        f_frsize=4096, f_bavail=free_bytes // 4096, f_files=all_files, f_favail=free_files
    )


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(os, "statvfs", disk(1 << 20, 10**9))
    message = (
        r"cannot write 100,000 demonstrations to .*: they take about [\d,]{10,13} bytes and 1,048,576 are"
    )
    with pytest.raises(SetupError, match=message):
        write_demonstrations(tmp_path / kind, some(100_000))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(os, "statvfs", disk(1 << 40, 100))
    if kind == "demos.parquet":
        write_demonstrations(tmp_path / kind, some())
        return
    with pytest.raises(SetupError, match=r"files and the file system allows 100 more; write parquet"):
        write_demonstrations(tmp_path / kind, some())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "statvfs", disk(1 << 40, 0, all_files=0))
    write_demonstrations(tmp_path / kind, some())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_turn", [False, True])
def test_the_room_asked_for_is_about_what_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, per_turn: bool
) -> None:
    asked = []
    monkeypatch.setattr(demo_files, "math", SimpleNamespace(ceil=lambda x: asked.append(x) or int(x)))
    write_demonstrations(tmp_path / kind, some(80), per_turn)
    blocks = 4096 if kind != "demos.parquet" else 1
    taken = sum(-(-len(data) // blocks) * blocks for data in content(tmp_path).values())
    assert taken < asked[0] < 1.3 * taken


def test_progress_is_told_after_each_episode(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    write_demonstrations(tmp_path / "demos.parquet", some(5), progress=lambda *now: told.append(now))
    assert told == [(n, 5) for n in range(1, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:2])
def test_ten_times_the_episodes_take_the_same_memory(tmp_path: Path, kind: str) -> None:
    script = (
        "import resource, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "import test_demo_files as t; t.write_demonstrations(Path(sys.argv[2]), t.some(int(sys.argv[3])))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for count in (500, 5000):
        out = tmp_path / f"{count}-{kind}"
        command = [sys.executable, "-c", script, Path(__file__).parent, out, str(count)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < peaks[0] + 30 * 1024, "in KiB; 5,000 episodes have some 70 MB of pictures and words"


def test_the_digest_is_of_the_episodes(tmp_path: Path) -> None:
    """Every answer and every pixel counts."""
    digests = {
        write_demonstrations(tmp_path / f"{number}.parquet", some(3, config)).sha256
        for number, config in enumerate(
            [CONFIG, MazeConfig(cell_px=8, grammar="keyword"), MazeConfig(cell_px=9)]
        )
    }
    assert len(digests) == 3
    assert all(len(digest) == len(hashlib.sha256().hexdigest()) for digest in digests)
