"""A Qwen3-VL of half a million parameters, made on the spot: real tokenizer, processor and architecture.

It needs no hub. Its vision tower takes 8 px patches merged 2x2, so one language token covers 16 px: with
the `tokens` theme at `cell_px=16` one cell of the maze is one token, as it is for the 8B model at 32 px.
A short supervised warm-up on episodes of random answers teaches it to answer in an environment's grammar, and
nothing about its puzzles: it starts as a random walker, which is what a policy gradient can begin with.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_maze import __version__
from skyrl_maze.errors import SetupError

MODEL_ID = "skyrl-maze/tiny-qwen3-vl"
PATCH_PX = 8
MERGE = 2
_VOCABULARY_SIZE = 512
# A cached model that lacks one of them was damaged, and is built anew.
_FILES = (
    "config.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "chat_template.jinja",
)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# 4 language layers of width 64 behind a 3-layer vision tower.
_TEXT_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's CPU attention takes no smaller heads
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,  # transformers takes it for granted, vLLM does not
    },
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
_VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "depth": 3,
    "num_heads": 2,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


@dataclass(frozen=True)
class WarmUp:
    """How the answer format is taught; with no steps the model says anything."""

    steps: int = 200
    episodes_per_step: int = 6
    turns: int = 4
    learning_rate: float = 3e-3
    seed: int = 0


def cache_dir() -> Path:
    """Where built models are kept: `$XDG_CACHE_HOME/skyrl_maze`, by default `~/.cache/skyrl_maze`."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "skyrl_maze"


def build_tiny_model(
    settings: Any,
    episodes: Iterator[list[dict[str, Any]]],
    warm_up: WarmUp,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Build the model once and return its folder; a later call with equal settings finds it there.

    Args:
        settings: all that the episodes follow from, as JSON.
        episodes: what it is taught with, without end; see `random_episodes`.
        warm_up: length and seed of the warm-up.
        progress: called with (steps done, steps in all).

    Raises:
        SetupError: the cache cannot be written.
    """
    identity = [settings, asdict(warm_up)]
    return cached("tiny", identity, lambda folder: _build(folder, episodes, warm_up, progress))


def cached(name: str, settings: Any, build: Callable[[Path], None]) -> Path:
    """The folder of a model that is built once for the same settings, code and shape.

    Args:
        name: for people who look into the cache.
        settings: all that the model follows from, as JSON.
        build: puts the model into the folder that it gets.

    Raises:
        SetupError: the cache cannot be written.
    """
    shape = [CHAT_TEMPLATE, _VOCABULARY_SIZE, _TEXT_CONFIG, _VISION_CONFIG, PATCH_PX]
    identity = json.dumps([__version__, settings, shape], sort_keys=True)
    target = cache_dir() / f"{name}-qwen3-vl-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if _complete(target):
        return target
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
            build(Path(scratch) / "model")
            os.replace(Path(scratch) / "model", target)
    except OSError as error:
        # Another process may have put the same model there first; its copy is as good.
        if not _complete(target):
            raise SetupError(
                f"cannot keep the {name} model in {target.parent}: {error.strerror or error}; "
                "set XDG_CACHE_HOME to a folder that can be written and has 10 MB"
            ) from error
    return target


def save_random_model(folder: Path, corpus: Sequence[str], patch_px: int = PATCH_PX) -> None:
    """Save an untrained model of the same shape, whose tokenizer is trained on `corpus`.

    Args:
        folder: where to; made if it is not there.
        corpus: texts that the tokenizer shall know the words of.
        patch_px: side of a vision patch; 16 gives the picture geometry of the published Qwen3-VL.
    """
    import torch

    processor = make_processor(list(corpus), patch_px)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make_model(processor.tokenizer, patch_px).save_pretrained(folder)
    processor.save_pretrained(folder)


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _build(
    folder: Path,
    episodes: Iterator[list[dict[str, Any]]],
    warm_up: WarmUp,
    progress: Callable[[int, int], None] | None,
) -> None:
    import torch

    first = [next(episodes) for _ in range(32)]
    processor = make_processor([texts_of(episode) for episode in first])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two builds at once would starve each other, and sums would vary
    try:
        with torch.random.fork_rng():
            torch.manual_seed(warm_up.seed)
            model = make_model(processor.tokenizer)
            _teach_format(model, processor, episodes, warm_up, progress)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def random_episodes(
    make_env: Callable[[random.Random], Any], answer: Callable[[random.Random], str], warm_up: WarmUp
) -> Iterator[list[dict[str, Any]]]:
    """The first `warm_up.turns` turns of random episodes, as chats without end, pictures in them.

    Args:
        make_env: a skyrl_gym environment, drawn from that generator.
        answer: a random one in the environment's grammar.
    """
    rng = random.Random(warm_up.seed)
    while True:
        env = make_env(rng)
        chat, _ = env.init([])
        for _ in range(warm_up.turns):
            said = answer(rng)
            chat = [*chat, {"role": "assistant", "content": said}]
            step = env.step(said)
            if step["done"]:
                break
            chat = [*chat, *step["observations"]]
        yield chat if chat[-1]["role"] == "assistant" else chat[:-1]


def texts_of(chat: list[dict[str, Any]]) -> str:
    """The roles and texts of a chat, for a tokenizer to learn from."""
    parts = []
    for message in chat:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(p.get("text", "") for p in content)
        parts.append(f"{message['role']}\n{text}")
    return "\n".join(parts)


def make_processor(corpus: list[str], patch_px: int = PATCH_PX, words: Sequence[str] = ()) -> Any:
    """A Qwen3-VL processor whose byte-level BPE is trained on `corpus`; each of `words` is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],  # type: ignore[misc]  # pairs, whatever it says
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
    )
    tokenizer.add_tokens(list(words))
    geometry: dict[str, Any] = {
        "patch_size": patch_px,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (patch_px * MERGE) ** 2, "longest_edge": 1024 * 1024},
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**geometry),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**geometry),
        chat_template=CHAT_TEMPLATE,
    )


