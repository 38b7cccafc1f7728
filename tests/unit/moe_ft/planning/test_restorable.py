"""States, logs and records of each stage, found among the remains of a failure."""

from dataclasses import replace

from moe_ft.format.boundary import Direction
from moe_ft.planning.recovery import Version
from moe_ft.planning.remains import PipelineLayout, Remains, StageLink
from moe_ft.planning.restorable import Restorable
from moe_ft.planning.scope import KeptRecord, SentLog
from tests.unit.moe_ft.planning.failures import make_pipelines, make_version

PIPELINES = make_pipelines(3, 2)
LINK = StageLink(sender=0, receiver=1, direction=Direction.FORWARD)
LOG = SentLog(
    sender=0, receiver=2, direction=Direction.FORWARD, iteration=3, node="node-0", path="log"
)
RECORD = KeptRecord(rank=0, iteration=7, node="node-0", path="records")


def of_versions(*versions: Version, pipelines: PipelineLayout = PIPELINES) -> Restorable:
    return Restorable(Remains(versions=versions), pipelines)


def of_records(*records: KeptRecord, pipelines: PipelineLayout = PIPELINES) -> Restorable:
    return Restorable(Remains(versions=(), records=records), pipelines)


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


def test_remains_of_ranks_that_the_job_does_not_have_are_left_out() -> None:
    stranger = replace(RECORD, rank=6)
    found = Restorable(Remains(versions=[make_version(6, 5)], records=[stranger]), PIPELINES)
    assert found.states == [[], [], []]
    assert found.record(2, 7) is None
