"""The nodes of a Ray cluster, and questions to all of them at once: answered in time, or the node is named.

The questions at the end run on the nodes. They need little but the standard library, so that the answer comes
within a second, not after an import of the trainer.
"""

import contextlib
import fcntl
import importlib.metadata
import logging
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_maze.errors import SetupError
from skyrl_maze.faults import cause_of

HEAD_RESOURCE = "node:__internal_head__"
_CONNECT_LIMIT_S = 15
# How a connection of HTTP/2, which gRPC speaks, begins; its server must answer (RFC 9113, section 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000 04 00 00000000")
_FETCH_LIMIT_S = 30


def own_address() -> str:
    """The address of the node that this runs on."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Node:
    """One node, as Ray knows it."""

    id: str
    address: str
    gpus: int
    head: bool

    def __str__(self) -> str:
        return f"{self.address} ({'head, ' if self.head else ''}{self.id[:8]})"


@dataclass(frozen=True)
class Answers:
    """What the nodes said, and why some did not."""

    said: dict[Node, Any]
    silent: dict[Node, str]

    @property
    def problems(self) -> list[str]:
        """A line for each node that did not answer."""
        return [f"{node}: {why}" for node, why in self.silent.items()]


def check_address(address: str) -> None:
    """Raise SetupError if a cluster is named that does not answer; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    where = (host.removeprefix("ray://").strip("[]"), int(port))
    try:
        with socket.create_connection(where, timeout=_CONNECT_LIMIT_S) as connection:
            connection.sendall(_PREFACE)
            connection.recv(1)  # a process that hangs is connected to, and says nothing
    except ConnectionResetError:
        return  # it answered, in its way: with TLS this is no beginning
    except (OSError, OverflowError) as error:
        raise SetupError(
            f"RAY_ADDRESS={address} names a Ray cluster that does not answer ({error}); start it, or unset it"
        ) from None


@contextlib.contextmanager
def joined() -> Iterator[bool]:
    """Inside, this process is a driver of the Ray cluster that RAY_ADDRESS names or that runs here.

    Gives False if there is none. Raises SetupError if one is named that does not answer.
    """
    import ray

    check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        yield False
        return
    try:
        yield True
    finally:
        ray.shutdown()


def known() -> tuple[list[Node], list[Node]]:
    """The nodes that Ray takes to be alive, the head first, and those that it has lost."""
    import ray

    alive, gone = list[Node](), list[Node]()
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        has = node["Resources"]
        found = Node(node["NodeID"], node["NodeManagerAddress"], int(has.get("GPU", 0)), HEAD_RESOURCE in has)
        (alive if node["Alive"] else gone).append(found)
    return sorted(alive, key=lambda node: (not node.head, node.address, node.id)), gone


def ask(question: Callable[..., Any], nodes: Iterable[Node], limit_s: float, *arguments: Any) -> Answers:
    """Have a function called on each of these nodes at once; all have `limit_s` seconds together."""
    import ray

    waiting = {_call(question, node, *arguments): node for node in nodes}
    said, silent = dict[Node, Any](), dict[Node, str]()
    ready, late = ray.wait([*waiting], num_returns=len(waiting), timeout=limit_s) if waiting else ([], [])
    for call in ready:
        try:
            said[waiting[call]] = ray.get(call, timeout=_FETCH_LIMIT_S)
        except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
            silent[waiting[call]] = "was lost while it was asked"
        except Exception as error:  # whatever a node may say
            silent[waiting[call]] = cause_of(getattr(error, "cause", None) or error)
    for call in late:
        silent[waiting[call]] = f"did not answer within {limit_s:g} s"
        ray.cancel(call, force=True)
    return Answers(said, silent)


def _call(question: Callable[..., Any], node: Node, *arguments: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    asked: Any = ray.remote(num_cpus=0, max_retries=0)(question)
    return asked.options(scheduling_strategy=there).remote(*arguments)


def clock_offset_s(node: Node, limit_s: float, tries: int = 3) -> tuple[float, float]:
    """By how many seconds a node's clock is ahead of this one, and how wrong that may be.

    Half of the shortest round trip is the bound, as in NTP (RFC 5905, section 8).

    Raises:
        SetupError: it did not answer.
    """
    import ray

    best = (0.0, float("inf"))
    for _ in range(tries):
        sent_s, began_s = time.time(), time.monotonic()
        try:
            there_s = ray.get(_call(clock, node), timeout=limit_s)
        except Exception as error:  # whatever a node may say
            raise SetupError(f"{node}: {cause_of(error)}") from error
        bound_s = (time.monotonic() - began_s) / 2
        if bound_s < best[1]:
            best = (there_s - (sent_s + bound_s), bound_s)
    return best


# --- Questions ---


def present() -> bool:
    """Nothing but an answer."""
    return True


def clock() -> float:
    """The time, in seconds since the epoch."""
    return time.time()


def missing(paths: list[str]) -> list[str]:
    """Those of the paths that are not there."""
    return [path for path in paths if not Path(path).exists()]


def exchange(folder: str, word: str) -> str:
    """Read what was written elsewhere, and write an answer beside it under a name of this node's own.

    Returns:
        The name of the file that was written, or a text that begins with `cannot`.
    """
    import ray

    here = Path(folder)
    try:
        if (here / "word").read_text(encoding="utf-8") != word:
            return f"cannot see in {folder} what was written now: another file is there"
        name = str(ray.get_runtime_context().get_node_id())
        (here / name).write_text(word, encoding="utf-8")
    except OSError as error:
        return f"cannot see in {folder} what was written now, or not answer there ({error.strerror})"
    return name


def try_lock(path: str, wait_s: float) -> str:
    """Whether this node gets a lock: `taken` (and given back), `held` by another, or what went wrong."""
    until_s = time.monotonic() + wait_s
    try:
        with Path(path).open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return "taken"
                except BlockingIOError:
                    if time.monotonic() >= until_s:
                        return "held"
                time.sleep(0.05)
    except OSError as error:  # a mount without the option flock says ENOSYS
        return f"flock fails: {error.strerror}"


def free_bytes(path: str) -> int:
    """Room on the file system of a folder."""
    return shutil.disk_usage(path).free


def versions(packages: dict[str, list[str]]) -> dict[str, str]:
    """Version of each package, by the first of its distributions that is installed; Python's as well."""
    found = {"python": platform.python_version()}
    for package, distributions in packages.items():
        found[package] = "none"
        for name in reversed(distributions):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(name)
    return found
