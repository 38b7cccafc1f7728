"""Versions are compared between ranks and with those that are tested; GPUs between nodes."""

import re
from pathlib import Path

import pytest

from moe_ft.doctor.ranks import TESTED, TESTED_PYTHON, check_gpus, check_versions
from moe_ft.doctor.rows import Result
from tests.unit.moe_ft.doctor.everyone import VERSIONS, facts_of

ROOT = Path(__file__).parents[4]


def test_tested_versions_are_those_that_are_installed_for_tests() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(.*)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert {name: pins[name] for name in TESTED} == TESTED


def test_tested_versions_of_python_are_those_of_the_readme() -> None:
    assert f"Python {' or '.join(TESTED_PYTHON)}" in (ROOT / "README.md").read_text()


def test_the_same_tested_versions_pass() -> None:
    (row,) = check_versions([facts_of(0), facts_of(1)])
    assert row.result is Result.PASS
    assert f"torch {TESTED['torch']}" in row.found


def test_rank_with_another_version_fails_and_is_named() -> None:
    other = facts_of(5, versions={**VERSIONS, "moe_ft": "0.0.9"})
    (row,) = check_versions([facts_of(0), facts_of(1), other])
    assert row.result is Result.FAIL
    assert "0.1.0 on n0, n1 (rank 0, ...)" in row.found
    assert "0.0.9 on n5 (rank 5)" in row.found


@pytest.mark.parametrize("name", [*TESTED, "python"])
def test_version_that_was_not_tested_is_warned_of(name: str) -> None:
    (row,) = check_versions([facts_of(0, versions={**VERSIONS, name: "1.0.0"})])
    assert row.result is Result.WARN
    assert f"{name} 1.0.0; tested with" in row.found


def test_build_of_a_tested_version_passes() -> None:
    versions = {**VERSIONS, "torch": f"{TESTED['torch']}+cu130"}
    assert check_versions([facts_of(0, versions=versions)])[0].result is Result.PASS


def test_missing_package_fails() -> None:
    versions = {name: version for name, version in VERSIONS.items() if name != "megatron-core"}
    (row,) = check_versions([facts_of(0, versions=versions)])
    assert (row.result, row.found) == (Result.FAIL, "no megatron-core")


@pytest.mark.parametrize(
    ("facts", "result", "found"),
    [
        ({}, Result.PASS, "8 GPUs"),
        ({"num_gpus": 0}, Result.WARN, "no GPU: training runs on the CPU"),
        ({"num_gpus": 4}, Result.FAIL, "4 GPUs for 8 ranks of a node"),
        ({"versions": {"torch": "2.13.0+cpu"}}, Result.FAIL, "torch 2.13.0+cpu, which uses none"),
    ],
)
def test_gpus_of_a_node(facts: dict, result: Result, found: str) -> None:
    (row,) = check_gpus([facts_of(0, **facts)], 8)
    assert row.result is result
    assert found in row.found


def test_node_with_fewer_gpus_than_others_fails() -> None:
    rows = check_gpus([facts_of(0), facts_of(1, num_gpus=7)], None)
    assert [(row.where, row.result) for row in rows] == [("n0", Result.PASS), ("n1", Result.FAIL)]
