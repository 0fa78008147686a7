"""An OpenAI-compatible server on a free port, in a thread of its own, that says what it is told."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = tuple[int, Any, dict[str, str]]
"""Status, body (JSON unless it is text or bytes), headers."""


@dataclass
class Asked:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Server:
    answer: "Callable[[Asked, int], Answer]"
    url: str = ""
    asked: list[Asked] = field(default_factory=list)


def says(content: Any, finish_reason: str = "stop") -> Answer:
    """A usual answer with this content."""
    message = {"role": "assistant", "content": content}
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}, {}


@contextlib.contextmanager
def endpoint(answer: Callable[[Asked, int], Answer]) -> Iterator[Server]:
    """A server that gives `answer(request, number of the request from 0)`; raising breaks the connection."""
    server = Server(answer)

    async def handle(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        asked = Asked(request.path, dict(request.headers), json.loads(data) if data else None)
        server.asked.append(asked)
        try:
            status, body, headers = server.answer(asked, len(server.asked) - 1)
        except ConnectionError:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(body, str | bytes):
            data = body.encode() if isinstance(body, str) else body
            return web.Response(status=status, body=data, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
