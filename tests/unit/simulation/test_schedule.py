"""Drawing of schedules, and making them smaller."""

import msgspec

from tests.simulation.schedule import Schedule, draw
from tests.simulation.soak import shrink

SEEDS = range(200)


def test_schedule_survives_a_file() -> None:
    for schedule in map(draw, SEEDS):
        assert msgspec.json.decode(msgspec.json.encode(schedule), type=Schedule) == schedule


def test_smaller_schedule_fails_too_and_needs_all_that_is_left() -> None:
    def fails(schedule: Schedule) -> bool:
        return (
            sum(each.kind == "kill-rank" for each in schedule.faults) >= 2
            and schedule.setup.shape.num_ranks > 1
        )

    failing = [schedule for schedule in map(draw, SEEDS) if fails(schedule)]
    assert failing
    for smaller in (shrink(schedule, fails) for schedule in failing):
        assert fails(smaller)
        assert [each.kind for each in smaller.faults] == ["kill-rank", "kill-rank"]
        assert smaller.setup.iterations == 4
