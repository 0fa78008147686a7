"""The dashboard and the alert rules: their form, the metrics they name, and what the rules say of a run."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import HYPERPOD, ROOT

from skyrl_maze.gauges import CAUSE_LABEL, RUN_LABEL, TABLE

DASHBOARD = json.loads((HYPERPOD / "dashboard.json").read_text(encoding="utf-8"))
RULES_FILE = HYPERPOD / "alerts.yaml"
RULES = [
    rule
    for group in yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
UNITS = {"ratio": "percentunit", "seconds": "s", "timestamp seconds": "s", "bytes": "bytes"}
OUR = {exported.series: exported for exported in TABLE}
# Set by the observability add-on on everything that it scrapes from a Ray cluster.
ADDED_LABELS = {"cluster_name", "namespace", "ray_io_cluster"}


def panels() -> Iterator[dict[str, Any]]:
    """Panels that draw, without the headings between them."""
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def named(expression: str) -> set[str]:
    """The metrics of an expression."""
    return set(re.findall(r"\bray_\w+", expression)) - ADDED_LABELS


def panel_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


ASKED = set().union(*map(named, [*panel_expressions(), *(rule["expr"] for rule in RULES)]))


def rays_and_the_engines() -> set[str]:
    """Metrics that Ray's own panels and SkyRL's reader of the engines' metrics name."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    ray = Path(spec.origin).parent / "dashboard/modules/metrics/dashboards/default_dashboard_panels.py"
    scraper = importlib.metadata.distribution("skyrl").locate_file(
        "skyrl/train/utils/vllm_metrics_scraper.py"
    )
    return set(re.findall(r"\bray_[a-z_]+", ray.read_text() + Path(str(scraper)).read_text()))


def test_only_metrics_that_there_are_are_asked_for() -> None:
    """By name; that a run really exports them is seen in the rehearsal."""
    assert len(ASKED) > 30
    assert set(OUR) >= {name for name in ASKED if name.startswith("ray_skyrl_maze_")}
    assert rays_and_the_engines() | set(OUR) >= ASKED


def test_every_metric_of_the_table_is_on_the_dashboard_or_watched() -> None:
    assert set(OUR) - ASKED == {"ray_skyrl_maze_adapter_bytes"}


def test_the_variables_choose_source_cluster_and_run() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "cluster", "run"]
    for name in ("cluster", "run"):
        assert named(variables[name]["query"]["query"]) <= rays_and_the_engines() | set(OUR)
    assert f", {RUN_LABEL})" in variables["run"]["query"]["query"]


def test_no_data_source_of_someones_own_is_named() -> None:
    sources = re.findall(r'"datasource": \{"type": "prometheus", "uid": "([^"]*)"\}', json.dumps(DASHBOARD))
    assert len(sources) == json.dumps(DASHBOARD).count('"datasource": ')
    assert set(sources) == {"${datasource}"}
    for panel in panels():
        assert {panel["datasource"]["uid"], *(t["datasource"]["uid"] for t in panel["targets"])} == {
            "${datasource}"
        }


def test_panels_have_names_of_their_own_and_a_place_for_each() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in everything}) == len(everything)
    for panel in panels():
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["legendFormat"] for target in panel["targets"])
    for one, other in combinations([panel["gridPos"] for panel in everything], 2):
        apart = (
            *(one["x"] + one["w"] <= other["x"], other["x"] + other["w"] <= one["x"]),
            *(one["y"] + one["h"] <= other["y"], other["y"] + other["h"] <= one["y"]),
        )
        assert any(apart), (one, other)
    assert all(0 <= panel["gridPos"]["x"] <= 24 - panel["gridPos"]["w"] for panel in everything)


def test_what_is_learnt_comes_first_and_the_machines_below() -> None:
    headings = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert headings == ["Training", "Engines", "GPUs and nodes"]
    rows = sorted(DASHBOARD["panels"], key=lambda panel: panel["gridPos"]["y"])
    last = max(i for i, panel in enumerate(rows) if "ray_skyrl_maze_" in json.dumps(panel))
    assert rows[last + 1]["title"] == "Engines"


def test_panels_are_of_the_chosen_runs_and_in_the_unit_of_their_metrics() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for name in named(target["expr"]):
                assert f'{name}{{ray_io_cluster=~"$cluster"' in target["expr"]
                if name not in OUR:
                    continue
                assert f'{RUN_LABEL}=~"$run"' in target["expr"]
                assert f"{{{{{RUN_LABEL}}}}}" in target["legendFormat"]
                assert (OUR[name].cause is None) == (CAUSE_LABEL not in target["expr"])
                if " / " not in target["expr"]:
                    shown = panel["fieldConfig"]["defaults"]["unit"]
                    assert shown == UNITS.get(OUR[name].unit, shown)
                    assert (shown in UNITS.values()) == (OUR[name].unit in UNITS)


# --- The rules ---


@pytest.fixture(scope="module")
def promtool() -> str:
    path = shutil.which("promtool", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if path is None:
        pytest.fail("no promtool: `make promtool` fetches Debian's, or see that of your system")
    return path


def checked(*command: str) -> str:
    """What a command that shall succeed prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_rule_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) == 6
    for rule in RULES:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert re.fullmatch(r"\d+m", rule["for"])
        assert "{{ $labels.run_id }}" in rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 100
        assert set(re.findall(r"by \(([^)]*)\)", rule["expr"])) == {f"cluster_name, namespace, {RUN_LABEL}"}


def test_promtool_takes_the_rules(promtool: str) -> None:
    assert "6 rules found" in checked(promtool, "check", "rules", str(RULES_FILE))


def test_promtool_takes_what_the_panels_ask(promtool: str, tmp_path: Path) -> None:
    """As recording rules; Grafana's variables are regular expressions by then."""
    filled = [re.sub(r"\$\w+", "x.*", expression) for expression in panel_expressions()]
    rules = [{"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(filled)]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in checked(promtool, "check", "rules", str(file))


def test_the_rules_fire_when_they_shall_and_only_then(promtool: str) -> None:
    checked(promtool, "test", "rules", str(ROOT / "tests/alerts_test.yaml"))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("> 1800", "> 600"),
        ("< 5 * max", "< 1 * max"),
        (" - 1\n", "\n"),
        ("for: 20m", "for: 0m"),
        ("unless max by", "and max by"),
        ("max_over_time(ray_skyrl_maze_eval_solve_low_ratio[2d])", "ray_skyrl_maze_eval_solve_low_ratio"),
        ("(ray_skyrl_maze_eval_solve_high_ratio)", "(ray_skyrl_maze_eval_solve_ratio)"),
        ("          > 3\n", "          > 0\n"),
        ("< 0.10", "< 0.20"),
        ("< 0.03", "< 0.00"),
        ("severity: critical", "severity: warning"),
    ],
)
def test_a_rule_that_is_wrong_is_found(promtool: str, tmp_path: Path, right: str, wrong: str) -> None:
    text = RULES_FILE.read_text(encoding="utf-8")
    assert right in text
    for folder in ("hyperpod", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "hyperpod/alerts.yaml").write_text(text.replace(right, wrong))
    shutil.copy(ROOT / "tests/alerts_test.yaml", tmp_path / "tests")
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "tests/alerts_test.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr
