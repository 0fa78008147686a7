"""A merged model is the trained one: equal logits, a whole folder, or nothing at all."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from skyrl_maze import export
from skyrl_maze.errors import AdapterError
from skyrl_maze.export import export_merged
from skyrl_maze.tiny import save_random_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv", "linear_fc1"]
Q = "model.language_model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied base of random weights, and an adapter of every kind of layer whose B is random too."""
    folder = tmp_path_factory.mktemp("export")
    save_random_model(folder / "base", ["up down left right"])
    make_adapter(folder / "base", folder / "adapter")
    return folder


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "base", tmp_path / "base"))


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "adapter", tmp_path / "adapter"))


def make_adapter(base: Path, folder: Path, **settings: object) -> None:
    model = AutoModelForImageTextToText.from_pretrained(base)
    config = LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": TARGETS, **settings})
    torch.manual_seed(0)
    peft_model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    peft_model.save_pretrained(folder, save_embedding_layers=False)


def logits(model: torch.nn.Module, base: Path) -> torch.Tensor:
    """Those of a picture and a text, in float32."""
    from PIL import Image

    processor = AutoProcessor.from_pretrained(base)
    content = [{"type": "image"}, {"type": "text", "text": "up down left right"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}])
    pixels = torch.arange(64 * 64 * 3, dtype=torch.uint8).reshape(64, 64, 3).numpy()
    batch = processor(text=[text], images=[Image.fromarray(pixels)], return_tensors="pt")
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**batch).logits
    return found


def difference(base: Path, adapter: Path, out: Path) -> tuple[float, float]:
    """Greatest differences of logits: exported against adapted model, and exported against base."""
    load = AutoModelForImageTextToText.from_pretrained
    exported = logits(load(out, dtype=torch.float32), base)
    plain = logits(load(base, dtype=torch.float32), base)
    adapted = logits(PeftModel.from_pretrained(load(base, dtype=torch.float32), adapter), base)
    return float((exported - adapted).abs().max()), float((exported - plain).abs().max())


def edit(path: Path, **settings: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def reshard(base: Path, names: int = 3) -> None:
    tensors = load_file(base / "model.safetensors")
    weight_map = {}
    for number in range(names):
        shard = f"model-{number + 1:05}-of-{names:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::names]}
        save_file(part, base / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    (base / "model.safetensors").unlink()


def cast(base: Path, dtype: torch.dtype) -> None:
    path = base / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def refusal(base: Path, adapter: Path, out: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        export_merged(base, adapter, out)
    assert not list(out.parent.glob(f".{out.name}*")), "no scratch folder is left"
    return str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "lora_alpha": 3},
        {
            "rank_pattern": {"q_proj": 8, r".*visual.*qkv": 2},
            "alpha_pattern": {"v_proj": 1, "layers.1.mlp.up_proj": 64},
        },
    ],
)
def test_logits_are_those_of_the_adapted_model(
    base: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    make_adapter(base, tmp_path / "adapter", **settings)
    steps = []
    report = export_merged(base, tmp_path / "adapter", tmp_path / "out", lambda *step: steps.append(step))
    far, moved = difference(base, tmp_path / "adapter", tmp_path / "out")
    assert far < 1e-5
    assert moved > 1e-2, "else the adapter says nothing, and the comparison neither"
    count = 4 * 7 + 3 * 2 + 2  # language layers, vision blocks, mergers
    assert (report.merged_tensors, report.shards, report.rounding_share) == (count, 1, 0)
    assert report.update_norm > 0
    assert steps == [(done, count + 1) for done in range(1, count + 2)]


def test_the_folder_is_whole(base: Path, adapter: Path, tmp_path: Path) -> None:
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    for unwanted in (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "other.safetensors",
        "x.pth",
        ".hidden",
    ):
        (base / unwanted).write_text("no")
    (base / ".cache").mkdir()
    (base / ".cache" / "note").touch()
    out = tmp_path / "new" / "out"
    export_merged(base, adapter, out)
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("processor_config.json", "chat_template.jinja", "model.safetensors"),
        "additional_chat_templates/tools.jinja",
    }
    for name in found - {"model.safetensors"}:
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert out.stat().st_mode & 0o777 == base.stat().st_mode & 0o777, "readable as any new folder is"
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_untouched_tensors_keep_their_bits_and_the_rest_its_dtype(base: Path, tmp_path: Path) -> None:
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    cast(base, torch.bfloat16)
    report = export_merged(base, tmp_path / "adapter", tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("q_proj.weight")}
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert 0 < report.rounding_share < 0.1


