"""What makes an adapter: names that engines know, matrices that fit, a config that every loader reads."""

import enum
import json
import os
import subprocess
import sys
from dataclasses import asdict

import peft
import pytest
import torch
from adapter_files import name_of, tensors_of
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.adapter import adapter_problems, peft_config, read_config
from skyrl_maze.errors import AdapterError

GOOD = {name: tuple(whole.shape) for name, whole in tensors_of().items()}
BASE = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def lora(**changes):
    return asdict(peft.LoraConfig(**{**BASE, **changes}))


# --- names and shapes


def test_an_adapter_has_no_problems():
    assert adapter_problems(GOOD) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("base_model.model.q.lora_A.default.weight", "holds the adapter's name 'default'"),
        ("base_model.model.q._fsdp_wrapped_module.lora_A.weight", "holds _fsdp_wrapped_module"),
        ("base_model.model._checkpoint_wrapped_module.q.lora_A.weight", "holds _checkpoint_wrapped_module"),
        ("base_model.model._orig_mod.q.lora_B.weight", "holds _orig_mod"),
        ("model.q.lora_A.weight", "must be base_model.model.<module>.lora_A.weight"),
        ("base_model.model.lora_A.weight", "must be base_model.model"),
        ("base_model.model.q.weight", "must be base_model.model"),
        ("base_model.model.q.lora_A.bias", "must be base_model.model"),
        ("base_model.model.q.lora_C.weight", "must be base_model.model"),
        ("base_model.model.model.visual.blocks.0.q.lora_A.weight", "belongs to the picture tower"),
    ],
)
def test_a_name_that_engines_do_not_know_is_refused(name, problem):
    found = adapter_problems({**GOOD, name: (4, 6)})
    assert found[0].startswith(f"{name}: ") or any(line.startswith(f"{name}: ") for line in found)
    assert any(problem in line for line in found)


def test_the_picture_tower_may_be_allowed():
    tower = {name_of("visual.q", "A"): (4, 6), name_of("visual.q", "B"): (9, 4)}
    assert adapter_problems({**GOOD, **tower}, allow_vision=True) == []
    assert len(adapter_problems({**GOOD, **tower})) == 2
    assert adapter_problems({name_of("visual_head", "A"): (4, 6), name_of("visual_head", "B"): (9, 4)}) == []


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({}, "no matrices at all"),
        ({name_of("q", "A"): (4, 6)}, "model.q: has lora_A without lora_B"),
        ({name_of("q", "B"): (6, 4)}, "model.q: has lora_B without lora_A"),
        ({name_of("q", "A"): (4, 6), name_of("q", "B"): (6, 5)}, "are of different ranks"),
        ({name_of("q", "A"): (4, 6, 1), name_of("q", "B"): (6, 4)}, "must be a matrix"),
        ({name_of("q", "A"): (0, 6), name_of("q", "B"): (6, 0)}, "must be a matrix"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(shapes, problem):
    assert any(problem in line for line in adapter_problems(shapes))


@given(st.dictionaries(st.text(), st.lists(st.integers(-1, 3), max_size=3)))
def test_anything_gets_an_answer(shapes):
    assert adapter_problems(shapes)


# --- the config


def test_the_config_is_plain_sorted_and_for_inference():
    config = peft_config(lora(target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM"), "org/model", "abc")
    assert json.loads(json.dumps(config)) == config
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "abc")
    assert config["inference_mode"] is True
    assert "runtime_config" not in config


def test_a_pattern_stays_one_text():
    config = peft_config(lora(target_modules=r".*\.q_proj", exclude_modules=".*visual.*"), "m")
    assert (config["target_modules"], config["exclude_modules"]) == (r".*\.q_proj", ".*visual.*")


def test_excluded_modules_may_be_a_set():
    assert peft_config(lora(exclude_modules=["z", "a"]), "m")["exclude_modules"] == ["a", "z"]


def test_patterns_keep_their_order_which_decides():
    assert list(peft_config(lora(rank_pattern={"z": 2, "a": 8}), "m")["rank_pattern"]) == ["z", "a"]


def test_the_bytes_do_not_depend_on_the_hash_seed():
    code = (
        "import json; from skyrl_maze.adapter import peft_config;"
        "print(json.dumps(peft_config({'r': 1, 'lora_alpha': 1, 'target_modules': set('abcdefg')}, 'm')))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True
        ).stdout
        for seed in "123"
    }
    assert len(outputs) == 1
    assert b'["a", "b", "c", "d", "e", "f", "g"]' in outputs.pop()


def test_peft_reads_back_what_matters(tmp_path):
    given = peft.LoraConfig(**BASE, lora_dropout=0.1, use_rslora=True, alpha_pattern={"q_proj": 3})
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config(asdict(given), "m", "r")))
    read = peft.LoraConfig.from_pretrained(tmp_path)
    for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "alpha_pattern", "bias"):
        assert getattr(read, name) == getattr(given, name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"r": 0}, "missing ['r']"),
        ({"target_modules": None}, "missing ['target_modules']"),
    ],
)
def test_what_engines_would_not_follow_is_refused(changes, named):
    with pytest.raises(AdapterError) as caught:
        peft_config({**BASE, **changes}, "m")
    assert named in str(caught.value)


def test_a_base_model_is_needed():
    with pytest.raises(AdapterError, match="base_model"):
        peft_config(BASE, "")


def test_values_that_are_no_json_are_refused():
    with pytest.raises(AdapterError, match=r"lora_dropout=.* is no JSON"):
        peft_config({**BASE, "lora_dropout": torch.zeros(1)}, "m")


def test_enums_become_their_values():
    kind = enum.Enum("Kind", {"LM": "CAUSAL_LM"})
    assert peft_config({**BASE, "task_type": kind.LM}, "m")["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"peft_type": "IA3", "r": 1}', "\xff"])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    path = tmp_path / "adapter_config.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(AdapterError, match=r"adapter_config.json.*give an adapter_config.json of this run"):
        read_config(path)
