"""Merging: any split gives back the very same adapter, and nothing less than all of it is merged."""

import json
import subprocess
import sys
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from adapter_files import RANK, config_of, merged, name_of, tensors_of, write_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from skyrl_maze import adapter, durable, merge, shards
from skyrl_maze.adapter import CONFIG_FILE, WEIGHTS_FILE
from skyrl_maze.errors import AdapterError, SetupError
from skyrl_maze.merge import apply_merge, plan_merge

WHO = {"run_id": "run-1", "step": 1, "attempt": 0}


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "shards"
    write_all(folder, tensors_of(), world_size=3)
    return folder


def problems_of(manifests):
    with pytest.raises(AdapterError) as caught:
        plan_merge(manifests)
    return str(caught.value)


def with_tensor(manifest, at=0, **changes):
    tensors = list(manifest.tensors)
    tensors[at] = replace(tensors[at], **changes)
    return replace(manifest, tensors=tuple(tensors))


# --- what comes out


@st.composite
def splits(draw):
    """Matrices of any shape, and for each any cuts into 1 to 6 shards, of any ranks' order."""
    world_size = draw(st.integers(1, 6))
    sizes = st.integers(1, 9)
    tensors, cuts = {}, {}
    for number in range(draw(st.integers(1, 4))):
        for side, shape in (("A", (RANK, draw(sizes))), ("B", (draw(sizes), RANK))):
            name = name_of(f"layers.{number}.proj", side)
            tensors[name] = torch.randn(shape)
            inner = st.lists(st.integers(0, shape[0]), min_size=world_size - 1, max_size=world_size - 1)
            cuts[name] = [0, *sorted(draw(inner)), shape[0]]
    return tensors, world_size, cuts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(split=splits(), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_any_split_merges_to_exactly_the_original(tmp_path_factory, split, dtype):
    tensors, world_size, cuts = split
    folder = tmp_path_factory.mktemp("split")
    write_all(folder / "shards", tensors, world_size, dtype, cuts)
    merged(folder / "shards", folder / "out")
    held = load_file(folder / "out" / WEIGHTS_FILE)
    assert held.keys() == tensors.keys()
    assert all(
        held[name].dtype == dtype and torch.equal(held[name], whole.to(dtype))
        for name, whole in tensors.items()
    )


def test_the_records_are_those_of_the_files(written, tmp_path):
    records = merged(written, tmp_path / "out")
    assert records == [durable.record_of(tmp_path / "out", name) for name in (WEIGHTS_FILE, CONFIG_FILE)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([WEIGHTS_FILE, CONFIG_FILE])


def test_the_bytes_do_not_depend_on_the_split(tmp_path):
    digests = set()
    for world_size in (1, 2, 5):
        write_all(tmp_path / f"{world_size}", tensors_of(), world_size)
        digests.add(merged(tmp_path / f"{world_size}", tmp_path / f"out{world_size}")[0].blake3)
    assert len(digests) == 1


def test_chunks_smaller_than_a_piece_make_no_difference(written, tmp_path, monkeypatch):
    whole = merged(written, tmp_path / "a")
    monkeypatch.setattr(merge, "CHUNK_BYTES", 13)
    monkeypatch.setattr(durable, "CHUNK_BYTES", 7)
    assert merged(written, tmp_path / "b") == whole


def test_progress_adds_up_to_the_file(written, tmp_path):
    plan = plan_merge(shards.read_manifests(written))
    steps = []
    (tmp_path / "out").mkdir()
    apply_merge(plan, written, tmp_path / "out", config_of(), steps.append)
    assert sum(steps) == plan.bytes == (tmp_path / "out" / WEIGHTS_FILE).stat().st_size


def test_the_file_says_that_it_is_for_pytorch(written, tmp_path):
    merged(written, tmp_path / "out")
    with safe_open(tmp_path / "out" / WEIGHTS_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], r".*\.(q|down)_proj"])
