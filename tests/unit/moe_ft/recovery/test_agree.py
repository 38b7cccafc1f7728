"""All ranks together must have read everything that several of them hold."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ft.recovery.agree import agree, find_gaps
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.put_back import SharedSlices
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_parameter
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, initialized, met_alone
from tests.unit.moe_ft.recovery.starts import plans_of, start, versions_of

EARLY, _, _, LATE = WINDOW_UNITS


def restored(*slices: dict[str, tuple[int, int]]) -> SharedSlices:
    """Return what the ranks of a data-parallel group have read in one snapshot."""
    return SharedSlices(dp=slices, expt_dp=())


def gaps(*snapshots: SharedSlices, kept: tuple[str, ...] = ()) -> list[str]:
    embedding: Any = [make_parameter(LATE, "p", parameter=torch.zeros(10))]
    return find_gaps(embedding, snapshots, kept)


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ([restored({"p": (0, 4)}, {"p": (4, 10)})], []),
        ([restored({"p": (4, 10)}, {"p": (0, 4)})], []),
        ([restored({}, {}), restored({"p": (0, 4)}, {"p": (4, 10)})], []),
        ([restored({"p": (0, 10)}, {})], []),
        ([restored({"p": (0, 4)}, {})], ["p"]),
        ([restored({"p": (0, 4)}, {"p": (5, 10)})], ["p"]),
        ([restored({"p": (0, 5)}, {"p": (4, 10)})], ["p"]),
        ([restored({"p": (0, 10)}, {}), restored({}, {"p": (0, 10)})], ["p"]),
        ([restored({}, {})], ["p"]),
        ([], ["p"]),
    ],
)
def test_shared_parameter_must_have_been_read_once_and_wholly_in_all_snapshots_together(
    snapshots: list[SharedSlices], expected: list[str]
) -> None:
    assert gaps(*snapshots) == expected


def test_shared_parameter_that_stays_as_it_is_need_not_have_been_read() -> None:
    assert gaps(restored({}), kept=("p",)) == []


def test_experts_are_looked_for_among_the_ranks_that_share_them() -> None:
    expert = [make_parameter(EARLY, "p", parameter=torch.zeros(10))]
    both = SharedSlices(dp=[{"p": (0, 10)}], expt_dp=[{"p": (0, 4)}])
    assert find_gaps(expert, [both], ()) == ["p"]


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ((), "iteration 7: rank 0 has no intact record"),
        (("embedding",), "iteration 7: rank 0 has no intact embedding, record"),
        (tuple("abcde"), "iteration 7: rank 0 has no intact a, b, c"),
    ],
)
def test_state_that_a_rank_could_not_read_is_rejected_with_the_first_of_what_it_lacks(
    tmp_path: Path, missing: tuple[str, ...], reason: str
) -> None:
    (plan,), _ = plans_of(versions_of((start(0, 0),), 7))
    with initialized(), ExitStack() as opened:
        met = met_alone(config_of(tmp_path), facts_of(), opened)
        agreed, rejected = agree(plan, Fetched(missing=missing), met)
    assert agreed is None
    assert [each.reason for each in rejected] == [reason]
