"""A run's folder with an adapter that is really trained, in seconds: it learns to go one way, always."""

import json
from pathlib import Path
from typing import Any

from skyrl_maze import recipes, tiny, versions
from skyrl_maze.actions import format_action
from skyrl_maze.adapter import CONFIG_FILE, WEIGHTS_FILE, peft_config
from skyrl_maze.env import MazeConfig, MazeEnv
from skyrl_maze.maze import Maze, Move

MAX_TURNS, ANSWER_TOKENS, RANK, STEP, RUN = 5, 10, 4, 3, "one-way"
CONFIG = MazeConfig(theme="tokens", cell_px=16, grammar="keyword", goal_rule="reach")
WARM_UP = tiny.WarmUp(steps=100, turns=MAX_TURNS)
ROOM = ["#####", "#...#", "#...#", "#...#", "#####"]
SIDES = {Move.RIGHT: (2, 3), Move.UP: (1, 2), Move.LEFT: (2, 1), Move.DOWN: (3, 2)}


def mazes() -> list[Maze]:
    """The goal lies to each side of the start, so a model that always goes one way solves some of them."""
    corners = [Maze.from_rows(ROOM, (1, 1), (3, 3)), Maze.from_rows(ROOM, (3, 3), (1, 1))]
    return [*(Maze.from_rows(ROOM, (2, 2), goal) for goal in SIDES.values()), *corners]


def walk(maze: Maze, move: Move) -> list[dict[str, Any]]:
    """The conversation of an episode in which every answer is the same."""
    env = MazeEnv(CONFIG, {"maze": maze.to_text(), "max_turns": MAX_TURNS})
    chat, _ = env.init([])
    answer = format_action(move, CONFIG.grammar)
    while True:
        chat = [*chat, {"role": "assistant", "content": answer}]
        step = env.step(answer)
        if step["done"]:
            return chat
        chat = [*chat, *step["observations"]]


def make_run(root: Path, model: Path) -> Move:
    """Train an adapter, export it as a run does, and record the recipe; gives the move that it was taught."""
    taught: list[Move] = []
    policy = root / f"exports/global_step_{STEP}/policy"
    versions.publish_folder(policy, lambda out: taught.append(train_adapter(model, out)), RUN, STEP, 0)
    settings = {
        "run.id": RUN,
        "run.root": root,
        "trainer.policy.model.path": model,
        "trainer.policy.model.lora.rank": RANK,
        "generator.max_turns": MAX_TURNS,
        "generator.eval_sampling_params.temperature": 0.0,
        "generator.eval_n_samples_per_prompt": 1,
    }
    recipes.record(["+recipe=maze_cpu", *(f"{name}={value}" for name, value in settings.items())], root)
    return taught[0]


def train_adapter(model: Path, out: Path, steps: int = 30) -> Move:
    """Fit LoRA matrices of the language layers to the move that the base takes least, and save them."""
    import peft
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    lora = {
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": "all-linear",
        "exclude_modules": ".*visual.*",
    }
    processor = AutoProcessor.from_pretrained(model)
    batches = {move: tiny._batch(processor, [walk(maze, move) for maze in mazes()]) for move in Move}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            rarest = max(Move, key=lambda move: float(base(**batches[move]).loss))
        tuned = peft.get_peft_model(base, peft.LoraConfig(**lora))
        optimizer = torch.optim.AdamW((p for p in tuned.parameters() if p.requires_grad), lr=1e-2)
        for _ in range(steps):
            loss = tuned(**batches[rarest]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        said = tuned(**batches[rarest]).logits[:, :-1].argmax(-1)
    asked = batches[rarest]["labels"][:, 1:]
    assert (said == asked)[asked != -100].all(), "it has learnt its one word"
    matrices = {name: matrix.contiguous() for name, matrix in peft.get_peft_model_state_dict(tuned).items()}
    save_file(matrices, out / WEIGHTS_FILE)
    lora["target_modules"] = tuned.peft_config["default"].target_modules
    (out / CONFIG_FILE).write_text(json.dumps(peft_config(lora, str(model))), encoding="utf-8")
    return rarest
