"""A model behind an OpenAI-compatible address, asked over POST {url}/chat/completions.

What may pass is tried again: connections, timeouts, 408, 425, 429 and 5xx, after the server's Retry-After. A
key goes to the given address alone: no redirect is followed, and it stands in no message, log or file.
Protocol: https://platform.openai.com/docs/api-reference/chat/create
"""

import contextlib
import datetime
import email.utils
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from skyrl_maze.address import PATH, Address, Sampling
from skyrl_maze.errors import EndpointError
from skyrl_maze.faults import EpisodeError
from skyrl_maze.pictures import without_base64
from skyrl_maze.policies import Situation

MAX_REPLY_BYTES = 4 << 20
LONGEST_WAIT_S, CONNECT_LIMIT_S = 60.0, 30.0
_PASSING_STATUSES = (408, 425, 429)
# The key, the address, the limit or the server behind a proxy: it would be the same for the next episode.
_ALL_STATUSES = (401, 403, 404, 405, 429, 502, 503, 504)
_ADVICE = {
    401: "; set the key in OPENAI_API_KEY, or name its variable with --api-key-env",
    403: "; this key may not use it",
    404: "; check the name of the model, and that the address ends in /v1 if that server has it so",
    405: "; check that the address ends in /v1 if that server has it so",
}


@dataclass(eq=False)
class _RequestError(Exception):
    """One request came to nothing.

    Attributes:
        kind: as in `faults.EpisodeError`.
        message: one line that may be shown.
        passing: whether another try makes sense.
        for_all: whether it concerns every episode, not this one.
        wait_s: how long the server wants to be left alone.
    """

    kind: str
    message: str
    passing: bool = False
    for_all: bool = False
    wait_s: float = 0.0

    def __str__(self) -> str:
        return self.message


class Endpoint:
    """A policy that asks a model; open it with `async with`.

    What fails before it has ever answered is taken as a fault of all episodes, later as one of its episode,
    unless it is a connection, a limit or a key.

    Args:
        notify: is told why a request is tried again.
    """

    def __init__(
        self, address: Address, sampling: Sampling, notify: Callable[[str], None] = lambda _text: None
    ) -> None:
        self._address, self._sampling, self._notify = address, sampling, notify
        self._answered = False
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Endpoint":
        key = self._address.api_key
        self._session = aiohttp.ClientSession(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=self._address.timeout_s, sock_connect=CONNECT_LIMIT_S),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def answer(self, situation: Situation) -> str:
        """See `policies.Policy`."""
        body = self._body(situation.messages, situation.sample)
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._address.retries + 1),
            wait=_wait_s,
            retry=retry_if_exception(lambda error: isinstance(error, _RequestError) and error.passing),
            before_sleep=self._tell,
            reraise=True,
        )
        try:
            text: str = await attempts(self._ask, body)
        except _RequestError as failure:
            if failure.for_all or not self._answered:
                address = self._address
                raise EndpointError(
                    f"cannot play with {address.model!r} at {address.url}: {failure.message}"
                ) from None
            raise EpisodeError(failure.kind, failure.message) from None
        self._answered = True
        return text

    def _body(self, messages: Sequence[dict[str, Any]], sample: int) -> bytes:
        sampling = self._sampling
        request = {
            "model": self._address.model,
            "messages": list(messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed + sample,
        }
        return json.dumps(request).encode()

    async def _ask(self, body: bytes) -> str:
        assert self._session is not None, "an Endpoint is opened with `async with`"
        try:
            async with self._session.post(
                self._address.url + PATH,
                data=body,
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                data = await self._bounded(response)
                return self._read(response, data)
        except aiohttp.ConnectionTimeoutError:
            message = f"no connection in {CONNECT_LIMIT_S:g} s"
            raise _RequestError("engine", message, passing=True, for_all=True) from None
        except TimeoutError:
            message = f"no answer in {self._address.timeout_s:g} s"
            raise _RequestError("timeout", message, passing=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # the last for hosts that cannot be
            wrong = isinstance(error, ValueError | aiohttp.ClientSSLError)
            message = self._shown(f"no connection: {error or type(error).__name__}")
            raise _RequestError("engine", message, passing=not wrong, for_all=True) from None

    async def _bounded(self, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > MAX_REPLY_BYTES:
                raise _RequestError("reply", f"the reply has more than {MAX_REPLY_BYTES >> 20} MiB")
        return bytes(data)

    def _read(self, response: aiohttp.ClientResponse, data: bytes) -> str:
        status = response.status
        reply = _json(data)
        if 300 <= status < 400:
            target = urlsplit(response.headers.get("Location", ""))
            host = target.netloc.rpartition("@")[2]
            where = f"{target.scheme}://{host}{target.path}" if host else target.path
            raise _RequestError(
                "engine",
                self._shown(
                    f"it redirects (HTTP {status}) to {where or 'nowhere'}, and no key is sent on; "
                    "give the final address"
                ),
                for_all=True,
            )
        if status != 200:
            passing = status in _PASSING_STATUSES or status >= 500
            raise _RequestError(
                "engine",
                self._shown(f"HTTP {status}: {_said(reply, data)}") + _ADVICE.get(status, ""),
                passing,
                for_all=status in _ALL_STATUSES,
                wait_s=_retry_after_s(response.headers.get("Retry-After")),
            )
        if not isinstance(reply, dict):
            kind = response.headers.get("Content-Type", "something")
            said = self._shown(f"it answered with {kind}, no JSON object: {_said(None, data)}")
            raise _RequestError("reply", said)
        return self._hidden(self._text(reply, data))

    def _text(self, reply: dict[str, Any], data: bytes) -> str:
        """What the model said. Cut off before it said anything, it said nothing."""
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            found = "an error" if "error" in reply else "no choices"
            raise _RequestError("reply", self._shown(f"the reply holds {found}: {_said(reply, data)}"))
        message = choices[0].get("message")
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(part for part in parts if isinstance(part, str))
        if isinstance(content, str):
            return content
        if content is None and isinstance(message, dict) and choices[0].get("finish_reason") == "length":
            return ""
        raise _RequestError("reply", f"the reply holds no text but {type(content).__name__}")

    def _tell(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait_s = state.next_action.sleep if state.next_action else 0
        self._notify(f"{error}; next try in {wait_s:.0f} s")

    def _hidden(self, text: str) -> str:
        key = self._address.api_key
        return text.replace(key, "***") if key else text

    def _shown(self, text: str) -> str:
        """The text in one line that can be printed, without the key and without pictures."""
        plain = without_base64(self._hidden(text)[:10_000])  # not cut before: half a key is a secret as well
        return " ".join("".join(c if c.isprintable() else " " for c in plain).split())[:300]


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _said(reply: Any, data: bytes) -> str:
    """What a server said of an error: OpenAI's and FastAPI's forms, else how its reply begins."""
    found: Any = reply
    for name in ("error", "message", "detail"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return found if isinstance(found, str) else data.decode("utf-8", "replace") or "no text"


def _retry_after_s(header: str | None) -> float:
    """Seconds of a Retry-After header, which may be a date (RFC 9110, 10.2.3); 0 if it says nothing."""
    if header is None:
        return 0.0
    with contextlib.suppress(ValueError):  # then it is a date
        return max(0.0, float(header))
    try:
        date = email.utils.parsedate_to_datetime(header)
        now = datetime.datetime.now(datetime.UTC)
        return max(0.0, (date - now).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


_backoff = wait_random_exponential(multiplier=0.5, max=10.0)


def _wait_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.wait_s if isinstance(error, _RequestError) else 0.0
    return min(LONGEST_WAIT_S, max(asked, _backoff(state)))
