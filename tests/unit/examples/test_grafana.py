"""The dashboard and the alerts ask for metrics and labels that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_ft.loop.metrics import LABELS, METRICS
from tests.unit.examples.model_files import ROOT

DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "moe_ft.json").read_text())
SERIES = {
    f"moe_ft_{name}{'_total' if kind == 'counter' else ''}": label
    for name, (kind, _, label) in METRICS.items()
}
ALERTS = ROOT / "examples" / "prometheus" / "alerts.yml"
_LABEL = r"{{(\w+)}}|\$labels\.(\w+)|(\w+)[!=]~?\"|(?:by|ignoring) \(([\w, ]+)\)"


def queries() -> list[dict[str, Any]]:
    return [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_query_names_metrics_that_exist_and_every_metric_is_shown() -> None:
    named = {name for each in queries() for name in re.findall(r"\bmoe_ft_\w+", each["expr"])}
    assert named == set(SERIES)
    variables = [each["query"] for each in DASHBOARD["templating"]["list"]]
    assert {name for each in variables for name in re.findall(r"\bmoe_ft_\w+", each)} <= set(SERIES)


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\bmoe_ft_\w+", text))


def labels_in(text: str) -> set[str]:
    """Return the labels that a query or a text about its result names."""
    found = {name for each in re.findall(_LABEL, text) for name in "".join(each).split(", ")}
    assert found, text
    return found


def test_labels_of_a_query_are_those_of_its_metrics() -> None:
    for each in queries():
        known = {SERIES[name] for name in metrics_in(each["expr"])} | {*LABELS}
        assert labels_in(each["expr"] + each["legendFormat"]) <= known, each
        assert '{job_name=~"$job",node=~"$node"}' in each["expr"]


def test_alerts_name_metrics_and_labels_that_exist_and_tell_jobs_apart() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    for each in rules:
        names = metrics_in(each["expr"])
        assert names and names <= set(SERIES), each
        known = {SERIES[name] for name in names} | {*LABELS}
        used = labels_in(each["expr"] + each["annotations"]["summary"])
        assert "job_name" in used and used <= known, each


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool, which comes with Prometheus")
    text = Path(__file__).with_name("alerts_test.yml").read_text()
    test = tmp_path / "alerts_test.yml"
    test.write_text(text.replace("ALERTS", str(ALERTS)))
    subprocess.run([promtool, "test", "rules", test], check=True)


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24  # Grafana's columns
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
