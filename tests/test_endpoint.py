"""The client against a server that behaves well, badly and maliciously."""

import asyncio
import datetime
import email.utils
import socket

import pytest
from fake_endpoint import endpoint, says
from tenacity import wait_none

from skyrl_maze import dataset
from skyrl_maze import endpoint as module
from skyrl_maze.actions import GoalRule
from skyrl_maze.address import Address, Sampling
from skyrl_maze.endpoint import Endpoint
from skyrl_maze.errors import EndpointError
from skyrl_maze.faults import EpisodeError
from skyrl_maze.policies import Situation

SECRET = "sk-not-to-be-seen"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Where to?"}]}]
MAZE = dataset.load_set("visgym-easy-64")[0]
SITUATION = Situation(MESSAGES, MAZE, MAZE.start, GoalRule.STOP, "tuple", index=3, sample=2, turn=0)
OK = says("up")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(module, "_backoff", wait_none())


def asks(url, times=1, notify=lambda text: None, **options):
    """What `times` questions in a row gave: texts and EpisodeErrors."""

    async def ask():
        address = Address(url, "qwen", **{"retries": 2, "timeout_s": 30.0, **options})
        given = []
        async with Endpoint(address, Sampling(64, 0.0, 1.0, 7), notify) as policy:
            for _ in range(times):
                try:
                    given.append(await policy.answer(SITUATION))
                except EpisodeError as error:
                    given.append(error)
        return given

    return asyncio.run(ask())


def scripted(*answers):
    """A server's answers in turn; the last one goes on."""
    return lambda _asked, number: answers[min(number, len(answers) - 1)]


def test_a_question_is_openais():
    with endpoint(scripted(says("('move', 0)"))) as server:
        assert asks(server.url, api_key=SECRET) == ["('move', 0)"]
    [asked] = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["Authorization"] == f"Bearer {SECRET}"
    assert asked.headers["Content-Type"] == "application/json"
    assert asked.body == {
        "model": "qwen",
        "messages": MESSAGES,
        "max_tokens": 64,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 9,
    }


def test_without_a_key_none_is_sent(monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with endpoint(scripted(OK)) as server:
        asks(server.url)
    assert "Authorization" not in server.asked[0].headers


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (says(""), ""),
        (says([{"type": "text", "text": "u"}, {"type": "text", "text": "p"}, 3]), "up"),
        (says(None, "length"), ""),
        (says("half \ud800"), "half \ud800"),
        (says(f"your key is {SECRET}"), "your key is ***"),
    ],
)
def test_odd_answers_are_read(answer, text):
    with endpoint(scripted(answer)) as server:
        assert asks(server.url, api_key=SECRET) == [text]


BAD = [
    (
        (200, "<!doctype html><title>Welcome", {"Content-Type": "text/html"}),
        "text/html, no JSON object: <!doc",
    ),
    ((200, b"\xff\xfe", {}), "no JSON object"),
    ((200, "[" * 100_000, {}), "no JSON object"),
    ((200, "[]", {}), "no JSON object"),
    ((200, "", {}), "no JSON object: no text"),
    ((200, {}, {}), "holds no choices"),
    ((200, {"choices": []}, {}), "holds no choices"),
    ((200, {"choices": {}}, {}), "holds no choices"),
    ((200, {"choices": [None]}, {}), "holds no choices"),
    ((200, {"error": {"message": "no GPU left"}}, {}), "holds an error: no GPU left"),
    ((200, {"choices": [{}]}, {}), "no text but NoneType"),
    ((200, {"choices": [{"message": "up"}]}, {}), "no text but NoneType"),
    (says(None), "no text but NoneType"),
    (says(7), "no text but int"),
    ((400, {"error": {"message": "At most 0 image(s) may be provided"}}, {}), "HTTP 400: At most 0 image"),
    ((400, {"message": "old vLLM"}, {}), "HTTP 400: old vLLM"),
    ((422, {"detail": [{"msg": "bad"}]}, {}), 'HTTP 422: {"detail"'),
    ((413, "too large", {}), "HTTP 413: too large"),
    ((200, b"x" * (5 << 20), {}), "more than 4 MiB"),
    ((500, "\x1b[31mred\x1b[0m\nlines", {}), r"HTTP 500: \[31mred \[0m lines"),
]


@pytest.mark.parametrize(("answer", "reason"), BAD)
def test_a_bad_answer_to_the_first_question_ends_it_all_in_one_line(answer, reason):
    with endpoint(scripted(answer)) as server, pytest.raises(EndpointError, match=reason) as ended:
        asks(server.url)
    assert str(ended.value).startswith(f"cannot play with 'qwen' at {server.url}: ")
    assert str(ended.value).isprintable()
    assert len(str(ended.value)) < 500