def test_peft_loads_the_adapter_and_computes_the_same(tmp_path, targets):
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    base = transformers.Qwen3ForCausalLM(config).eval()
    base.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "lora_" in name:
                weights.normal_()
    ids = torch.arange(12).reshape(1, 12)
    expected = model(ids).logits
    write_all(
        tmp_path / "shards", peft.get_peft_model_state_dict(model, save_embedding_layers=False), world_size=3
    )
    plan = plan_merge(shards.read_manifests(tmp_path / "shards"))
    settings = adapter.peft_config(vars(model.peft_config["default"]), str(tmp_path / "base"))
    (tmp_path / "out").mkdir()
    apply_merge(plan, tmp_path / "shards", tmp_path / "out", settings)
    fresh = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert not torch.equal(fresh(ids).logits, expected)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "out").eval()
    assert torch.equal(loaded(ids).logits, expected)


def test_memory_stays_far_below_one_copy(tmp_path):
    """A child merges 100 MB; what its memory grows by is compared with that."""
    big = {name_of("layers.0.proj", side): torch.randn(shape)
           for side, shape in (("A", (RANK, 3_125_000)), ("B", (3_125_000, RANK)))}  # fmt: skip
    write_all(tmp_path / "shards", big, world_size=6)
    code = """
import json, resource, sys
from pathlib import Path
from skyrl_maze import merge, shards
folder, out, config = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
plan, before = merge.plan_merge(shards.read_manifests(folder)), peak()
merge.apply_merge(plan, folder, out, config)
print(plan.bytes, peak() - before)
"""
    (tmp_path / "out").mkdir()
    argv = [tmp_path / "shards", tmp_path / "out", json.dumps(config_of())]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    size, grown = map(int, done.stdout.split())
    assert size > 100e6
    assert grown < 0.5 * size


# --- what is refused, from the manifests alone


def test_a_missing_rank_is_named(written):
    assert "no shard of ranks 1 of 3" in problems_of(shards.read_manifests(written)[::2])


def test_no_shards_are_refused():
    assert "there are none" in problems_of([])


def test_an_extra_rank_is_named(written):
    held = shards.read_manifests(written)
    text = problems_of([*held, replace(held[2], rank=3, world_size=4)])
    assert "ranks disagree on world_size: 3 on ranks 0, 1, 2; 4 on ranks 3" in text
    assert "ranks 3 are beyond the world size 3" in text


def test_a_rank_that_comes_twice_is_named(written):
    held = shards.read_manifests(written)
    assert "several shards of ranks 1" in problems_of([*held, held[1]])


@pytest.mark.parametrize(("field", "value"), [("run_id", "other"), ("step", 2), ("attempt", 7)])
def test_a_shard_of_elsewhere_is_named(written, field, value):
    held = shards.read_manifests(written)
    held[1] = replace(held[1], **{field: value})
    assert f"the ranks disagree on {field}: " in problems_of(held)
    assert f"{value!r} on ranks 1" in problems_of(held)


def test_overlapping_and_missing_rows_are_named(written):
    held = shards.read_manifests(written)
    first = held[1].tensors[0]
    assert first.rows == 2
    overlap = [held[0], with_tensor(held[1], row_offset=first.row_offset - 1), held[2]]
    text = problems_of(overlap)
    assert f"{first.name}: ranks 0 and 1 both hold row 1; a replica gives none" in text
    gap = [held[0], with_tensor(held[1], rows=1), held[2]]
    assert f"{first.name}: no rank holds rows 3 to 3" in problems_of(gap)
    lost = [with_tensor(held[0], rows=0), *held[1:]]
    assert f"{first.name}: no rank holds rows 0 to 1" in problems_of(lost)


def test_a_rank_that_leaves_out_a_matrix_is_named(written):
    held = shards.read_manifests(written)
    held[2] = replace(held[2], tensors=held[2].tensors[1:])
    assert f"{held[0].tensors[0].name}: ranks 2 do not name it" in problems_of(held)


