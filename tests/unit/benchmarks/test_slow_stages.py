"""Stages that take a given time, and boundary logs as they are read after a kill."""

from pathlib import Path

import pytest

from benchmarks.slow_stages import lasting, logs_left
from tests.unit.moe_ft.engine.boundary.logs import RANK, STAGE, TRAFFIC, small_log


class Time:
    """A clock that only sleeping and working move."""

    def __init__(self) -> None:
        self.now = 5.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def work(self, seconds: float, *, result: str) -> str:
        """Let time pass, as a stage that computes."""
        self.now += seconds
        return result


@pytest.mark.parametrize(("work_s", "rest_s"), [(0.25, 0.75), (0.0, 1.0), (1.0, 0.0), (3.0, 0.0)])
def test_stage_sleeps_for_what_its_work_has_left(work_s: float, rest_s: float) -> None:
    time = Time()
    stage = lasting(time.work, 1.0, time.clock, time.sleep)
    assert stage(work_s, result="output") == "output"
    assert time.slept == [rest_s]


def test_logs_of_a_dead_rank_are_counted_from_its_files(tmp_path: Path) -> None:
    directory = tmp_path / "job" / "node" / f"rank_{RANK:05d}"
    directory.mkdir(parents=True)
    with small_log(directory) as log:
        log.take(4)
        log.take(5)
    sizes = {
        "tensors": TRAFFIC.num_sends(STAGE),
        "bytes": TRAFFIC.sent_bytes(STAGE),
        "file_bytes": TRAFFIC.slot_bytes(STAGE),
    }
    assert list(logs_left(tmp_path, RANK)) == [
        {"iteration": 4, **sizes},
        {"iteration": 5, **sizes},
    ]
    assert not list(logs_left(tmp_path, RANK + 1))
