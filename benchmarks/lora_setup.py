"""What the parts of the LoRA benchmark share: the sizes of its models, and processes that answer calls."""

import contextlib
import multiprocessing.connection
import multiprocessing.context
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ANSWER_LIMIT_S = 600


@dataclass(frozen=True)
class Sizes:
    """What decides the shapes of a Qwen3-VL and of the LoRA on its language layers."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    vision_hidden: int
    vision_intermediate: int
    vision_depth: int
    lora_rank: int


QWEN3_VL_8B = Sizes(4096, 12288, 36, 32, 8, 128, 151_936, 1152, 4304, 27, 32)
SCALED_DOWN = Sizes(512, 1536, 6, 4, 2, 128, 16_384, 256, 1024, 8, 8)
SMALL = Sizes(64, 128, 2, 2, 1, 32, 512, 64, 128, 4, 8)


class Process:
    """Another process, which holds an object and calls its methods."""

    def __init__(
        self, context: multiprocessing.context.BaseContext, start: Callable[..., None], *arguments: Any
    ) -> None:
        """Start it: `start` gets the arguments and a connection, which it hands to `answer_calls`."""
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=start, args=(*arguments, theirs), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> None:
        """Have a method called; `answer` waits for it."""
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """What the method returned; raises RuntimeError if it failed, SystemExit if the process is gone."""
        if not self._connection.poll(ANSWER_LIMIT_S):
            raise SystemExit(f"error: {self._process.name} did not answer within {ANSWER_LIMIT_S} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise SystemExit(f"error: {self._process.name} ended; see what it printed above") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def hang_up(self) -> None:
        """Have it end when its call is done."""
        self._connection.close()

    def end(self) -> None:
        """Wait a little for it to end, then make it end."""
        self._process.join(5)
        self._process.kill()
        self._process.join()


def answer_calls(target: object, connection: multiprocessing.connection.Connection) -> None:
    """Say that this process is ready, then answer calls until the other end closes."""
    connection.send(None)
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = getattr(target, method)(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer = RuntimeError(
                f"{type(error).__name__} in {method}: {error}"[:1000]
            )  # this one can be sent
        with contextlib.suppress(ConnectionError):  # the other end may have given up
            connection.send(answer)
