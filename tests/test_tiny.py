"""The tiny model is a real Qwen3-VL: it loads as one, sees one token a cell, and answers in the grammar."""

from pathlib import Path

import pytest
import torch

from skyrl_maze import _compat

_compat.install()

from skyrl_maze import maze_task, tiny  # noqa: E402
from skyrl_maze.actions import ParseFailure, parse_action  # noqa: E402
from skyrl_maze.env import MazeConfig, MazeEnv  # noqa: E402
from skyrl_maze.errors import SetupError  # noqa: E402
from skyrl_maze.maze import generate_maze  # noqa: E402

CONFIG = MazeConfig(theme="tokens", cell_px=16, grammar="keyword", goal_rule="reach")
SHORT = tiny.WarmUp(steps=2, episodes_per_step=2, turns=2)


def _opening(processor: object, size: int = 5) -> dict[str, torch.Tensor]:
    env = MazeEnv(CONFIG, {"maze": generate_maze(size, 0).to_text(), "max_turns": 4})
    chat, _ = env.init([])
    return processor.apply_chat_template(  # type: ignore[attr-defined]
        [chat], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_built_once_and_found_again(cache: Path) -> None:
    steps = []
    first = maze_task.tiny_model(
        CONFIG, [5], 4, SHORT, progress=lambda step, total: steps.append((step, total))
    )
    assert steps == [(1, 2), (2, 2)]
    again = maze_task.tiny_model(CONFIG, [5], 4, SHORT, progress=lambda *_: pytest.fail("built twice"))
    assert again == first
    assert maze_task.tiny_model(CONFIG, [7], 4, SHORT) != first, "other settings, other model"
    assert {path.name for path in (cache / "skyrl_maze").iterdir()} >= {first.name}
    assert not list((cache / "skyrl_maze").glob(".tiny-*")), "no scratch folder is left"


@pytest.mark.slow
def test_a_damaged_model_is_built_anew(cache: Path) -> None:
    folder = maze_task.tiny_model(CONFIG, [5], 4, SHORT)
    (folder / "model.safetensors").unlink()
    assert maze_task.tiny_model(CONFIG, [5], 4, SHORT) == folder
    assert (folder / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_said(cache: Path) -> None:
    (cache / "skyrl_maze").write_text("in the way", encoding="utf-8")
    with pytest.raises(SetupError, match=r"cannot keep the tiny model in .*set XDG_CACHE_HOME"):
        maze_task.tiny_model(CONFIG, [5], 4, SHORT)


@pytest.mark.slow
def test_the_same_settings_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for name in ("a", "b"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        state = torch.random.get_rng_state()
        folder = maze_task.tiny_model(CONFIG, [5], 4, SHORT)
        assert torch.equal(state, torch.random.get_rng_state()), "the global generator is left as it was"
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_failed_build_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("no warm-up today")

    monkeypatch.setattr(tiny, "_teach_format", fail)
    with pytest.raises(RuntimeError, match="no warm-up today"):
        maze_task.tiny_model(CONFIG, [5], 4, SHORT)
    assert not list((cache / "skyrl_maze").iterdir())


@pytest.mark.slow
def test_one_cell_is_one_token_and_the_warmed_up_model_answers(cache: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = maze_task.tiny_model(CONFIG, [5], 12)
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000

    batch = _opening(processor)
    image_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert int((batch["input_ids"] == image_id).sum()) == 5 * 5
    torch.manual_seed(0)
    with torch.no_grad():
        sampled = model.generate(**batch, max_new_tokens=10, do_sample=True, top_k=0, num_return_sequences=32)
    answers = processor.tokenizer.batch_decode(sampled[:, batch["input_ids"].shape[1] :])
    actions = [parse_action(answer, "keyword") for answer in answers]
    understood = [action for action in actions if not isinstance(action, ParseFailure)]
    assert len(understood) >= 28, answers
    assert len(set(understood)) >= 3, "a random walker, not one that always goes the same way"


@pytest.mark.slow
def test_only_the_answers_carry_a_label() -> None:
    episodes = maze_task.random_walks(CONFIG, [5], 4, SHORT)
    chats = [next(episodes) for _ in range(3)]
    processor = tiny.make_processor([tiny.texts_of(chat) for chat in chats])
    batch = tiny._batch(processor, chats)
    for labels, chat in zip(batch["labels"], chats, strict=True):
        text = processor.tokenizer.decode(labels[labels >= 0])
        answers = [message["content"] for message in chat if message["role"] == "assistant"]
        assert text == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_the_model_says_how_its_rotations_interleave(tmp_path: Path) -> None:
    from transformers import AutoConfig

    tiny.save_random_model(tmp_path, ["user up down"])
    # transformers takes it for granted, vLLM reads it, and the two must turn alike.
    assert AutoConfig.from_pretrained(tmp_path).text_config.rope_parameters["mrope_interleaved"] is True


@pytest.mark.slow
def test_without_steps_the_model_is_untrained(cache: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    untrained = tiny.WarmUp(steps=0)
    folder = maze_task.tiny_model(CONFIG, [5], 4, untrained, progress=lambda *_: pytest.fail("trained"))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    torch.manual_seed(untrained.seed)
    fresh = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in fresh.state_dict().items())
    assert maze_task.tiny_model(CONFIG, [5], 4, SHORT) != folder, "the steps are part of its name"


@pytest.mark.parametrize("patch_px", [tiny.PATCH_PX, 16])
def test_a_random_model_has_the_patch_size_that_is_asked_for(tmp_path: Path, patch_px: int) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    state = torch.random.get_rng_state()
    tiny.save_random_model(tmp_path, ["user up down"], patch_px=patch_px)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is left as it was"
    processor = AutoProcessor.from_pretrained(tmp_path)
    assert processor.image_processor.patch_size == processor.video_processor.patch_size == patch_px
    picture = torch.zeros(3, 4 * patch_px, 6 * patch_px, dtype=torch.uint8)
    seen = processor.image_processor(images=[picture], return_tensors="pt")
    assert seen["image_grid_thw"].tolist() == [[1, 4, 6]]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert model.config.vision_config.patch_size == patch_px
    with torch.no_grad():
        model.get_image_features(seen["pixel_values"], seen["image_grid_thw"])
