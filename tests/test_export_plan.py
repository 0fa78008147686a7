"""Where each tensor of an adapter goes, from names and shapes alone; what has no certain place is refused."""

import pickle
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.errors import AdapterError
from skyrl_maze.export_plan import Merge, plan_export

Q = "model.language_model.layers.0.self_attn.q_proj"
V = "model.language_model.layers.0.self_attn.v_proj"
HEAD = "lm_head"
EMBED = "model.language_model.embed_tokens"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}


def pair(module, out_features=4, in_features=6, rank=2):
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": (rank, in_features),
        f"{prefix}.lora_B.weight": (out_features, rank),
    }


def base(*modules, shape=(4, 6)):
    return {f"{module}.weight": shape for module in modules}


def refusal(base_shapes, adapter_shapes, config=None, **options):
    with pytest.raises(AdapterError) as caught:
        plan_export(base_shapes, adapter_shapes, {**CONFIG, **(config or {})}, **options)
    message = str(caught.value)
    assert message.startswith("cannot merge the adapter; nothing was written. Mend all of these:\n  - ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    return message.split("\n  - ")[1:]


def test_every_pair_gets_its_tensor_and_scale():
    plan = plan_export(base(Q, V, HEAD), {**pair(Q), **pair(V)}, CONFIG)
    prefix = "base_model.model."
    assert plan.merges == (
        Merge(f"{Q}.weight", f"{prefix}{Q}.lora_A.weight", f"{prefix}{Q}.lora_B.weight", 4.0),
        Merge(f"{V}.weight", f"{prefix}{V}.lora_A.weight", f"{prefix}{V}.lora_B.weight", 4.0),
    )


@pytest.mark.parametrize(
    ("trained", "saved"),
    [
        (Q, "language_model.model.layers.0.self_attn.q_proj"),
        ("language_model.model.layers.0.self_attn.q_proj", Q),
        (Q, "model.layers.0.self_attn.q_proj"),
        ("model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"),
        ("visual.merger.linear_fc1", "model.visual.merger.linear_fc1"),
        ("lm_head", "language_model.lm_head"),
        ("transformer.any.name", "transformer.any.name"),
    ],
)
def test_known_spellings_of_a_module_are_the_same(trained, saved):
    head = {} if "lm_head" in saved else base(HEAD)
    plan = plan_export({**base(saved), **head}, pair(trained), CONFIG)
    assert [merge.target for merge in plan.merges] == [f"{saved}.weight"]


@pytest.mark.parametrize("trained", ["language_model.layers.0.self_attn.q_proj", "module." + Q, "layers.0.q"])
def test_an_unknown_spelling_is_not_guessed(trained):
    assert refusal(base(Q, HEAD), pair(trained)) == [
        f"{trained}: the base has no tensor of that name or another spelling of it"
    ]


def test_two_candidates_are_not_chosen_between():
    other = "language_model.model.layers.0.self_attn.q_proj"
    (problem,) = refusal(base(Q, other, HEAD), pair(Q))
    place = "text.layers.0.self_attn.q_proj.weight"
    assert problem == f"{Q}: cannot tell its place, two tensors are spellings of {place}"
    (problem,) = refusal(base(Q, HEAD), {**pair(Q), **pair(other)})
    assert problem.startswith(f"{other}: cannot tell its place")


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"use_rslora": True}, 8 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 3}}, 1.5),
        ({"alpha_pattern": {r"layers\.[1-9].*": 3}}, 4.0),
        ({"alpha_pattern": {r".*\.layers\.0\..*": 6, "q_proj": 3}}, 3.0),
        ({"alpha_pattern": {"proj": 3}}, 4.0),
        ({"rank_pattern": {"self_attn.q_proj": 2}, "r": 16}, 4.0),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {Q: 1}, "r": 16, "use_rslora": True}, 1 / 2**0.5),
    ],
)
def test_scale_follows_the_settings(settings, scale):
    (merge,) = plan_export(base(Q, HEAD), pair(Q), {**CONFIG, **settings}).merges
    assert merge.scale == pytest.approx(scale)


@given(
    patterns=st.dictionaries(
        st.sampled_from(
            ["q_proj", "proj", r".*\.0\..*", "self_attn.q_proj", Q, r"layers\.\d+\.self_attn\.[qk]_proj"]
        ),
        st.integers(1, 64),
    ),
    rslora=st.booleans(),
)
def test_patterns_match_as_in_peft(patterns, rslora):
    from peft.utils.other import get_pattern_key

    settings = {**CONFIG, "alpha_pattern": patterns, "use_rslora": rslora}
    (merge,) = plan_export(base(Q, HEAD), pair(Q), settings).merges
    alpha = patterns.get(get_pattern_key(patterns.keys(), Q), CONFIG["lora_alpha"])
    assert merge.scale == pytest.approx(alpha / (2**0.5 if rslora else 2))


