"""What the package itself finds in manifests, without the schemas of Kubernetes."""

import copy
from typing import Any

import pytest
from manifests import OVERLAYS, built

from skyrl_maze.manifest_check import problems


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_wrong_with_an_overlay(overlay: str) -> None:
    assert problems(built(overlay)) == []


def test_an_unknown_kind_and_an_unknown_key_name_the_closest() -> None:
    account, cluster = copy.deepcopy([built("access")[0], built("published")[0]])
    account["kind"] = "ServicAccount"
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["tolerationz"] = []
    said = problems([account, cluster])
    assert said[0] == (
        "ServicAccount skyrl-maze: kind 'ServicAccount' is not known here; did you mean 'ServiceAccount'?"
    )
    assert said[1].startswith("RayCluster skyrl-visgym: $.spec.headGroupSpec.template.spec: ")
    assert said[1].endswith("did you mean 'tolerations'?")


@pytest.mark.parametrize(
    ("overlay", "path", "value"),
    [
        ("storage-new", ("spec",), []),
        ("storage-new", ("metadata", "name"), "a"),
        ("access", ("spec",), None),
        ("access", ("spec", "ingress"), {"from": 3}),
        ("access", ("spec", "policyTypes"), 3),
    ],
)
def test_a_value_of_a_wrong_type_stops_no_check(overlay: str, path: tuple[str, ...], value: Any) -> None:
    thing = copy.deepcopy(built(overlay)[-1])
    place: Any = thing
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert isinstance(problems([thing]), list)


def test_an_image_that_is_no_text_is_told() -> None:
    job = copy.deepcopy(next(thing for thing in built("access") if thing["kind"] == "Job"))
    job["spec"]["template"]["spec"]["containers"][0]["image"] = ["a"]
    assert any("image problems cannot be looked for" in problem for problem in problems([job]))


def test_all_that_is_wrong_is_told_at_once() -> None:
    cluster = copy.deepcopy(built("published")[0])
    cluster["spec"]["headGroupSpec"]["rayStartParams"].pop("dashboard-host")
    cluster["metadata"]["annotations"].clear()
    head, worker = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"][0]
    for group in (head, worker):
        group["template"]["spec"].update(tolerations=[], restartPolicy="Always")
    said = problems([cluster])
    for part in ("dashboard-host", "enabled: must be", "no toleration", "must be Never", "access-strategy"):
        assert any(part in problem for problem in said), part
    assert len(said) == 7  # two of them in both groups
