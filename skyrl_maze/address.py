"""Where a model is asked, and how."""

import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from skyrl_maze.errors import ConfigError

PATH = "/chat/completions"


@dataclass(frozen=True)
class Sampling:
    """How a model is asked.

    Attributes:
        max_tokens: of one answer.
        temperature: 0 for the likeliest answer.
        top_p: share of probability that is sampled from; 1 for all of it.
        seed: of sampling; each sample of a maze adds its number.
    """

    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Address:
    """Where a model is asked.

    Attributes:
        url: such as `http://host:8000/v1`.
        model: its name there.
        api_key: sent as a bearer token; None sends none.
        retries: how often a request is tried again.
        timeout_s: seconds for one answer.

    Raises:
        ConfigError: the address is none or holds credentials, or the key or the timeout cannot be used.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    retries: int = 5
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"a timeout of {self.timeout_s:g} s: must be a number of seconds above 0")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("the API key holds characters that no key has; copy it again, without line end")


def checked_url(url: str) -> str:
    """The address without `/chat/completions` and slashes at its end.

    Raises:
        ConfigError: it is no http address, or holds credentials or a query; what it holds is not repeated.
    """
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(
            f"the endpoint is no address ({error}); give one such as http://host:8000/v1"
        ) from None
    if "@" in parts.netloc:
        raise ConfigError(
            "the endpoint holds a name or password; leave them out, and put the key into OPENAI_API_KEY"
        )
    if parts.query or parts.fragment:
        raise ConfigError("the endpoint holds a query (?...) or a fragment (#...); leave it out")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"the endpoint {url!r} is no http address; give one such as http://host:8000/v1")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix(PATH).rstrip("/")
