"""The dashboard asks for metrics and labels that there are."""

import json
import re
from typing import Any

from moe_ft.loop.metrics import METRICS
from tests.unit.examples.model_files import ROOT

DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "moe_ft.json").read_text())
SERIES = {
    f"moe_ft_{name}{'_total' if kind == 'counter' else ''}": label
    for name, (kind, _, label) in METRICS.items()
}
# Of Prometheus itself, and of the dashboard.
LABELS = {"job", "rank"}


def queries() -> list[dict[str, Any]]:
    return [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_query_names_metrics_that_exist_and_every_metric_is_shown() -> None:
    named = {name for each in queries() for name in re.findall(r"\bmoe_ft_\w+", each["expr"])}
    assert named == set(SERIES)
    variables = [each["query"] for each in DASHBOARD["templating"]["list"]]
    assert {name for each in variables for name in re.findall(r"\bmoe_ft_\w+", each)} <= set(SERIES)


def test_labels_of_a_query_are_those_of_its_metrics() -> None:
    for each in queries():
        text = each["expr"] + each["legendFormat"]
        used = {*re.findall(r"{{(\w+)}}", text), *re.findall(r"(?:by|ignoring) \((\w+)\)", text)}
        known = {SERIES[name] for name in re.findall(r"\bmoe_ft_\w+", each["expr"])} | LABELS
        assert used <= known, each


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