def make_model(
    tokenizer: Any,
    patch_px: int = PATCH_PX,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> Any:
    """An untrained Qwen3-VL of that shape, drawn from torch's generator.

    Args:
        text: changes of the language layers' config.
        vision: of the vision tower's.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    config = Qwen3VLConfig(
        text_config={
            **_TEXT_CONFIG,
            "vocab_size": len(tokenizer),
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            **(text or {}),
        },
        vision_config={**_VISION_CONFIG, "patch_size": patch_px, **(vision or {})},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def _teach_format(
    model: Any,
    processor: Any,
    episodes: Iterator[list[dict[str, Any]]],
    warm_up: WarmUp,
    progress: Callable[[int, int], None] | None,
) -> None:
    import torch

    if not warm_up.steps:
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, warm_up.learning_rate, total_steps=warm_up.steps
    )
    model.train()
    for step in range(warm_up.steps):
        batch = _batch(processor, [next(episodes) for _ in range(warm_up.episodes_per_step)])
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress:
            progress(step + 1, warm_up.steps)
    model.eval()


def _batch(processor: Any, chats: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Tensors of a batch of chats; only the assistant's answers, end of turn included, carry a label."""
    import torch

    batch = processor.apply_chat_template(
        chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
    )
    start, end, assistant = (
        processor.tokenizer.convert_tokens_to_ids("<|im_start|>"),
        processor.tokenizer.convert_tokens_to_ids("<|im_end|>"),
        processor.tokenizer.encode("assistant\n"),
    )
    labels = torch.full_like(batch["input_ids"], -100)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        for position, token in enumerate(ids):
            opening = position + 1 + len(assistant)
            if token == start and ids[position + 1 : opening] == assistant:
                closing = ids.index(end, opening) + 1
                labels[row, opening:closing] = batch["input_ids"][row, opening:closing]
    return {**batch, "labels": labels}
