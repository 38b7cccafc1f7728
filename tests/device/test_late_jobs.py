"""Simulated jobs on late devices, and the proof that each wait of the product is needed there."""

import ast

import msgspec
import pytest
import torch

from moe_ft.format import encoding
from tests.device.removal import (
    FENCE,
    OF_LINKS,
    OF_PARKING,
    calls_in,
    check,
    hunt,
    schedules,
    waits,
)
from tests.simulation.schedule import draw

SEEDS = range(4)
_ELSEWHERE = {*OF_LINKS, *OF_PARKING}
NUM_DRAWN, NUM_MORE = 8, 212


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_chosen_jobs_wait_for_all_that_they_need() -> None:
    for schedule in schedules(SEEDS):
        assert check(schedule) == [], schedule


def test_jobs_whose_checksums_have_several_threads_break_no_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "num_cores_of_rank", lambda: 4)
    monkeypatch.setattr(encoding, "_LEAST_BYTES", 0)
    for schedule in schedules(SEEDS[:1]):
        assert check(schedule) == [], schedule


def test_jobs_that_may_continue_without_pinned_memory_say_so_and_break_no_promise() -> None:
    for schedule in schedules(range(1)):
        setup = msgspec.structs.replace(schedule.setup, pin="try")
        trying = msgspec.structs.replace(schedule, setup=setup)
        problems = check(trying, refuses_pins=True)
        reported = "'memory', 'reason': '--moe-ft-pin=try: snapshots take longer"
        assert problems, "a failure to pin is an event"
        assert [each for each in problems if reported not in each] == [], schedule
        (refusal, *_) = check(schedule, refuses_pins=True)
        assert "--moe-ft-pin=require" in refusal


@pytest.mark.parametrize(
    "seeds",
    [
        range(NUM_DRAWN),
        pytest.param(range(NUM_DRAWN, NUM_DRAWN + NUM_MORE), marks=pytest.mark.rest),
    ],
    ids=["some", "many"],
)
def test_drawn_jobs_on_late_devices_break_no_promise(seeds: range) -> None:
    for seed in seeds:
        assert check(draw(seed, share_of_followed=0.0)) == [], seed


def test_waits_that_simulated_jobs_do_not_have_are_there() -> None:
    assert waits().keys() > _ELSEWHERE


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch.cuda.synchronize()", ["synchronize"]),
        ("pool.submit(torch.cuda.synchronize)", ["synchronize"]),
        ("stream.wait_stream(other), stream.wait_event(event)", ["wait_stream", "wait_event"]),
        ("tensor.record_stream(stream); event.record()", ["record_stream", "record"]),
        ("self.record(event)", []),
    ],
)
def test_new_wait_is_one_that_has_to_be_noticed(line: str, found: list[str]) -> None:
    tree = ast.parse(f"class Owner:\n  def act(self):\n    {line}")
    assert [*calls_in(tree, "")] == [f"Owner.act: {each}" for each in found]


@pytest.mark.parametrize("name", [*(each for each in waits() if each not in _ELSEWHERE), FENCE])
def test_wait_that_is_left_out_is_noticed(name: str) -> None:
    found = hunt(name, SEEDS)
    assert found.num_left_out > 0
    assert found.problem
