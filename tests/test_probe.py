"""The probe of what engines answer: it agrees with what was learned, or names the engine that does not."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from adapter_files import published, tensors_of
from fake_servers import BASE, POLICY, FakeEngine, serving

from skyrl_maze.errors import AdapterError
from skyrl_maze.probe import VISIBLE_B, Probed, Reading, probe_engines, probe_ids, probe_problems

IDS = [5, 6, 7, 8]
BASE_SAYS = [-1.0, -2.0, -3.0]


def probe(engines: list[FakeEngine], folder: Path, learned: bool, limit_s: float = 5.0) -> Probed:
    matrices = tensors_of()
    for name, tensor in matrices.items():
        if ".lora_B." in name:
            tensor.fill_(0.001 if learned else 0.0)
    adapter = published(folder, 4, matrices).adapter

    async def run() -> Probed:
        async with serving(*engines) as urls:
            for engine in engines:
                engine.serves = adapter
            return await probe_engines(urls, BASE, POLICY, IDS, "4.0", 0.001 if learned else 0.0, limit_s)

    return asyncio.run(run())


@pytest.mark.parametrize("learned", [True, False])
def test_engines_that_serve_the_adapter_pass(tmp_path: Path, learned: bool) -> None:
    engines = [FakeEngine(), FakeEngine()]
    probed = probe(engines, tmp_path, learned)
    assert (probed.difference > 0) is learned
    assert [engine.asked for engine in engines] == [[BASE, POLICY, BASE]] * 2


@pytest.mark.parametrize(
    ("fault", "learned", "why"),
    [
        ("answers as the base model", True, r"answers as the base model does, although .* up to 1\.0e-03"),
        ("another model", True, r"differs from the other engines by 0\.2"),
        ("no logprobs", True, "KeyError"),
        ("NaN", True, "are no numbers"),
        ("hangs", True, r"did not answer in 0\.5 s"),
    ],
)
def test_an_engine_that_does_not_is_named(tmp_path: Path, fault: str, learned: bool, why: str) -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine(fault)]
    with pytest.raises(AdapterError, match=why) as caught:
        probe(engines, tmp_path, learned, limit_s=0.5 if fault == "hangs" else 5.0)
    assert "adapter 4.0" in str(caught.value)
    assert [engine.url in str(caught.value) for engine in engines] == [False, False, True]


def test_a_connection_that_breaks_off_once_is_tried_again(tmp_path: Path) -> None:
    assert probe([FakeEngine("breaks off", 1)], tmp_path, learned=True).difference > 0


def reading(shift: float, noise: float = 0.0) -> Reading:
    return Reading(BASE_SAYS, [x - shift for x in BASE_SAYS], [x + noise for x in BASE_SAYS])


@pytest.mark.parametrize(
    ("readings", "largest_b", "problems"),
    [
        ([reading(0.0)], 0.0, 0),
        ([reading(0.01)], 0.0, 0),  # another shape of the same kernels
        ([reading(0.1)], 0.0, 1),
        ([reading(1e-6)], 1e-4, 0),
        ([reading(0.0)], 1e-4, 1),
        ([reading(0.01, noise=0.01)], 1e-4, 1),
        ([reading(0.02, noise=0.01)], 1e-4, 0),
        ([reading(0.0)], VISIBLE_B / 2, 0),  # learned too little to be seen
        ([reading(0.5), reading(0.5), reading(0.2)], 1e-2, 1),
        ([reading(0.5), reading(0.2)], 1e-2, 2),  # nobody knows which
    ],
)
def test_what_readings_contradict(readings: list[Reading], largest_b: float, problems: int) -> None:
    named = {f"http://{i}": found for i, found in enumerate(readings)}
    found = probe_problems(named, largest_b)
    assert len(found) == problems
    assert all(line.startswith("http://") for line in found)


def test_the_prompt_is_short_and_the_same_every_time() -> None:
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(letter) for letter in text])
    ids = probe_ids(tokenizer)
    assert len(ids) == 64
    assert ids == probe_ids(tokenizer)


def test_readings_of_nobody_contradict_nothing() -> None:
    assert probe_problems({}, 1.0) == []