@pytest.mark.parametrize(("answer", "reason"), BAD)
def test_later_it_is_the_error_of_one_episode(answer, reason):
    tries = 3 if answer[0] >= 500 else 1
    with endpoint(scripted(OK, *[answer] * tries, OK)) as server:
        first, error, last = asks(server.url, times=3)
    assert first == last == "up"
    assert str(error).isprintable()
    with pytest.raises(EpisodeError, match=reason):
        raise error


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_keys_and_names_concern_all_episodes(status):
    body = {"error": {"message": f"wrong: {SECRET}"}}
    with endpoint(scripted(OK, (status, body, {}))) as server, pytest.raises(EndpointError) as ended:
        asks(server.url, times=2, api_key=SECRET)
    assert f"HTTP {status}: wrong: ***; " in str(ended.value)
    assert len(server.asked) == 2, "not tried again"


def test_half_a_key_at_the_end_of_a_long_message_is_not_shown():
    for length in range(280, 320):
        body = {"error": {"message": "x" * length + SECRET}}
        with endpoint(scripted((401, body, {}))) as server, pytest.raises(EndpointError) as ended:
            asks(server.url, api_key=SECRET)
        assert SECRET[:6] not in str(ended.value)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status):
    told = []
    with endpoint(scripted((status, "busy", {}), (status, "busy", {}), OK)) as server:
        assert asks(server.url, notify=told.append) == ["up"]
    assert len(server.asked) == 3
    assert told[0] == f"HTTP {status}: busy; next try in 0 s"


def test_a_broken_connection_is_tried_again():
    def answer(_asked, number):
        if number < 2:
            raise ConnectionError
        return OK

    with endpoint(answer) as server:
        assert asks(server.url) == ["up"]


def test_tries_come_to_an_end():
    with (
        endpoint(scripted((503, "busy", {}))) as server,
        pytest.raises(EndpointError, match="HTTP 503"),
    ):
        asks(server.url)
    assert len(server.asked) == 3


def test_nobody_there_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(
            EndpointError, match=f"cannot play with 'qwen' at {url}: no connection: Cannot connect"
        ):
            asks(url)


@pytest.mark.parametrize("url", ["http://exa mple/v1", "http://a..b/v1", "http://" + "a" * 300 + "/v1"])
def test_a_host_that_cannot_be_is_one_line(url):
    with pytest.raises(EndpointError, match="no connection") as ended:
        asks(url, retries=0)
    assert "\n" not in str(ended.value)


def test_a_certificate_that_nobody_signed_is_not_tried_again():
    told = []
    with endpoint(scripted(OK)) as server, pytest.raises(EndpointError, match="no connection"):
        asks(server.url.replace("http:", "https:"), notify=told.append)
    assert told == []


def test_no_answer_in_time_is_an_episodes_error():
    hung = asyncio.Event()

    async def hang(_reader, writer):
        await hung.wait()
        writer.close()

    async def ask():
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        address = Address(url, "qwen", retries=1, timeout_s=0.2)
        try:
            async with Endpoint(address, Sampling(64, 0.0, 1.0, 0)) as policy:
                await policy.answer(SITUATION)
        finally:
            hung.set()
            server.close()

    with pytest.raises(EndpointError, match=r"no answer in 0\.2 s"):
        asyncio.run(ask())


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_carries_the_key_away(status):
    with endpoint(scripted(OK)) as other, endpoint(lambda *_: redirect) as server:
        redirect = (status, "", {"Location": f"{other.url}/chat/completions?token={SECRET}"})
        with pytest.raises(EndpointError) as ended:
            asks(server.url, api_key=SECRET)
    assert f"it redirects (HTTP {status}) to {other.url}/chat/completions, and no key" in str(ended.value)
    assert other.asked == []
    assert SECRET not in str(ended.value)


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        (None, 0),
        ("3", 3),
        ("0.9", 1),
        ("100000", 60),
        ("inf", 60),
        ("-5", 0),
        ("nan", 0),
        ("soon", 0),
        ("Mon, 99 Foo 2026", 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 60),
    ],
)
def test_a_servers_wish_to_be_left_alone_is_heard_within_bounds(header, wait_s):
    class EnoughError(Exception):
        pass

    def notify(text):
        raise EnoughError(text)

    headers = {} if header is None else {"Retry-After": header}
    with endpoint(scripted((429, "slowly", headers))) as server, pytest.raises(EnoughError) as told:
        asks(server.url, notify=notify)
    assert str(told.value) == f"HTTP 429: slowly; next try in {wait_s} s"


def test_a_date_to_come_back_at_is_heard():
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=40)
    assert 30 < module._retry_after_s(email.utils.format_datetime(soon, usegmt=True)) <= 40
