"""States, logs and records of each stage, found among the remains of a failure."""

from dataclasses import replace

from moe_ft.format.boundary import Direction
from moe_ft.planning.recovery import Version
from moe_ft.planning.remains import KeptRecord, Link, Pipelines, Remains, SentLog
from moe_ft.planning.restorable import Restorable
from tests.unit.moe_ft.planning.failures import make_pipelines, make_version

PIPELINES = make_pipelines(3, 2)
LINK = Link(sender=0, receiver=1, direction=Direction.FORWARD)
LOG = SentLog(
    sender=0, receiver=2, direction=Direction.FORWARD, iteration=3, node="node-0", path="log"
)
RECORD = KeptRecord(rank=0, iteration=7, node="node-0", path="records")


def of_versions(*versions: Version, pipelines: Pipelines = PIPELINES) -> Restorable:
    return Restorable(Remains(versions=versions), pipelines)


def of_records(*records: KeptRecord, pipelines: Pipelines = PIPELINES) -> Restorable:
    return Restorable(Remains(versions=(), records=records), pipelines)


def test_stage_has_a_state_that_all_its_ranks_have() -> None:
    found = of_versions(make_version(0, 5), make_version(1, 5), make_version(2, 5))
    assert [[state.iteration for state in own] for own in found.states] == [[5], [], []]


def test_state_has_all_places_of_a_rank() -> None:
    places = make_version(0, 5, node="a"), make_version(0, 5, node="b")
    ((state,), *_) = of_versions(*places, make_version(1, 5)).states
    assert state.versions[0] == places


def test_windows_of_one_start_and_whole_states_of_any_starts_fit_together() -> None:
    found = of_versions(
        *(make_version(rank, 5, 2, start=rank) for rank in (0, 1)),
        *(make_version(rank, 6, 1, start=rank) for rank in (0, 1)),
    )
    assert [state.iteration for state in found.states[0]] == [6]


def test_window_is_put_back_at_its_first_iteration() -> None:
    found = of_versions(*(make_version(rank, 5, 3) for rank in (0, 1)))
    assert [state.replay_from for state in found.states[0]] == [3]


def test_whole_state_is_better_than_a_window_that_begins_there_and_an_older_window_is_worse() -> (
    None
):
    found = of_versions(
        *(
            make_version(rank, end, window)
            for rank in (0, 1)
            for end, window in ((6, 4), (5, 2), (4, 1))
        )
    )
    order = sorted(found.states[0], key=lambda state: state.order, reverse=True)
    assert [state.iteration for state in order] == [4, 5, 6]


def test_link_is_broken_at_the_first_wire_without_log() -> None:
    other = replace(LOG, sender=1, receiver=3)
    assert Restorable(Remains(versions=(), logs=[LOG]), PIPELINES).broken_wire(LINK, 3) == (1, 3)
    whole = Restorable(Remains(versions=(), logs=[LOG, other]), PIPELINES)
    assert whole.broken_wire(LINK, 3) is None
    assert whole.broken_wire(LINK, 4) == (0, 2)
    backward = Link(sender=0, receiver=1, direction=Direction.BACKWARD)
    assert whole.broken_wire(backward, 3) == (0, 2)


def test_log_is_read_from_the_receivers_own_node_then_from_memory_then_from_storage() -> None:
    places = [replace(LOG, node=node) for node in (None, "node-0", "node-1")]
    for expected in ("node-1", "node-0", None):
        found = Restorable(Remains(versions=(), logs=places), PIPELINES)
        assert found.log(LINK, (0, 2), 3).node == expected
        places = [each for each in places if each.node != expected]


def test_record_is_of_the_own_stage_else_of_the_nearest() -> None:
    records = [replace(RECORD, rank=rank) for rank in (0, 4, 5)]
    found = of_records(*records)
    assert found.record(0, 7) == records[0]
    assert found.record(2, 7) == records[1]
    assert found.record(1, 7) == records[0]
    assert found.record(1, 8) is None


def test_record_in_memory_is_preferred_to_one_of_a_lower_rank_on_storage() -> None:
    stored, remembered = replace(RECORD, node=None), replace(RECORD, rank=1)
    assert of_records(stored, remembered).record(0, 7) == remembered


def test_record_of_another_stage_is_not_used_where_it_does_not_answer() -> None:
    pipelines = make_pipelines(3, 2, has_common_records=False)
    assert of_records(RECORD, pipelines=pipelines).record(0, 7) == RECORD
    assert of_records(RECORD, pipelines=pipelines).record(1, 7) is None


def test_files_of_states_hold_the_records_of_their_snapshots() -> None:
    found = of_versions(make_version(0, 5, 3, node="node-0"))
    held = [found.record(0, iteration) for iteration in range(2, 7)]
    assert [each and each.iteration for each in held] == [None, 3, 4, 5, None]


def test_gap_is_the_first_iteration_after_a_state_without_record() -> None:
    records = [replace(RECORD, iteration=iteration) for iteration in (6, 8)]
    versions = [make_version(rank, 5, 2) for rank in (0, 1)]
    found = Restorable(Remains(versions=versions, records=records), PIPELINES)
    (state,) = found.states[0]
    assert found.first_gap(0, state, target=6) is None
    assert found.first_gap(0, state, target=8) == 7


def test_remains_of_ranks_that_the_job_does_not_have_are_left_out() -> None:
    stranger = replace(RECORD, rank=6)
    found = Restorable(Remains(versions=[make_version(6, 5)], records=[stranger]), PIPELINES)
    assert found.states == [[], [], []]
    assert found.record(2, 7) is None
