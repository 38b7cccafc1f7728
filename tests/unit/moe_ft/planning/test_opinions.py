"""Tests of who computes whose micro-batches again, and who is named when results differ."""

import itertools
from collections.abc import Callable

import pytest

from moe_ft.planning.lost_ranks import Layout
from moe_ft.planning.opinions import (
    Accused,
    Depth,
    IterationPart,
    accused,
    ranks_of,
    replica_of,
    right_run,
    shifted,
    shifts_of,
)

ONE = Layout(num_stages=2, tp=1, cp=1, dp=2, ep=2)
TWO = Layout(num_stages=2, tp=2, cp=1, dp=2)
THREE = Layout(num_stages=1, tp=1, cp=1, dp=6, ep=2)
FOUR = Layout(num_stages=2, tp=2, cp=1, dp=8, ep=4, expert_tp=1)
LAYOUTS = pytest.mark.parametrize(
    "layout", [ONE, TWO, THREE, FOUR], ids=["one", "two", "three", "four"]
)
# Says whether a rank computes wrongly in a run.
Fault = Callable[[int, int], bool]


def judge(layout: Layout, fault: Fault) -> Accused:
    """Return who is named if all ranks report what they see of a fault.

    In a replica whose rank is faulty all results differ from those of others, and from each other's faults.
    What comes in at the faulty rank is deeper at the others.
    """
    size = layout.num_stages * layout.num_groups * layout.group_size
    shifts = shifts_of(layout)
    digests: list[list[str]] = [[] for _ in range(size)]
    depths: list[dict[int, Depth]] = [{} for _ in range(size)]
    for run, shift in enumerate(shifts):
        for replica in range(layout.num_groups):
            owners = ranks_of(layout, replica)
            computers = [shifted(layout, rank, -shift) for rank in owners]
            bad = [each for each in computers if fault(each, run)]
            for owner, computer in zip(owners, computers, strict=True):
                digests[owner].append(f"wrong by {bad}" if bad else "right")
                if bad:
                    depths[owner][run] = Depth(
                        IterationPart.FORWARD, 0, 0 if computer in bad else 1
                    )
    for replica in range(layout.num_groups):
        owners = ranks_of(layout, replica)
        right = right_run(digests[owners[0]]) or 0
        if digests[owners[0]][right] != "right":  # differences are to another wrong one
            for owner in owners:
                runs = {n for n, each in enumerate(digests[owner]) if each != digests[owner][right]}
                depths[owner] = {run: Depth(IterationPart.FORWARD, 0, 0) for run in runs}
    return accused(layout, digests, depths)


@LAYOUTS
def test_replicas_of_a_job_are_a_ring_and_keep_their_places(layout: Layout) -> None:
    count = layout.num_groups
    everyone = [*itertools.chain(*(ranks_of(layout, each) for each in range(count)))]
    assert sorted(everyone) == [*range(layout.num_stages * layout.tp * layout.cp * layout.dp)]
    for rank in everyone:
        assert rank in ranks_of(layout, replica_of(layout, rank))
        assert shifted(layout, rank, count) == rank
        assert shifted(layout, shifted(layout, rank, 1), -1) == rank
        assert (
            replica_of(layout, shifted(layout, rank, 1)) == (replica_of(layout, rank) + 1) % count
        )
        assert (shifted(layout, rank, 1) - rank) % layout.group_size == 0


@LAYOUTS
def test_what_happens_once_names_the_rank(layout: Layout) -> None:
    num_runs, size = len(shifts_of(layout)), layout.num_stages * layout.tp * layout.cp * layout.dp
    for rank, run in itertools.product(range(size), range(num_runs)):
        found = judge(layout, lambda each, at: (each, at) == (rank, run))  # noqa: B023
        assert found.depths.keys() == {rank} and found.is_decided, (rank, run)


@pytest.mark.parametrize("layout", [THREE, FOUR], ids=["three", "four"])
def test_a_rank_that_is_always_wrong_is_named_by_two_others(layout: Layout) -> None:
    for rank in range(layout.num_stages * layout.tp * layout.cp * layout.dp):
        found = judge(layout, lambda each, _: each == rank)  # noqa: B023
        assert found.depths.keys() == {rank} and found.is_decided


def test_of_two_that_always_differ_nobody_knows_which_is_wrong() -> None:
    for rank in range(8):
        found = judge(TWO, lambda each, _: each == rank)  # noqa: B023
        assert not found.is_decided
        assert rank in found.depths and shifted(TWO, rank, 1) in found.depths


def test_training_that_never_repeats_a_result_decides_nothing() -> None:
    digests = [[f"{rank} {run}" for run in range(3)] for rank in range(4)]
    depths = [{1: Depth(IterationPart.REST), 2: Depth(IterationPart.REST)} for _ in range(4)]
    assert not accused(ONE, digests, depths).is_decided


def test_a_mistake_has_come_in_where_the_first_difference_is() -> None:
    forward, later = Depth(IterationPart.FORWARD, 0, 5), Depth(IterationPart.FORWARD, 1, 2)
    deep, shallow = Depth(IterationPart.BACKWARD, -1, -7), Depth(IterationPart.BACKWARD, -1, -3)
    assert forward < later < deep < shallow < Depth(IterationPart.REST)
    digests = [["a", "b", "a", "a"] for _ in range(8)]
    depths: list[dict[int, Depth]] = [{1: later} for _ in range(8)]
    depths[2] = {1: forward}
    found = accused(TWO, digests, depths)
    # Rank 0 has computed what is rank 2's; of the other replica nobody has it first.
    assert found.depths[shifted(TWO, 2, -1)] == forward
