"""What manifests say of each other: every name leads to something that is given."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifests import OVERLAYS, built

from skyrl_maze.manifest_links import link_problems
from skyrl_maze.manifests import Object, pods_of

APPLIED = ("published", "storage-existing", "access", "serving", "serving-vllm", "shell")


def applied(*overlays: str) -> list[Object]:
    return [thing for overlay in overlays for thing in copy.deepcopy(built(overlay))]


def of_kind(things: list[Object], kind: str) -> Any:
    return next(thing for thing in things if thing["kind"] == kind)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_alone_leads_nowhere_wrong(overlay: str) -> None:
    assert list(link_problems(applied(overlay))) == []


def test_what_is_applied_together_fits() -> None:
    assert list(link_problems(applied(*APPLIED))) == []
    assert list(link_problems(applied("published-job", "storage-new", "access"))) == []


@pytest.mark.parametrize(
    ("kind", "edit", "said"),
    [
        (
            "RayCluster",
            lambda t: t["metadata"].pop("namespace"),
            "several namespaces: None, hyperpod-ns-maze",
        ),
        ("Job", lambda t: t["metadata"].update(namespace="default"), "several namespaces: default, hyperpod"),
        (
            "PersistentVolumeClaim",
            lambda t: t["metadata"].update(name="mine"),
            "mounts the claim fsx, and mine",
        ),
        ("PersistentVolumeClaim", lambda t: t["spec"].update(volumeName="x"), "wants the volume x, and fs-"),
        (
            "PersistentVolumeClaim",
            lambda t: t["spec"]["resources"]["requests"].update(storage="9Ti"),
            "is larger than its volume",
        ),
        ("PersistentVolume", lambda t: t["spec"].update(storageClassName="x"), "of different classes"),
        (
            "PersistentVolume",
            lambda t: t["spec"]["claimRef"].update(namespace="x"),
            "kept for the claim x/fsx",
        ),
        ("ServiceAccount", lambda t: t["metadata"].update(name="x"), "runs as the account skyrl-maze, and"),
        ("Service", lambda t: t["spec"].update(selector={"a": "b"}), "no pod has these labels"),
        (
            "RayCluster",
            lambda t: t.update(kind="Pod", metadata={"name": "skyrl-maze-shell"}),
            "given 2 times",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_found(kind: str, edit: Callable[[Object], Any], said: str) -> None:
    things = applied(*APPLIED)
    edit(of_kind(things, kind))
    assert any(said in problem for problem in link_problems(things)), list(link_problems(things))


def test_a_class_of_another_name_is_found() -> None:
    things = applied("storage-new")
    of_kind(things, "StorageClass")["metadata"]["name"] = "other"
    assert list(link_problems(things)) == [
        "PersistentVolumeClaim fsx is of the class skyrl-maze-lustre, and other is given"
    ]


def test_a_claim_that_is_made_twice_is_found() -> None:
    assert "PersistentVolumeClaim fsx is given 2 times" in link_problems(
        applied("storage-new", "storage-existing")
    )


def test_every_pod_of_a_thing_is_looked_at() -> None:
    things = applied("published", "storage-new")
    for pod in pods_of(things[0])[1:]:
        for volume in pod["spec"]["volumes"]:
            volume.get("persistentVolumeClaim", {}).update(claimName="other")
    assert list(link_problems(things)) == ["RayCluster skyrl-visgym mounts the claim other, and fsx is given"]


@given(st.data())
def test_nothing_in_them_makes_it_stumble(data: st.DataObject) -> None:
    things = applied(*APPLIED)
    place: Any = data.draw(st.sampled_from(things))
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    if key != "kind":  # which `parse` has seen to be a text
        place[key] = data.draw(st.sampled_from([None, 3, "a", [], ["a"], {}, {"a": []}, True]))
    assert all(isinstance(problem, str) for problem in link_problems(things))
