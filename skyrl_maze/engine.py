"""One turn at the engine: token ids and pictures in, sampled ids out, every answer checked.

Pictures travel as PNG files in `content_parts` of vLLM's `/inference/v1/generate`, or, to an engine that does
not know these, as tensors that it rendered itself before. Which one is found out with the first picture.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from skyrl.backends.renderer import decode_mm_kwargs

from skyrl_maze.chat import ChatFormat
from skyrl_maze.errors import ConfigError
from skyrl_maze.faults import EpisodeError, RolloutConfig, Tally, answered, cause_of, is_passing, retrying
from skyrl_maze.pictures import PLACE, PictureError, describe, sample_picture
from skyrl_maze.trajectory import Picture, Trajectory
from skyrl_maze.vision import PictureReader, Shelf, picture, settled

_FINISHED = ("stop", "length")
_ROUNDING = 0.01  # how far above 0 a log-probability of a near-certain token may come to lie


@dataclass(frozen=True)
class Reply:
    """What the engine answered to one turn."""

    prompt_ids: list[int]
    """What it was given, pictures expanded, as it says."""
    ids: list[int]
    logprobs: list[float] | None
    finish_reason: str
    """`stop` or `length`."""


class RefusedError(EpisodeError):
    """This engine does not take pictures as files; the message says why."""


def _refused(why: str) -> RefusedError:
    return RefusedError("engine", why)


class Engine:
    """Sends turns to SkyRL's inference client and checks what comes back.

    Args:
        client: a `RemoteInferenceClient`, or whatever has its `generate` and `render_chat_completion`.
        model: the name of the policy at the engine; None for the client's own.
        chat: the conversation's format.
        model_path: where the image processor lies; None if there is none.
        merge: patches along one side of a language token's square, if the model's config says so.
        vocabulary_size: ids below it are tokens.
        config: timeouts, retries, and how pictures travel.
        notify: is told in a sentence how pictures travel.
    """

    def __init__(
        self,
        client: Any,
        model: str | None,
        chat: ChatFormat,
        image_id: int | None,
        model_path: str | None,
        merge: int | None,
        vocabulary_size: int,
        config: RolloutConfig,
        notify: Callable[[str], None],
    ) -> None:
        self._client, self._model, self._chat, self._config = client, model, chat, config
        self._image_id, self._model_path, self._notify = image_id, model_path, notify
        self._dtype: Any = None
        self._reader: PictureReader | None = None
        self._choice: asyncio.Task[bool] | None = None
        self._shelf = Shelf(self._make)
        self._vocabulary_size = vocabulary_size
        self.merge = merge

    async def pictures(self, urls: Sequence[str], tally: Tally) -> list[Picture]:
        """The pictures at these addresses; raises EpisodeError if one cannot be had."""
        if not urls:
            return []
        await self._as_files(tally)
        return [await self._attempts(functools.partial(self._shelf.get, url), tally) for url in urls]

    async def sample(
        self,
        trajectory: Trajectory,
        params: dict[str, Any],
        session_id: str,
        cache_salt: str | None,
        tally: Tally,
        may_fail: Callable[[], None] = lambda: None,
    ) -> Reply:
        """The policy's next answer.

        Raises:
            EpisodeError: the engine did not answer, or not as it should, as often as it may be asked.
        """

        async def ask() -> Reply:
            may_fail()
            if trajectory.pictures and await self._as_files(tally):
                reply = await self._post_files(trajectory, params, session_id, cache_salt)
            else:
                reply = await self._post_tensors(trajectory, params, session_id, cache_salt)
            return self._checked(reply, params)

        reply: Reply = await self._attempts(ask, tally)
        return reply

    async def _attempts(self, call: Callable[[], Any], tally: Tally) -> Any:
        """The call's result, tried as often as allowed; what is raised then is final for its episode."""
        try:
            async for attempt in retrying(self._config, tally):
                with attempt:
                    return await call()
        except (RefusedError, ConfigError):
            raise
        except PictureError as error:
            raise EpisodeError("picture", str(error)) from error
        except EpisodeError as error:
            raise EpisodeError(error.kind, error.message) from error
        except Exception as error:
            raise EpisodeError("engine", cause_of(error)) from error

    async def _answered(self, call: Awaitable[Any]) -> Any:
        return await answered(call, self._config.request_timeout_s, "the engine")

    async def _as_files(self, tally: Tally) -> bool:
        """Whether pictures travel as files; found out once, before the first picture, and after a failure."""
        if not settled(self._choice):
            self._choice = asyncio.ensure_future(self._choose(tally))
        return await asyncio.shield(self._choice)  # type: ignore[arg-type]

    async def _choose(self, tally: Tally) -> bool:
        try:
            if self._config.pictures == "tensors":
                raise _refused("generator.rollouts.pictures=tensors asks for it")
            await self._attempts(self._try_files, tally)
        except RefusedError as reason:
            if self._config.pictures == "files":
                raise ConfigError(
                    f"generator.rollouts.pictures=files cannot be done here: {reason.message}; set it to auto"
                ) from reason
            self._reader = None
            self._notify(f"pictures go to the engine as tensors, again with every turn: {reason.message}")
            return False
        self._notify("pictures go to the engine as files, which it reads once each")
        return True

    async def _try_files(self) -> None:
        """Raise RefusedError unless the engine expands a file as we do, and makes the same tensors of it.

        The picture is one made here: what an environment shows may be damaged, or too large.
        """
        if not isinstance(getattr(self._client, "proxy_url", None), str):
            raise _refused("its client has no address to send them to")
        try:
            self._reader = await asyncio.to_thread(PictureReader, str(self._model_path))
        except (OSError, ValueError, AttributeError) as error:
            raise _refused(f"no image processor in {self._model_path!r} ({cause_of(error)})") from error
        self.merge, url = self._reader.merge, sample_picture()
        ours = await asyncio.to_thread(self._reader.read, url)
        theirs = await self._rendered(url)
        self._dtype = theirs.pixel_values.dtype
        if not torch.equal(ours.pixel_values.to(self._dtype), theirs.pixel_values):
            raise _refused("the engine makes other tensors of a picture than the image processor does")
        probe = Trajectory(self._image_id)
        probe.open(self._chat.opening([{"role": "user", "content": [PLACE]}]), [ours])
        try:
            reply = await self._post_files(probe, {"max_tokens": 1, "temperature": 0.0}, "probe", None)
        except EpisodeError as error:
            if error.kind == "timeout":
                raise
            raise _refused(error.message) from error
        except Exception as error:
            # An answer, of whatever kind, comes from an engine that is there: it just rendered a picture.
            if getattr(error, "status", None) is None and is_passing(error):
                raise
            raise _refused(cause_of(error)) from error
        if reply.prompt_ids != probe.ids:
            raise _refused("it does not expand them (content_parts is unknown to it)")

    def tokens_of(self, grid: Any) -> int:
        """Language tokens that a picture of this grid of patches (time, height, width) fills."""
        return int(grid.prod()) // (self.merge or 1) ** 2

    async def _make(self, url: str) -> Picture:
        if self._reader is None:
            return await self._rendered(url)
        return await asyncio.to_thread(self._reader.read, url, self._dtype)

    async def _rendered(self, url: str) -> Picture:
        """A picture as the engine's own renderer makes it."""
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        body = {"model": self._client.model_name, "messages": [message]}
        rendered = await self._answered(self._client.render_chat_completion({"json": body}))
        features = rendered.get("features") or {}
        places = features.get("mm_placeholders", {}).get("image", [])
        hashes, kwargs = (features.get(name, {}).get("image", []) for name in ("mm_hashes", "kwargs_data"))
        if not len(places) == len(hashes) == len(kwargs) == 1 or kwargs[0] is None:
            raise EpisodeError(
                "reply", f"the engine rendered {len(places)} pictures of 1: {describe(url)}", passing=True
            )
        tensors = decode_mm_kwargs({"image": kwargs})
        patches = len(tensors["pixel_values"])
        self.merge = self.merge or round((patches / places[0]["length"]) ** 0.5)
        found = picture(
            url, tensors["pixel_values"], tensors, self.merge, {"hash": hashes[0], "kwargs": kwargs[0]}
        )
        if found.tokens != places[0]["length"]:
            raise EpisodeError(
                "reply", f"the engine fills {places[0]['length']} tokens with {found.tokens}: {describe(url)}"
            )
        return found

    async def _post_files(
        self, trajectory: Trajectory, params: dict[str, Any], session_id: str, cache_salt: str | None
    ) -> Reply:
        parts = [{"type": "image_url", "url": picture.url} for picture in trajectory.pictures]
        body: dict[str, Any] = {
            "model": self._model or self._client.model_name,
            "sampling_params": params,
            "token_ids": trajectory.folded_ids,
            "content_parts": parts,
            "return_token_ids": True,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        headers = {"Content-Type": "application/json", "X-Session-ID": session_id}
        throttle, _ = self._client._get_semaphores()
        async with throttle or contextlib.nullcontext():
            url = f"{self._client.proxy_url}/inference/v1/generate"
            response = await self._answered(self._client._post(url, json=body, headers=headers))
        try:
            [choice] = response["choices"]
            content = (choice.get("logprobs") or {}).get("content") or []
            placed = [
                (place["offset"], place["length"]) for place in response["mm_placeholders"].get("image", [])
            ]
            reply = Reply(
                response["prompt_token_ids"],
                choice["token_ids"],
                [entry["logprob"] for entry in content] if params.get("logprobs") is not None else None,
                choice["finish_reason"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EpisodeError(
                "reply", f"the engine's answer lacks a part: {cause_of(error)}", True
            ) from error
        ours = [(o, p.tokens) for o, p in zip(trajectory.offsets, trajectory.pictures, strict=True)]
        if placed != ours:
            raise EpisodeError("reply", "the engine put the pictures elsewhere than they are")
        return reply

    async def _post_tensors(
        self, trajectory: Trajectory, params: dict[str, Any], session_id: str, cache_salt: str | None
    ) -> Reply:
        ids = trajectory.ids
        request: dict[str, Any] = {
            "prompt_token_ids": [ids],
            "session_ids": [session_id],
            "sampling_params": params,
            "cache_salt": cache_salt,
        }
        if trajectory.pictures:
            request["mm_features"] = [_features(trajectory)]
        output = await self._answered(self._client.generate(request, model=self._model))
        try:
            [sampled], [reason] = output["response_ids"], output["stop_reasons"]
            given = output.get("response_logprobs")
            logprobs = given[0] if given and params.get("logprobs") is not None else None
        except (KeyError, TypeError, ValueError) as error:
            raise EpisodeError(
                "reply", f"the engine's answer lacks a part: {cause_of(error)}", True
            ) from error
        return Reply(ids, sampled, logprobs, reason)

    def _checked(self, reply: Reply, params: dict[str, Any]) -> Reply:
        """The reply, or an EpisodeError that says what is wrong with it."""
        limit, wants_logprobs = params["max_tokens"], params.get("logprobs") is not None
        if not self._are_tokens(reply.ids) or not self._are_tokens(reply.prompt_ids):
            wrong = "ids that are no token ids"
        elif len(reply.ids) > limit:
            wrong = f"{len(reply.ids)} tokens where {limit} are allowed"
        elif wants_logprobs and len(reply.logprobs or []) != len(reply.ids):
            wrong = f"{len(reply.logprobs or [])} log-probabilities for {len(reply.ids)} tokens"
        elif not all(map(_is_logprob, reply.logprobs or [])):
            wrong = "log-probabilities that are none"
        elif reply.finish_reason not in _FINISHED:
            wrong = f"finish_reason {reply.finish_reason!r}"
        else:
            return reply
        raise EpisodeError("reply", f"the engine answered with {wrong}", passing=True)

    def _are_tokens(self, ids: Any) -> bool:
        return isinstance(ids, list) and all(type(i) is int and 0 <= i < self._vocabulary_size for i in ids)


def _is_logprob(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value) and value < _ROUNDING


def _features(trajectory: Trajectory) -> dict[str, Any]:
    """vLLM's `features`: the pictures as it rendered them, and where they stand in the whole sequence."""
    rendered = [picture.features or {} for picture in trajectory.pictures]
    places = [
        {"offset": o, "length": p.tokens}
        for o, p in zip(trajectory.offsets, trajectory.pictures, strict=True)
    ]
    return {
        "mm_hashes": {"image": [r["hash"] for r in rendered]},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": [r["kwargs"] for r in rendered]},
    }