def test_all_leftovers_are_listed():
    adapter = {
        **pair(Q),
        "base_model.model.x.lora_A.weight": (2, 6),
        f"base_model.model.{V}.lora_B.weight": (4, 2),
        "base_model.model.score.weight": (4, 6),
        "something": (1,),
        "base_model.model.wte.lora_embedding_A": (2, 6),
        "base_model.model.wte.lora_embedding_B": (4, 2),
        "base_model.model.y.lora_magnitude_vector.weight": (4,),
    }
    no_part = "no part of a LoRA as PEFT saves it (base_model.model.MODULE.lora_A.weight)"
    assert refusal(base(Q, V, HEAD, "score"), adapter) == [
        f"base_model.model.score.weight: {no_part}",
        f"something: {no_part}",
        "x: holds lora_A.weight; only lora_A.weight with lora_B.weight can be merged",
        f"{V}: holds lora_B.weight; only lora_A.weight with lora_B.weight can be merged",
        "wte: holds lora_embedding_A, lora_embedding_B; only lora_A.weight with lora_B.weight can be merged",
        "y: holds lora_magnitude_vector.weight; only lora_A.weight with lora_B.weight can be merged",
    ]


@pytest.mark.parametrize(
    ("shapes", "target", "message"),
    [
        ({"in_features": 5}, (4, 6), "A 2x5 and B 4x2 do not make 4x6; is it another base?"),
        ({"out_features": 3}, (4, 6), "A 2x6 and B 3x2 do not make 4x6; is it another base?"),
        ({}, (6, 4), "A 2x6 and B 4x2 do not make 6x4; is it another base?"),
        ({"rank": 3}, (4, 6), "A has 3 rows, the adapter's configuration says rank 2"),
        ({}, (4, 6, 1), "the base's tensor is 4x6x1, not a matrix; only linear layers can be merged"),
    ],
)
def test_shapes_must_agree(shapes, target, message):
    assert refusal({**base(Q, shape=target), **base(HEAD)}, pair(Q, **shapes)) == [f"{Q}: {message}"]


def test_a_and_b_must_agree_with_each_other():
    adapter = {**pair(Q), f"base_model.model.{Q}.lora_B.weight": (4, 3)}
    assert refusal(base(Q, HEAD), adapter) == [f"{Q}: A 2x6 and B 4x3 do not make 4x6; is it another base?"]


@pytest.mark.parametrize("module", [HEAD, EMBED])
@pytest.mark.parametrize(
    "situation", [SimpleNamespace(head=False, tied=False), SimpleNamespace(head=True, tied=True)]
)
def test_tied_embeddings_are_refused_with_the_reason(module, situation):
    shapes = base(Q, EMBED, *([HEAD] if situation.head else []))
    adapter = {**pair(Q), **pair(module), f"base_model.model.{module}.base_layer.weight": (4, 6)}
    (problem,) = refusal(shapes, adapter, tied=situation.tied)
    assert problem.startswith(
        f"{module}: the base ties lm_head to the embedding, so that one tensor serves both"
    )


def test_an_untied_head_is_merged_but_not_replaced():
    assert len(plan_export(base(HEAD, EMBED), pair(HEAD), CONFIG).merges) == 1
    (problem,) = refusal(
        base(HEAD, EMBED), {**pair(HEAD), "base_model.model.lm_head.base_layer.weight": (4, 6)}
    )
    assert problem.endswith("cannot be added; save with save_embedding_layers=False")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3': only 'LORA' can be merged"),
        ({"peft_type": None}, "peft_type=None: only 'LORA'"),
        ({"r": 0}, "r=0: must be a number above 0"),
        ({"r": True}, "r=True: must be a number above 0"),
        ({"lora_alpha": 0}, "lora_alpha=0: must be a number above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan: must be a number above 0"),
        ({"alpha_pattern": [1]}, "alpha_pattern=[1]: must be a mapping"),
        ({"alpha_pattern": {"q(": 1}}, "alpha_pattern: 'q(' is no regular expression"),
        ({"rank_pattern": {"q": "8"}}, "rank_pattern: 'q' is '8': must be a number above 0"),
        (
            {"use_dora": True},
            "use_dora=True: DoRA rescales the sum by norms; merge with PEFT's merge_and_unload",
        ),
        ({"bias": "lora_only"}, "bias='lora_only': this export knows no sum for it"),
        ({"lora_bias": True}, "lora_bias=True: "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: it replaces whole modules"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True: it is for transposed weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=[1]: it replaces rows of the embedding"),
        ({"layer_replication": [[0, 4]]}, "layer_replication=[[0, 4]]: "),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow=1: this export knows no sum for it"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights='pissa_niter_4': it changed the base's weights",
        ),
    ],
)
def test_settings_that_cannot_be_merged(settings, message):
    (problem,) = refusal(base(Q, HEAD), pair(Q), settings)
    assert problem.startswith(message)


def test_settings_of_a_plain_peft_adapter_pass():
    from peft import LoraConfig

    settings = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], exclude_modules=["visual"]).to_dict()
    settings["peft_type"] = "LORA"
    assert len(plan_export(base(Q, HEAD), pair(Q), settings).merges) == 1


def test_several_problems_are_told_at_once():
    assert len(refusal(base(Q), pair(Q), {"use_dora": True, "r": -1, "bias": "all"})) == 3


def test_an_empty_adapter_is_refused():
    assert refusal(base(Q, HEAD), {}) == ["it holds no tensor"]


@given(st.permutations(list(pair(Q)) + list(pair(V))))
def test_order_of_the_tensors_does_not_matter(names):
    shapes = {**pair(Q), **pair(V)}
    plan = plan_export(base(Q, V, HEAD), {name: shapes[name] for name in names}, CONFIG)
    assert {merge.target for merge in plan.merges} == {f"{Q}.weight", f"{V}.weight"}
    assert all(re.sub("lora_A", "lora_B", merge.a) == merge.b for merge in plan.merges)