def test_sums_into_bfloat16_are_rounded_once(base: Path, adapter: Path, tmp_path: Path) -> None:
    cast(base, torch.bfloat16)
    export_merged(base, adapter, tmp_path / "out")
    weight = load_file(base / "model.safetensors")[f"{Q}.weight"].double()
    parts = load_file(adapter / "adapter_model.safetensors")
    a, b = (parts[f"base_model.model.{Q}.lora_{part}.weight"].double() for part in "AB")
    merged = load_file(tmp_path / "out" / "model.safetensors")[f"{Q}.weight"]
    same = merged == (weight + 4 * b @ a).to(torch.bfloat16)
    assert same.float().mean() > 0.999, "equal, but for sums in float32 that fall on the other side of a tie"
    far, moved = difference(base, adapter, tmp_path / "out")
    assert far < 0.1 * moved


def test_what_rounding_takes_is_told(base: Path, tmp_path: Path) -> None:
    make_adapter(base, tmp_path / "adapter", lora_alpha=1e-3)
    cast(base, torch.bfloat16)
    assert export_merged(base, tmp_path / "adapter", tmp_path / "out").rounding_share > 0.5


def test_shards_stay_as_they_are(base: Path, adapter: Path, tmp_path: Path) -> None:
    reshard(base)
    assert export_merged(base, adapter, tmp_path / "out").shards == 3
    assert difference(base, adapter, tmp_path / "out")[0] < 1e-5
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (base / index).read_bytes()
    for shard in base.glob("*.safetensors"):
        with safe_open(shard, "pt") as old, safe_open(tmp_path / "out" / shard.name, "pt") as new:
            assert set(old.keys()) == set(new.keys())


def test_a_base_in_the_other_layout_is_merged_into(base: Path, adapter: Path, tmp_path: Path) -> None:
    export_merged(base, adapter, tmp_path / "out")
    wanted = load_file(tmp_path / "out" / "model.safetensors")

    def renamed(name: str) -> str:
        name = name.replace("model.language_model.", "language_model.model.")
        return name.replace("model.visual.", "visual.")

    tensors = load_file(base / "model.safetensors")
    path = base / "model.safetensors"
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    export_merged(base, adapter, tmp_path / "other")
    found = load_file(tmp_path / "other" / "model.safetensors")
    assert found.keys() == {renamed(name) for name in wanted}
    assert all(torch.equal(found[renamed(name)], tensor) for name, tensor in wanted.items())


