"""Manifests from users are data: whatever is in them, they are read, or refused in clear lines."""

import math
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from manifests import HYPERPOD

from skyrl_maze import manifests
from skyrl_maze.errors import ManifestError
from skyrl_maze.manifests import at, entries, mapping, parse, quantity, read_manifests

CLAIM = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: fsx}\n"


def test_a_folder_a_file_and_a_list_give_the_same_objects(tmp_path: Path) -> None:
    overlay = HYPERPOD / "overlays/storage-new"
    built = read_manifests([str(overlay)])
    (tmp_path / "all.yaml").write_text(manifests.build(overlay))
    assert read_manifests([str(tmp_path / "all.yaml")]) == built
    listed = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": built})
    assert parse(listed) == built
    assert [thing["kind"] for thing in built] == ["StorageClass", "PersistentVolumeClaim"]


def test_everything_that_cannot_be_read_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "empty.yaml").write_text("---\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    names = ["bad.yaml", "empty.yaml", "binary.yaml", "folder", "absent.yaml"]
    with pytest.raises(ManifestError, match=r"^5 problem\(s\) in what was given:\n") as caught:
        read_manifests([str(tmp_path / name) for name in names])
    said = str(caught.value)
    for name, why in zip(
        names,
        ["is not YAML", "holds no object", "not UTF-8 text", "kubectl kustomize: ", "No such file"],
        strict=True,
    ):
        assert f"\n  - {tmp_path}/{name}: {why}" in said or f"{name}: cannot be read ({why}" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "document 1: lacks apiVersion, a text"),
        ("- 1", "document 1: lacks kind, a text"),
        (CLAIM + "---\napiVersion: v1\nkind: 3\nmetadata: {}\n", "document 2: lacks kind, a text\n"),
        ("kind: List\nitems: [1, {}]", "document 2: lacks metadata.name, a text"),
        (CLAIM + "spec: {1: a}", "the key 1 must be text; quote it"),
        (CLAIM + "spec: {on: a}", "the key True must be text; quote it"),
        (CLAIM + "spec: {day: 2026-01-01}", "is read as a date; quote it"),
        (CLAIM + "spec: {a: .nan}", "nan is no number"),
        ("a: &a [*a]", "holds more than 100000 values"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML: could not determine a constructor"),
        ("[" * 5000, "is not YAML"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}\n", "the key c is there twice"),
        ("x" * 4_000_001, "is longer than"),
    ],
)
def test_what_is_no_manifest_is_said(text: str, why: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    assert why in f"{caught.value}\n"


def test_a_text_that_aliases_make_endless_is_refused() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    with pytest.raises(ManifestError, match="holds more than 100000 values"):
        parse(bomb)


def test_a_machine_without_kubectl_is_told_what_to_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ManifestError, match="kubectl, which is not on PATH"):
        manifests.build(HYPERPOD / "overlays/published")


def test_a_kubectl_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "kubectl"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(manifests, "_BUILD_LIMIT_S", 0.2)
    with pytest.raises(ManifestError, match=r"took longer than 0\.2 s"):
        manifests.build(tmp_path)


def test_the_output_of_kubectl_is_taken_from_stdin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["kubectl", "kustomize", str(HYPERPOD / "overlays/storage-new")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as printed:
        monkeypatch.setattr("sys.stdin", printed.stdout)
        assert [t["kind"] for t in read_manifests(["-"])] == ["StorageClass", "PersistentVolumeClaim"]


@pytest.mark.parametrize(
    ("value", "number"),
    [("500m", 0.5), ("2", 2), (2, 2), ("1.5Gi", 1.5 * 2**30), ("2k", 2000), ("1e3", 1000), (0.5, 0.5)],
)
def test_quantities_are_read_as_kubernetes_does(value: object, number: float) -> None:
    assert quantity(value) == number


@pytest.mark.parametrize("value", ["", "Gi", "1GiB", "-1", "1 Gi", None, [], {}, "½", True])
def test_what_is_no_quantity_is_nan(value: object) -> None:
    assert math.isnan(quantity(value))


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["spec", "template", "a"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(TREES)
def test_paths_into_anything_lead_somewhere_or_nowhere(tree: object) -> None:
    assert isinstance(mapping(tree, "spec", "template"), dict)
    assert all(isinstance(entry, dict) for entry in entries(tree, "spec"))
    assert at(tree, "no", "such") is None
