"""What `sagemaker_ray://` talks to, on this machine: the Kubernetes API, and a dashboard that wants a login.

Two HTTPS servers, each with a certificate authority of its own as on a real cluster; behind the second a Ray
dashboard. As the endpoint operator does: a link that opens once gives a cookie, and each request needs it.
"""

import asyncio
import contextlib
import io
import json
import secrets
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import trustme
import yaml
from aiohttp import web

CONNECTIONS = (
    "/apis/connection.access.sagemaker.amazonaws.com/v1alpha1/namespaces/{ns}/raydashboardconnections"
)
COOKIE = "ray_session"


@dataclass
class Gateway:
    """Tests change it while it is served."""

    dashboard: str
    """Address of Ray's own dashboard, http://host:port."""
    folder: Path
    """Gets the kubeconfig and the certificates."""
    cluster: tuple[str, str] = ("hyperpod-ns-maze", "skyrl-visgym")
    """Namespace and name."""
    creator: bool = True
    """Whether who asks made the cluster, which the private access strategy wants."""
    links: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    """Method, path and status of each request."""
    port: int = 0
    """Of the dashboard."""

    @property
    def variables(self) -> dict[str, str]:
        """What a client's environment says."""
        authority = str(self.folder / "dashboard.pem")
        return {
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "REQUESTS_CA_BUNDLE": authority,
            "SSL_CERT_FILE": authority,
        }

    async def connect(self, request: web.Request) -> web.Response:
        """The Kubernetes API: a link for whoever may use the cluster."""
        if request.headers.get("Authorization") != f"Bearer {self._token}":
            return web.json_response({"reason": "Unauthorized"}, status=401)
        asked = (request.match_info["ns"], (await request.json())["spec"]["clusterName"])
        if asked != self.cluster:
            return web.json_response({"reason": "NotFound"}, status=404)
        if not self.creator:
            return web.json_response({"reason": "Forbidden"}, status=403)
        self.links.add(link := secrets.token_urlsafe())
        url = f"https://localhost:{self.port}/bearer-auth?token={link}"
        return web.json_response({"status": {"connectionUrl": url}}, status=201)

    async def enter(self, request: web.Request) -> web.Response:
        """The dashboard's login."""
        if (link := request.query.get("token", "")) not in self.links:
            return web.Response(status=401)
        self.links.remove(link)
        self.sessions.add(session := secrets.token_urlsafe())
        answer = web.Response(status=302, headers={"Location": "/"})
        answer.set_cookie(COOKIE, session, secure=True, httponly=True)
        return answer

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """The dashboard, for who has a cookie."""
        if request.cookies.get(COOKIE) not in self.sessions:
            return web.Response(status=401, text="no session")
        url = self.dashboard + request.path_qs
        async with aiohttp.ClientSession() as client:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await self._follow(request, client, url)
            headers = {"Content-Type": request.headers.get("Content-Type", "application/octet-stream")}
            body = await request.read()
            async with client.request(request.method, url, data=io.BytesIO(body), headers=headers) as answer:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type
                )

    async def _follow(
        self, request: web.Request, client: aiohttp.ClientSession, url: str
    ) -> web.WebSocketResponse:
        out = web.WebSocketResponse()
        await out.prepare(request)
        async with client.ws_connect(url) as logs:
            async for message in logs:
                await out.send_str(message.data)
        await out.close()
        return out

    @web.middleware
    async def note(self, request: web.Request, handler: object) -> web.StreamResponse:
        """Write every request down; a log that is followed when it ends."""
        answer = await handler(request)  # type: ignore[operator]
        self.requests.append(f"{request.method} {request.path} {answer.status}")
        return answer  # type: ignore[no-any-return]

    async def start(self) -> None:
        self._token = secrets.token_urlsafe()
        kubernetes = web.Application(middlewares=[self.note])
        kubernetes.router.add_post(CONNECTIONS, self.connect)
        dashboard = web.Application(middlewares=[self.note], client_max_size=1 << 30)
        dashboard.router.add_get("/bearer-auth", self.enter)
        dashboard.router.add_route("*", "/{path:.*}", self.forward)
        server = await self._serve(kubernetes, "kubernetes.pem")
        self.port = await self._serve(dashboard, "dashboard.pem")
        self._write_kubeconfig(f"https://localhost:{server}")

    async def _serve(self, app: web.Application, authority: str) -> int:
        made = trustme.CA()
        made.cert_pem.write_to_path(str(self.folder / authority))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        made.issue_cert("localhost").configure_cert(context)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self._runners = [*getattr(self, "_runners", []), runner]
        return int(runner.addresses[0][1])

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    def _write_kubeconfig(self, server: str) -> None:
        """As `aws eks update-kubeconfig` writes it: a command gives the token."""
        answer = self.folder / "token.json"
        answer.write_text(json.dumps({"kind": "ExecCredential", "status": {"token": self._token}}))
        config = {
            "current-context": "eks",
            "contexts": [{"name": "eks", "context": {"cluster": "eks", "user": "me"}}],
            "clusters": [
                {
                    "name": "eks",
                    "cluster": {
                        "server": server,
                        "certificate-authority": str(self.folder / "kubernetes.pem"),
                    },
                }
            ],
            "users": [{"name": "me", "user": {"exec": {"command": "cat", "args": [str(answer)]}}}],
        }
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(config))


@contextlib.contextmanager
def serve(gateway: Gateway) -> Iterator[Gateway]:
    """Serve `gateway` until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(gateway.start(), loop).result(30)
        yield gateway
    finally:
        asyncio.run_coroutine_threadsafe(gateway.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
