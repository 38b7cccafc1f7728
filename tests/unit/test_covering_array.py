"""The runs of the covering array show what they must, and their checks can fail."""

from typing import Any

import pytest

from tests import layout_array
from tests.covering_array import (
    FACTORS,
    SPACE,
    Case,
    Fault,
    case_of,
    is_important,
    is_possible,
    runs,
)
from tests.faulty_case import check_case
from tests.recoveries import Expected

VALUES = (
    {"strategy": "dense-1", "order": "fixed", "layout": "ep2", "packing": "unpacked"}
    | {"precision": "bf16", "optimizer": "distributed", "model": "moe", "feature": "dropout"}
    | {"left": "windows"}
)
CASE = case_of(dict(zip(FACTORS, ["kill", "backward", "memory"] * 2, strict=False)) | VALUES)
# The second fault strikes the recovery from the first, and then the node of rank 0 is lost.
LOST = case_of(
    dict(zip(FACTORS, ["kill", "replicate", "memory", "kill", "recovery", "peer"], strict=False))
    | VALUES
)


def test_runs_of_the_table_show_every_pair_that_can_occur() -> None:
    assert all(is_possible(run) for run in runs())
    assert SPACE.shown_by(runs()) == set(SPACE.examples)


def test_runs_of_layouts_show_every_pair_that_can_occur() -> None:
    runs_of_layouts = [each.values for each in layout_array.cases()]
    assert all(layout_array.is_possible(run) for run in runs_of_layouts)
    space = layout_array.SPACE
    assert space.shown_by(runs_of_layouts) == set(space.examples)
    pairs = {(run["before"], run["after"]) for run in runs_of_layouts}
    num_layouts = len(layout_array.LAYOUTS)
    assert len(pairs) == num_layouts * (num_layouts - 1)


def test_runs_of_layouts_in_make_test_have_each_strategy_and_tier() -> None:
    chosen = layout_array.chosen()
    assert {each.strategy for each in chosen} == {*layout_array.STRATEGIES}
    assert {each.tier for each in chosen} == {*layout_array.TIERS}


def test_runs_of_make_test_show_every_value_and_every_important_pair() -> None:
    assert SPACE.shown_by(runs("test")) >= set(filter(is_important, SPACE.examples))
    assert len(runs("test")) <= 13


def fired(fault: Fault, incarnation: int, **changes: Any) -> dict[str, Any]:
    line = {"kind": fault.kind, "phase": fault.phase, "rank": fault.victim}
    return {**line, "incarnation": incarnation, "iteration": fault.iteration, **changes}


def recovered(iteration: int, *tiers: str, length: int = 1) -> Expected:
    return Expected(
        restored_iteration=iteration - length + 1,
        target_iteration=iteration,
        tiers=tiers or ("memory",) * CASE.world_size,
    )


def both_fired(case: Case = CASE) -> list[dict[str, Any]]:
    return [fired(fault, start) for start, fault in enumerate(case.faults)]


def test_recoveries_of_what_the_faults_have_left_pass() -> None:
    check_case(CASE, both_fired(), [recovered(5), recovered(7)])


@pytest.mark.parametrize("tiers", [("peer", "memory"), ("storage", "memory")])
def test_rank_of_a_lost_node_gets_its_state_from_elsewhere(tiers: tuple[str, ...]) -> None:
    check_case(LOST, both_fired(LOST), [recovered(5), recovered(5, *tiers)])
    with pytest.raises(AssertionError, match="start 2 recovered"):
        check_case(LOST, both_fired(LOST), [recovered(5), recovered(5)])


@pytest.mark.parametrize(
    ("lines", "recoveries", "message"),
    [
        (both_fired()[:1], [recovered(5)], "did not fire"),
        (both_fired(), [recovered(5)], "a restart without a fault"),
        (both_fired(), [recovered(6), recovered(7)], "start 1 recovered 6"),
        (both_fired(), [recovered(5), recovered(4)], "start 2 recovered 4"),
        (
            both_fired(),
            [recovered(5), recovered(7, "storage", "storage")],
            "start 2 recovered 7 from storage",
        ),
        (both_fired(), [recovered(5), recovered(7, length=2)], "start 2 recovered 6"),
        (both_fired(), [recovered(5), None], "start 2 recovered nothing"),
    ],
)
def test_recoveries_that_the_case_does_not_allow_fail(
    lines: list[dict[str, Any]], recoveries: list[Expected | None], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        check_case(CASE, lines, recoveries)
