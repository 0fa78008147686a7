"""Publishes a version in child processes that die, or run out of disk, one step later each time.

    python adapter_crashes.py kill|full FOLDER      prints how many steps there were

After each death a reader must find the old version or the new one, whole, and a fresh start must succeed.
"""

import errno
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from adapter_files import RUN, published, tensors_of
from safetensors.torch import load_file

from skyrl_maze import complete, durable, versions
from skyrl_maze.adapter import WEIGHTS_FILE
from skyrl_maze.errors import SetupError

Life = Callable[[Path, str, int], int]
Check = Callable[[Path, set[int]], int]
CALLS = ("write", "fsync", "link", "rename", "unlink", "mkdir", "rmdir")
DONE, REFUSED, BROKEN, UNHARMED = 0, 3, 4, 5


class Fate:
    """Counts the moments at which a call on files can be interrupted, and strikes at one of them."""

    def __init__(self, mode: str, strike_at: int) -> None:
        self.mode, self.left = mode, strike_at
        for name in CALLS:
            setattr(os, name, self.around(name, getattr(os, name)))

    def around(self, name, real):
        def call(*args, **kwargs):
            self.moment(name)
            if name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
                self.moment(name)
                return len(args[1]) // 2 + real(args[0], args[1][len(args[1]) // 2 :])
            result = real(*args, **kwargs)
            if self.mode == "kill":
                self.moment(name)
            return result

        return call

    def moment(self, name):
        if self.mode == "full" and name not in ("write", "fsync", "mkdir"):
            return
        self.left -= 1
        if self.left == 0 and self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def life(root: Path, mode: str, strike_at: int) -> int:
    """What a run does from its start to the end of a step."""
    durable.CHUNK_BYTES = 700
    fate = Fate(mode, strike_at)
    try:
        versions.clean_leftovers(root, RUN, 0)
        published(root, 2)
        versions.retain(root, RUN, keep=1)
    except SetupError as error:
        return REFUSED if "\n" not in str(error) and "bytes free" in str(error) else BROKEN
    except BaseException:
        traceback.print_exc()
        return BROKEN
    return DONE if fate.left > 0 else UNHARMED  # such as a folder that was there before


def in_child(work, *args) -> int:
    if (pid := os.fork()) == 0:
        try:
            os._exit(work(*args))
        finally:  # whatever it raised
            traceback.print_exc()
            os._exit(BROKEN)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_reader(root: Path, steps: set[int]) -> None:
    version = versions.latest(root, RUN, content=True)
    assert version is not None
    assert version.step in steps, version
    held, expected = load_file(version.adapter / WEIGHTS_FILE), tensors_of(seed=version.step)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], whole) for name, whole in expected.items())
    # Whatever claims to be complete is.
    for other in versions.all_versions(root, RUN):
        if (other.path / complete.COMPLETE).exists():
            complete.verify(other.path, RUN)


def check_fresh_start(root: Path) -> None:
    versions.clean_leftovers(root, RUN, 0)
    published(root, 2)
    versions.retain(root, RUN, keep=1)
    check_reader(root, {2})
    found = [p for p in (root / RUN).rglob("*") if p.name.startswith(".")]
    assert found == [], found
    assert len(versions.all_versions(root, RUN)) == 1


def main(mode: str, folder: Path) -> None:
    torch.set_num_threads(1)
    before = folder / "before"
    published(before, 1)
    crashed = versions.new_version(before, RUN, 2)
    (crashed.path / ".adapter.x").mkdir()
    (crashed.path / ".adapter.x" / "half").write_text("half")
    strike_at_each_moment(mode, folder, life, check_whole)


def check_whole(root: Path, steps: set[int]) -> int:
    check_reader(root, steps)
    check_fresh_start(root)
    return DONE


def strike_at_each_moment(mode: str, folder: Path, life: Life, check: Check) -> None:
    """Let a child live in a copy of `folder`/before, struck one moment later each time; check what it left.

    `check` runs in a child as well, and gets the steps that a reader may find. Prints the number of moments.
    """
    strike_at, ended = 0, None
    while ended != DONE:
        strike_at += 1
        root = folder / str(strike_at)
        shutil.copytree(folder / "before", root)
        ended = in_child(life, root, mode, strike_at)
        allowed = {-signal.SIGKILL} if mode == "kill" else {REFUSED, UNHARMED}
        assert ended in {DONE, *allowed}, (strike_at, ended)
        steps = {2} if ended in (DONE, UNHARMED) else {1, 2}
        assert in_child(check, root, steps) == DONE, strike_at
        shutil.rmtree(root)
    print(strike_at - 1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
