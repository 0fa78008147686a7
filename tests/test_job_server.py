"""Which failures of a job server pass, and what is made of those that do not; the client is faked."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from skyrl_maze import job_server
from skyrl_maze.errors import NotReadyError, SetupError
from skyrl_maze.job_server import JobServer, JobState


def http(code: int, text: str = "") -> RuntimeError:
    return RuntimeError(f"Request failed with status code {code}: {text}.")  # as Ray's client says it


def refused(code: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = code
    return requests.HTTPError("refused", response=response)


class Client:
    """Gives or raises what is next, whatever is asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[Any]()
        self.made = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.asked.append((name, args, kwargs))
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer() if callable(answer) else answer

        return call

    def connect(self, address: str) -> "Client":
        self.made += 1
        return self


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "_MAX_WAIT_S", 0.01)


def server(client: Client, away_s: float = 60, said: list[str] | None = None) -> JobServer:
    return JobServer("http://head:8265", away_s, (said if said is not None else []).append, client.connect)


INFO = SimpleNamespace(
    status=SimpleNamespace(value="FAILED"), driver_exit_code=3, message=None, driver_node_id="ab12"
)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("refused"),
        requests.ConnectionError("reset"),
        http(503),
        http(500),
        http(401),
        refused(502),
        refused(403),
        ValueError("no JSON"),
    ],
)
def test_what_passes_is_tried_again_with_a_new_client(error: Exception) -> None:
    client, said = Client(error, error, INFO), []
    assert server(client, said=said).state("maze-1") == JobState("FAILED", 3, "")
    assert client.made == 3, "a login may have run out"
    assert len(said) == 1
    assert "http://head:8265 does not answer" in said[0]


@pytest.mark.parametrize("error", [http(400, "invalid runtime_env"), http(422), refused(404)])
def test_what_the_server_refuses_is_said_at_once(error: Exception) -> None:
    client = Client(error)
    with pytest.raises(SetupError, match="http://head:8265 refuses") as caught:
        server(client).submit("maze-1", "train")
    assert not isinstance(caught.value, NotReadyError)


def test_an_absence_is_bounded() -> None:
    client = Client(*[http(503)] * 1000)
    with pytest.raises(NotReadyError, match=r"has not answered for 0 s .* what was submitted may go on"):
        server(client, away_s=0.05).state("maze-1")
    assert 1 < len(client.asked) < 1000


def test_a_job_that_the_server_does_not_know_is_none() -> None:
    assert server(Client(http(404, "Job maze-1 does not exist"))).state("maze-1") is None


def test_a_job_is_submitted_once_though_the_answer_got_lost() -> None:
    exists = http(500, "ValueError: Job with submission_id maze-1 already exists. Please use a different one")
    client = Client(requests.ConnectionError("reset"), exists)
    server(client).submit("maze-1", "train")
    submission = ("submit_job", (), {"entrypoint": "train", "submission_id": "maze-1"})
    assert client.asked == [submission] * 2


def test_a_call_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "_CALL_LIMIT_S", 0.2)
    released = threading.Event()
    client = Client(lambda: released.wait(30), INFO)
    assert server(client).state("maze-1") == JobState("FAILED", 3, "")
    released.set()


def test_the_first_contact_is_not_tried_again() -> None:
    client = Client(ConnectionError("Failed to connect"))
    with pytest.raises(SetupError, match="cannot reach Ray's dashboard at http://head:8265"):
        server(client).reach()
    assert client.made == 1


def test_an_unknown_module_of_an_address_names_the_toolkit() -> None:
    with pytest.raises(SetupError, match="once toolkit-for-ray-on-sagemaker-ai is installed"):
        JobServer("no_such_module://cluster/ns", 60, print).reach()


def test_a_log_that_cannot_be_read_is_asked_for_once() -> None:
    client = Client(http(500))
    with pytest.raises(NotReadyError, match="the log of maze-1 cannot be read"):
        server(client).log("maze-1")
    assert len(client.asked) == 1


def test_a_log_is_followed_over_broken_connections() -> None:
    taken: list[tuple[int, str]] = []
    stop = threading.Event()

    async def breaks() -> Any:
        yield "one\n"
        raise RuntimeError("WebSocket connection closed unexpectedly")

    async def ends() -> Any:
        yield "one\n"
        yield "two\n"

    async def goes_on() -> Any:
        yield "one\ntwo\nthree\n"
        stop.set()

    client = Client(breaks, ends, goes_on)
    server(client).follow("maze-1", lambda at, text: taken.append((at, text)), stop)
    assert taken == [(0, "one\n"), (0, "one\n"), (4, "two\n"), (0, "one\ntwo\nthree\n")]
