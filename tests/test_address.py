"""Addresses and keys: what can be used, and what must not be repeated."""

import pytest

from skyrl_maze.address import Address, checked_url
from skyrl_maze.errors import ConfigError

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://host:8000/v1", "http://host:8000/v1"),
        (" https://host/v1/ ", "https://host/v1"),
        ("https://host/v1/chat/completions", "https://host/v1"),
        ("https://host/v1/chat/completions/", "https://host/v1"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_is_its_base(given, url):
    assert checked_url(given) == Address(given, "m").url == url


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@host/v1",
        f"http://{SECRET}@host/v1",
        f"https://host/v1?api-key={SECRET}",
        f"https://host/v1#{SECRET}",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match=r"leave (it|them) out") as refused:
        Address(url, "m")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["", "host:8000/v1", "ftp://host", "http://", "http:///v1", "/v1", "file:///etc"]
)
def test_what_is_no_http_address_is_refused(url):
    with pytest.raises(ConfigError, match=r"is no http address; give one such as http://host:8000/v1"):
        checked_url(url)


@pytest.mark.parametrize("url", ["http://host:99999/v1", "http://host:x/v1", "http://[::1/v1"])
def test_what_is_no_address_at_all_is_refused(url):
    with pytest.raises(ConfigError, match=r"the endpoint is no address"):
        checked_url(url)


@pytest.mark.parametrize("key", [f"{SECRET}\n", f"{SECRET}\r\nX: y", f"{SECRET}ü"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(key):
    with pytest.raises(ConfigError, match="characters that no key has") as refused:
        Address("http://host/v1", "m", key)
    assert SECRET not in str(refused.value)


def test_a_key_is_not_shown():
    assert SECRET not in repr(Address("http://host/v1", "m", SECRET))


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_timeout_must_end(timeout_s):
    with pytest.raises(ConfigError, match="must be a number of seconds above 0"):
        Address("http://host/v1", "m", timeout_s=timeout_s)
