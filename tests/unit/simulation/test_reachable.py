"""Search for the best local recovery, on a pipeline of three ranks worked out by hand."""

import pytest

from moe_ft.format.boundary import BoundaryIndex, Direction, SentTensor
from moe_ft.format.encoding import FORMAT
from moe_ft.format.index import Index
from tests.simulation.reachable import best_local
from tests.simulation.shape import Shape
from tests.unit.moe_ft.builders import make_identity, make_state

SHAPE = Shape(stages=3, dp=1, ep=1)


def state(rank: int, iteration: int) -> Index:
    return make_state(rank, iteration)[0]


def sent(rank: int, receiver: int, iteration: int) -> tuple[BoundaryIndex, int]:
    direction = Direction.FORWARD if receiver > rank else Direction.BACKWARD
    tensor = SentTensor(receiver, direction, 0, (1,), "F32", 0, "0" * 16)
    index = BoundaryIndex(
        format=FORMAT,
        identity=make_identity(),
        rank=rank,
        node="node",
        iteration=iteration,
        file="boundary_0.safetensors",
        file_bytes=8,
        header_bytes=0,
        header_checksum="0" * 16,
        sent=(tensor,),
    )
    return index, receiver


AHEAD = [state(0, 5), state(2, 5)]
LOGS = [sent(rank, 1, iteration) for rank in (0, 2) for iteration in (3, 4)]
RECORD = [state(0, 4)]  # of the first iteration that runs again


def test_stage_alone_goes_to_where_the_others_are() -> None:
    assert best_local(SHAPE, [*AHEAD, *RECORD, state(1, 3)], LOGS) == (5, 2)


@pytest.mark.parametrize(("missing", "best"), [(0, None), (1, (5, 3)), (2, None), (3, None)])
def test_each_log_is_needed(missing: int, best: tuple[int, int] | None) -> None:
    logs = LOGS[:missing] + LOGS[missing + 1 :]
    # Rank 0 can run the iteration again of which its log is missing: it has the state before it.
    assert best_local(SHAPE, [*AHEAD, *RECORD, state(1, 3)], logs) == best


def test_stage_without_its_log_goes_back_too() -> None:
    logs = [sent(0, 1, 3), sent(0, 1, 4)]
    found = [*AHEAD, *RECORD, state(1, 3), state(2, 3)]
    assert best_local(SHAPE, found, logs) == (5, 4)


def test_record_of_each_iteration_is_needed() -> None:
    assert best_local(SHAPE, [*AHEAD, state(1, 3)], LOGS) is None


def test_recovery_of_all_stages_is_not_local() -> None:
    assert best_local(SHAPE, [state(rank, 3) for rank in range(3)], LOGS) == (3, 0)
    assert best_local(SHAPE, [], []) is None


def test_dearer_way_to_a_target_of_a_global_recovery_does_not_count() -> None:
    found = [state(0, 5), *RECORD, *(state(rank, 3) for rank in range(3)), state(1, 2)]
    # Stage 1 could begin one iteration earlier than the others, for nothing.
    logs = [sent(rank, 1, 2) for rank in (0, 2)]
    assert best_local(SHAPE, found, logs) == (3, 0)
