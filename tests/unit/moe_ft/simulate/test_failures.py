"""Failures that are drawn, and traces that are read."""

import math
import re
from itertools import islice, pairwise
from random import Random
from statistics import fmean, stdev

import pytest

from moe_ft.errors import ConfigError
from moe_ft.simulate.failures import Change, Failures, mean_time_between, read_trace


def drawn(number: int, seed: int = 0, **values: float) -> list[Change]:
    failures = Failures(mtbf_s=100.0, **values)  # type: ignore[arg-type]
    return [*islice(failures.draw(64, Random(seed)), number)]


@pytest.mark.parametrize(("shape", "variation"), [(1.0, 1.0), (0.7, 1.462), (2.0, 0.523)])
def test_failures_come_as_often_as_asked_and_as_irregularly(shape: float, variation: float) -> None:
    gaps = [b.time_s - a.time_s for a, b in pairwise(drawn(10_000, weibull_shape=shape))]
    assert fmean(gaps) == pytest.approx(100, rel=0.05)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_job_begins_in_a_cluster_that_has_run_for_long(shape: float) -> None:
    # The mean rest of an interval: (mean^2 + variance) / (2 mean).
    first = [drawn(1, seed, weibull_shape=shape)[0].time_s for seed in range(3_000)]
    squared = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2
    assert fmean(first) == pytest.approx(100 * squared / 2, rel=0.08)


def test_shares_of_crashes_and_racks_are_as_asked() -> None:
    found = drawn(5_000, crash_share=0.25, rack_nodes=16, rack_share=0.1)
    machines = [each for each in found if not each.keeps_machines]
    assert len(machines) / len(found) == pytest.approx(0.75, abs=0.02)
    racks = [each for each in machines if len(each.struck) == 16]
    assert len(racks) / len(machines) == pytest.approx(0.1, abs=0.02)
    assert all(len(each.struck) == 1 for each in found if each.keeps_machines)
    assert all(each.struck[0] % 16 == 0 for each in racks)


def test_trace_of_names_is_read_by_time() -> None:
    lines = ["0,add,a", "0,add,b", "", "9000,add,c", "7500,remove,a"]
    assert read_trace("t", lines) == [
        Change(time_s=0, added=("a", "b")),
        Change(time_s=7.5, removed=("a",)),
        Change(time_s=9, added=("c",)),
    ]


def test_trace_of_numbers_draws_who_leaves() -> None:
    lines = ["2021-12-10, 13:00:00, 3", "2021-12-10, 13:01:00, 9", "2021-12-10, 13:01:00, 1"]
    found = read_trace("t", [*lines, "2021-12-10, 13:00:30, 2", "2021-12-10, 13:05:00, 4"])
    assert [each.time_s for each in found] == [0, 30, 60, 300]
    assert [len(each.removed) for each in found] == [0, 1, 1, 0]
    assert [len(each.added) for each in found] == [3, 0, 0, 3]
    assert not {*found[1].removed} & {*found[2].removed}
    assert mean_time_between(found, 300) == 150
    assert mean_time_between(found[:1], 300) == math.inf


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("x,add,node1", []),
        ("-5,add,node1", []),
        ("0,drop,node1", []),
        ("0,add,", []),
        ("2021-12-10, 25:00:00, 3", []),
        ("2021-12-10, 13:00:00, many", []),
        ("hello", []),
    ],
)
def test_malformed_line_is_named(line: str, others: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"spot.csv, line 2: {re.escape(repr(line))} must be "):
        read_trace("spot.csv", ["0,add,a", line])


@pytest.mark.parametrize("lines", [[], ["0,add,a", "2021-12-10, 13:00:00, 3"]])
def test_trace_has_one_format(lines: list[str]) -> None:
    with pytest.raises(ConfigError, match="spot.csv must hold lines .* of one of the two formats"):
        read_trace("spot.csv", lines)
