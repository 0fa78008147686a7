"""SkyRL's engine servers without engines: they load and answer as these do, or fail as they are asked to."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import safetensors.torch
from aiohttp import web
from aiohttp.test_utils import TestServer

BASE, POLICY = "base", "policy"


class FakeEngine:
    """One server.

    Args:
        fault: what goes wrong: see `_load`, `_rpc` and `_generate`.
        failures: how often, before it goes well.
    """

    def __init__(self, fault: str = "", failures: int = 10**6) -> None:
        self.fault, self.failures, self.url = fault, failures, ""
        self.asked: list[str] = []
        self.loads: list[str] = []
        self.serves: Path | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/skyrl/v1/load_lora_adapter", self._load)
        app.router.add_post("/collective_rpc", self._rpc)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    def _fails(self, *faults: str) -> bool:
        if self.fault not in faults or self.failures <= 0:
            return False
        self.failures -= 1
        return True

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.loads.append(Path(body["lora_path"]).parent.name)
        if self._fails("no load"):
            error = {"message": "Worker failed with error 'No adapter found'"}
            return web.json_response({"error": error}, status=500)
        if self._fails("no JSON"):
            return web.Response(text="<html>busy</html>")
        if self._fails("no status"):
            return web.json_response({"lora_int_id": 1})
        if self._fails("hangs"):
            await asyncio.sleep(3600)
        if not self._fails("stays with the old one"):
            self.serves = Path(body["lora_path"])
        return web.json_response({"status": "ok", "lora_name": body["lora_name"], "lora_int_id": 1})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["method"])
        if self._fails("no witness"):
            return web.json_response({"error": {"message": "no attribute"}}, status=500)
        if body["method"] == "skyrl_maze_sees":
            blind = {"error": "FileNotFoundError: adapter_config.json"} if self._fails("blind") else {}
            return web.json_response({"results": [blind, {}]})
        folder = Path(body["args"][1])
        modules = sorted({name.rpartition(".lora_")[0] for name in _tensors(folder)})
        reports: list[Any] = [{"applied": modules, "other": []} for _ in range(2)]
        if self._fails("applies nothing"):
            reports = [{"applied": [], "other": []} for _ in range(2)]
        elif self._fails("applies fewer"):
            reports = [{"applied": modules[:-1], "other": []} for _ in range(2)]
        elif self._fails("workers disagree"):
            reports[1]["applied"] = modules[:-1]
        elif self._fails("one worker applies nothing"):
            reports[1]["applied"] = []
        elif self._fails("halves"):  # of the layers, as pipeline parallel workers have them
            reports = [{"applied": modules[:1], "other": []}, {"applied": modules[1:], "other": []}]
        elif self._fails("odd report"):
            reports = ["True", "True"]
        elif self.serves != folder:
            reports = [{"applied": [], "other": modules} for _ in range(2)]
        return web.json_response({"results": reports})

    async def _models(self, _request: web.Request) -> web.Response:
        cards = [{"id": BASE, "root": "/models/base"}]
        if self.serves is not None:
            cards.append({"id": POLICY, "root": str(self.serves)})
        return web.json_response({"data": cards})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["model"])
        if self._fails("hangs"):
            await asyncio.sleep(3600)
        if self._fails("breaks off"):
            assert request.transport is not None
            request.transport.abort()
        if self._fails("no logprobs"):
            return web.json_response({"choices": []})
        shift = 0.0
        if body["model"] != BASE and not self._fails("answers as the base model"):
            assert self.serves is not None
            shift = sum(float(t.sum()) for name, t in _tensors(self.serves).items() if ".lora_B." in name)
        if self._fails("another model"):
            shift += 0.2
        ids = body["token_ids"]
        logprobs = [{str(i): {"logprob": float("nan") if self.fault == "NaN" else -2.0 - shift}} for i in ids]
        return web.json_response({"prompt_logprobs": [None, *logprobs[1:]]})


@contextlib.asynccontextmanager
async def serving(*engines: FakeEngine) -> Any:
    """Their addresses, while they listen."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            server = TestServer(engine.app())
            await server.start_server(shutdown_timeout=0.1)
            stack.push_async_callback(server.close)
            engine.url = str(server.make_url("")).rstrip("/")
        yield [engine.url for engine in engines]


def _tensors(folder: Path) -> Any:
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")
