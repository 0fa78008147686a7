"""HyperPod's agent for hung jobs on this machine, as far as the toolkit talks to it."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ray._common.utils import get_default_ray_temp_dir

PORT = 8889  # the toolkit's; it cannot be told another


class _Handler(BaseHTTPRequestHandler):
    told: list[dict[str, Any]]
    status: int

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.told.append({"path": self.path, **body})
        answer = json.dumps({"error": "log_pattern is refused"} if self.status >= 400 else {}).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_arguments: object) -> None:
        pass


@contextlib.contextmanager
def serve(host: str, status: int = 200) -> Iterator[list[dict[str, Any]]]:
    """Listen on the toolkit's port of `host`, a loopback address of one's own; gives what is told."""
    told: list[dict[str, Any]] = []
    handler = type("Handler", (_Handler,), {"told": told, "status": status})
    server = ThreadingHTTPServer((host, PORT), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stdout_of(told: dict[str, Any]) -> list[str]:
    """The lines that Ray keeps of the stdout of the worker that told; what the agent looks at."""
    sessions = Path(get_default_ray_temp_dir())
    name = f"worker-{told['worker_id']}-{told['job_id']}-*.out"
    (path,) = sessions.glob(f"session_2*/logs/{name}")
    return [
        line
        for line in path.read_text().splitlines()
        if not re.match(":(job_id|actor_name|task_name):", line)
    ]
