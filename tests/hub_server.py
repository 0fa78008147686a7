"""A Hugging Face Hub on this machine, as far as `HfApi` asks one for models: for tests of downloads."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One model repository; tests change it while it is served."""

    repo: str
    files: dict[str, bytes]
    token: str | None = None
    """What a client must send; None: anything or nothing."""
    breaks: dict[str, int] = field(default_factory=dict)
    """After how many bytes the connection breaks, by file; once each."""
    damaged: set[str] = field(default_factory=set)
    """Files that are sent with a wrong byte in them."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request, with `Range` if there was one."""
    url: str = ""

    def entry(self, name: str) -> dict[str, object]:
        """What the tree says of a file: large ones by SHA-256, as the Hub does."""
        data = self.files[name]
        found: dict[str, object] = {
            "type": "file",
            "path": name,
            "size": len(data),
            "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
        }
        if name.endswith(".safetensors"):
            found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return found


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_arguments: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        span = self.headers.get("Range", "")
        hub.requests.append(f"{self.command} {path} {span}".strip())
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "no access"})
        if path in {f"/api/models/{hub.repo}/revision/{name}" for name in ("main", COMMIT)}:
            siblings = [{"rfilename": name} for name in hub.files]
            return self._send(200, json.dumps({"id": hub.repo, "sha": COMMIT, "siblings": siblings}).encode())
        if path == f"/api/models/{hub.repo}/tree/{COMMIT}":
            return self._send(200, json.dumps([hub.entry(name) for name in hub.files]).encode())
        name = path.removeprefix(f"/{hub.repo}/resolve/{COMMIT}/")
        if name in hub.files:
            return self._send_file(name, span)
        return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    def _send_file(self, name: str, span: str) -> None:
        hub, data = self.hub, self.hub.files[name]
        if name in hub.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        begin = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", span)) else 0
        etag = hub.entry(name).get("lfs", {}).get("oid") or hub.entry(name)["oid"]  # type: ignore[attr-defined]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        limit = hub.breaks.pop(name, None) if self.command == "GET" else None
        self._send(206 if begin else 200, data[begin:], headers, limit)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, limit: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:limit])
            self.close_connection = True


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` at `hub.url` until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