def test_an_untied_head_is_merged(base: Path, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(base)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    model.save_pretrained(base)
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    export_merged(base, tmp_path / "adapter", tmp_path / "out")
    assert difference(base, tmp_path / "adapter", tmp_path / "out")[0] < 1e-4


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_tied_head_or_embedding_is_refused(base: Path, tmp_path: Path, module: str) -> None:
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", module])
    message = refusal(base, tmp_path / "adapter", tmp_path / "out")
    assert f"export of {tmp_path / 'adapter'} with base {base}: cannot merge the adapter" in message
    assert f"{module}: the base ties lm_head to the embedding" in message


def test_an_adapter_of_another_base_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    (one,) = [name for name in tensors if name.endswith(f"{Q}.lora_A.weight")]
    tensors[one] = tensors[one][:, :-1].contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert f"{Q}: A 4x63 and B 64x4 do not make 64x64; is it another base?" in refusal(
        base, adapter, tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b, a: edit(a / "adapter_config.json", use_dora=True), "use_dora=True"),
        (lambda b, a: (a / "adapter_config.json").unlink(), "adapter_config.json: there is no such file"),
        (lambda b, a: (a / "adapter_config.json").write_text("{"), "adapter_config.json: not JSON"),
        (lambda b, a: (a / "adapter_config.json").write_text("[]"), "a JSON object is needed"),
        (
            lambda b, a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"),
            "adapter_model.safetensors is missing, and nothing else is read, pickles (.bin) neither",
        ),
        (
            lambda b, a: (a / "adapter_model.safetensors").write_bytes(b"x" * 99),
            "it is damaged, copy the folder",
        ),
        (
            lambda b, a: shutil.rmtree(b),
            "it is not a folder; a model of the hub is put into one with `hf download",
        ),
        (lambda b, a: (b / "config.json").unlink(), "config.json: there is no such file"),
        (lambda b, a: (b / "model.safetensors").rename(b / "pytorch_model.bin"), "pickles (.bin) are not"),
        (lambda b, a: (b / "adapter_config.json").touch(), "holds an adapter itself"),
        (lambda b, a: edit(b / "config.json", quantization_config={"bits": 4}), "is quantised"),
        (
            lambda b, a: (b / "model.safetensors.index.json").write_text("{}"),
            "has both model.safetensors and",
        ),
        (lambda b, a: cast(b, torch.float64), f"can merge only F32, BF16, F16; give others:\n  - {Q[:20]}"),
    ],
)
def test_a_folder_that_cannot_be_used(base: Path, adapter: Path, tmp_path: Path, spoil, message: str) -> None:
    spoil(base, adapter)
    assert message in refusal(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "has no weight_map"),
        (
            {"a": "../model.safetensors"},
            "names '../model.safetensors', which is no safetensors file beside it",
        ),
        ({"a": "model.bin"}, "names 'model.bin', which is no safetensors file beside it"),
        ({"a": "gone.safetensors"}, "gone.safetensors is missing"),
        ({"a": "model-00001-of-00003.safetensors"}, "disagrees with its shards on a, model."),
    ],
)
def test_an_index_that_is_wrong(
    base: Path, adapter: Path, tmp_path: Path, weight_map: dict[str, str], message: str
) -> None:
    reshard(base)
    edit(base / "model.safetensors.index.json", weight_map=weight_map)
    assert message in refusal(base, adapter, tmp_path / "out")


def test_links_out_of_the_base_are_not_followed(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (base / "notes.txt").symlink_to(tmp_path / "secret")
    (base / "folder").symlink_to(tmp_path)
    message = refusal(base, adapter, tmp_path / "out")
    assert f"{base} links to files outside of it: folder, notes.txt; put the files" in message


def test_a_snapshot_of_the_hubs_cache_is_a_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    base.rename(tmp_path / "models--a--b" / "blobs")
    for blob in (tmp_path / "models--a--b" / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    export_merged(snapshot, adapter, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_what_exists_is_not_written_over(base: Path, adapter: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "broken link": lambda: out.symlink_to("nowhere")}[kind]()
    assert (
        refusal(base, adapter, out)
        == f"cannot export to {out}: it exists; give a new folder, or remove it first"
    )
    assert os.path.lexists(out)


def test_what_appears_meanwhile_is_not_written_over(base: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(AdapterError, match="it exists"):
        export_merged(base, adapter, out, lambda *_: out.mkdir(exist_ok=True))
    assert not list(out.iterdir())


def test_an_output_in_the_base_is_refused(base: Path, adapter: Path) -> None:
    assert "it lies in the base" in refusal(base, adapter, base / "merged")


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("no more")])
def test_an_interrupted_export_leaves_nothing(
    base: Path, adapter: Path, tmp_path: Path, fault: BaseException
) -> None:
    def interrupt(done: int, _steps: int) -> None:
        if done == 5:
            raise fault

    before = set(tmp_path.iterdir())
    with pytest.raises(type(fault)):
        export_merged(base, adapter, tmp_path / "out", interrupt)
    assert set(tmp_path.iterdir()) == before


def test_a_full_disk_is_said(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr(export, "_flush", full)
    message = refusal(base, adapter, tmp_path / "out")
    assert (
        f"failed at {tmp_path / 'x'}: No space left on device; nothing was left at {tmp_path / 'out'}"
        in message
    )


def test_a_sum_that_is_not_finite_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[f"base_model.model.{Q}.lora_B.weight"][0, 0] = torch.nan
    save_file(tensors, adapter / "adapter_model.safetensors")
    message = refusal(base, adapter, tmp_path / "out")
    assert f"cannot merge into {Q}.weight: the sum is not finite in torch.float32" in message
    assert not (tmp_path / "out").exists()
