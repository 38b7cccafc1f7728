"""`moe_ft report --json`: the fields of docs/report.md, with numbers as numbers, on the log of a real run."""

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_ft.cli import main
from moe_ft.commands import report_summary
from moe_ft.commands.report import render
from moe_ft.commands.report_summary import SCHEMA, RunReport, as_json
from moe_ft.events import EventLog
from moe_ft.loop.stragglers import Straggler
from moe_ft.planning.time_shares import Spent
from tests.unit.moe_ft.commands.runs import summarize, write_run
from tests.unit.moe_ft.commands.test_report_page import REAL, events

ROOT = Path(__file__).parents[4]
# By object of the JSON, in the order of the page.
OBJECTS: dict[str, type[msgspec.Struct]] = {
    "": RunReport,
    "job": report_summary.ReportedJob,
    "ranks": report_summary.RankEnd,
    "slow_ranks": Straggler,
    "recoveries": report_summary.RecoveryFacts,
    "repairs": report_summary.RepairFacts,
    "rank_changes": report_summary.RankChange,
    "tiers": report_summary.TierSums,
    "expert_slots": report_summary.ExpertSlots,
}


def read_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", f"{directory}", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def type_name(hint: Any) -> str:
    """Return a type as the page has it."""
    parts = typing.get_args(hint)
    if type(None) in parts:
        (other,) = (each for each in parts if each is not type(None))
        return f"{type_name(other)} or null"
    if typing.get_origin(hint) is tuple:
        return f"list of {type_name(parts[0])}s"
    if typing.get_origin(hint) is dict:
        return f"object of {type_name(parts[1])}s"
    names = {int: "integer", float: "number", str: "text", bool: "boolean"}
    return names.get(hint, "object")


def rows_of(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield the rows of the page's table of an object."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        type_, meta = typing.get_args(hint)
        yield f"| `{name}` | {type_name(type_)} | {meta.description} |".replace("|  |", "| |")


def test_page_lists_the_fields_and_no_others() -> None:
    section = (ROOT / "docs" / "report.md").read_text().partition("## JSON")[2]
    rows = re.findall(r"^\| `\w+` \|.*$", section, re.MULTILINE)
    assert rows == [row for kind in OBJECTS.values() for row in rows_of(kind)]
    assert f"`schema` is {SCHEMA}" in section


def test_fields_are_those_of_the_page_and_numbers_are_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = read_json(REAL, capsys)
    assert msgspec.convert(found, RunReport) == msgspec.convert(found, RunReport, strict=True)
    for name, kind in OBJECTS.items():
        part = found[name] if name else found
        values = [*part.values()] if name == "tiers" else part if isinstance(part, list) else [part]
        for each in filter(None, values):
            assert tuple(each) == kind.__struct_fields__
    keys = re.findall(r'"([^"]*)":', json.dumps(found))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", key) for key in keys)


def test_numbers_are_those_of_the_text_and_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    found, text = read_json(REAL, capsys), render(summarize(REAL))
    assert re.search(rf"^loss at end +{found['last_loss']:.3f}$", text, re.MULTILINE)
    assert {*found["time_shares"]} == {*Spent}
    assert sum(found["time_shares"].values()) == pytest.approx(1)
    for tier, kind in (("memory", "snapshot"), ("storage", "persist")):
        assert found["tiers"][tier]["bytes"] == sum(each["bytes"] for each in events(kind)) > 0
        assert found["tiers"][tier]["num_snapshots"] == len([*events(kind)])
    sent = sum(each["state_bytes"] + each["gradient_bytes"] for each in events("replicate"))
    assert found["tiers"]["peers"]["bytes"] == sent > 0


def test_loss_that_is_no_number_is_null_and_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, 0, [5.0, float("nan")])
    found = read_json(tmp_path, capsys)
    assert (found["first_loss"], found["last_loss"], found["is_last_loss_finite"]) == (
        5,
        None,
        False,
    )


def test_start_of_a_run_names_job_model_layout_and_versions(tmp_path: Path) -> None:
    for rank, host in enumerate(("gpu-01", "gpu-02")):
        log = EventLog(tmp_path, rank)
        log.start()
        versions: dict[str, Any] = {"moe_ft": "0.1.0", "megatron": "0.19.2", "torch": "2.13.0"}
        model: dict[str, Any] = {
            "num_layers": 24,
            "hidden_size": 2048,
            "num_experts": 64,
            "seq_length": 4096,
        }
        layout: dict[str, Any] = {
            "train_iterations": 50,
            "world_size": 2,
            "tp": 1,
            "pp": 2,
            "ep": 1,
            "etp": 1,
            "dp": 1,
        }
        job: dict[str, Any] = {"job": "lm", "strategy": "sparse", "host": host}
        log.write("start", 0, **job, **versions, **model, **layout)
        log.write("iteration", 1, iteration_s=1.0, num_tokens=1)
    report = summarize(tmp_path)
    assert report.job.hosts == ("gpu-01", "gpu-02")
    facts = [re.split("  +", line) for line in render(report).splitlines()]
    assert facts[:5] == [
        ["job", "lm, strategy sparse"],
        ["model", "24 layers, hidden size 2,048, 64 experts, sequences of 4,096 tokens"],
        ["layout", "2 ranks: tp 1, pp 2, ep 1, etp 1, dp 1"],
        ["hosts", "2: gpu-01, gpu-02"],
        ["versions", "moe_ft 0.1.0, Megatron 0.19.2, torch 2.13.0"],
    ]
    assert facts[6] == ["iterations", "1 of 50"]


def test_directory_whose_name_is_no_text_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "no \udcff"
    write_run(folder, 0, [5.0])
    assert json.loads(as_json(summarize(folder)))["event_log"].endswith("no \\udcff")