@pytest.mark.parametrize(("field", "value"), [("dtype", "BF16"), ("shape", (4, 7))])
def test_ranks_that_disagree_on_a_matrix_are_named(written, field, value):
    held = shards.read_manifests(written)
    held[2] = with_tensor(held[2], **{field: value})
    assert f"{held[0].tensors[0].name}: the ranks disagree on its {field}: " in problems_of(held)


def test_every_problem_is_listed_up_to_a_limit(tmp_path):
    held = write_all(tmp_path, {f"q{n}": torch.ones(2, 2) for n in range(40)}, world_size=2)
    text = problems_of([replace(held[0], step=5), held[1]])
    assert "disagree on step" in text
    assert text.splitlines()[-1] == "  - and 11 more"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_moved_border_is_refused(tmp_path_factory, data):
    held = write_all(tmp_path_factory.mktemp("border"), tensors_of(1), world_size=3)
    rank, at = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
    tensor = held[rank].tensors[at]
    offset = data.draw(st.integers(0, tensor.shape[0]))
    rows = data.draw(st.integers(0, tensor.shape[0] - offset))
    held[rank] = with_tensor(held[rank], at, row_offset=offset, rows=rows)
    if rows == tensor.rows and (offset == tensor.row_offset or not rows):
        plan_merge(held)
    else:
        assert tensor.name in problems_of(held)


# --- what is refused, from the bytes


def damaged(written, tmp_path, match):
    with pytest.raises(AdapterError, match=match) as caught:
        merged(written, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    return str(caught.value)


@pytest.mark.parametrize("at", [0, 12, 300, -1])
def test_a_flipped_bit_is_seen(written, tmp_path, at):
    path = written / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    text = damaged(written, tmp_path, r"rank-00001.safetensors is damaged: its (header|checksum)")
    assert "let rank 1 write it anew" in text


@pytest.mark.parametrize("size", [0, 7, 500])
def test_a_truncated_shard_is_seen(written, tmp_path, size):
    path = written / "rank-00002.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    damaged(written, tmp_path, f"rank-00002.safetensors is damaged: it has {size} bytes, its manifest says")


def test_a_shard_that_grew_is_seen(written, tmp_path):
    path = written / "rank-00002.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    damaged(written, tmp_path, "rank-00002.safetensors is damaged: it has")


def test_a_shard_that_shrinks_while_it_is_read_is_seen(written, tmp_path, monkeypatch):
    monkeypatch.setattr(merge.os, "fstat", lambda _handle: shards_size)
    path = written / "rank-00002.safetensors"
    shards_size = path.stat()
    path.write_bytes(path.read_bytes()[:-8])
    held = shards.read_manifests(written)
    with merge._ShardReader(written, held[2]) as reader:
        reader.check_start()
        with pytest.raises(AdapterError, match="it ends too early"):
            list(reader.chunks(held[2].bytes))


def test_links_and_missing_shards_are_refused(written, tmp_path):
    path = written / "rank-00000.safetensors"
    path.rename(tmp_path / "elsewhere")
    damaged(written, tmp_path, "cannot read .*rank-00000.safetensors: No such file")
    (tmp_path / "out").rmdir()
    path.symlink_to(tmp_path / "elsewhere")
    damaged(written, tmp_path, "it is a symbolic link")


def test_a_config_of_another_rank_is_refused(written, tmp_path):
    plan = plan_merge(shards.read_manifests(written))
    with pytest.raises(AdapterError, match="is of rank 4, the adapter config says r=8"):
        apply_merge(plan, written, tmp_path, config_of(r=8))
    with pytest.raises(AdapterError, match=r"cannot write the adapter config: .*set is not JSON"):
        apply_merge(plan, written, tmp_path, {**config_of(), "exclude_modules": {"a"}})


def test_a_full_disk_is_one_line(written, tmp_path, monkeypatch):
    plan = plan_merge(shards.read_manifests(written))
    monkeypatch.setattr(durable.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    (tmp_path / "out").mkdir()
    with pytest.raises(SetupError, match=r"cannot merge shards: .*/out has [\d,]+ bytes free and") as caught:
        apply_merge(plan, written, tmp_path / "out", config_of())
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []
