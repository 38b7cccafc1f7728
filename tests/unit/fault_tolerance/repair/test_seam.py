"""The seam around `train_step`: when a death can be repaired, and what is no death.

Repairs of whole jobs are in tests/distributed/test_repair.py.
"""

import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import training

from megatron.fault_tolerance.repair import noticing
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.seam import RepairSeam
from megatron.fault_tolerance.repair.watcher import Watcher
from moe_ft.errors import LinksEndedError, RepairError
from moe_ft.keeper.heartbeat import Heart
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Member, Rounds
from moe_ft.loop.listeners import Listeners, LoopState
from tests.unit.signed import signed

ARGUMENTS = ("forward", "data", "model", "optimizer", "scheduler", "config", "schedule")


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def store() -> Any:
    """Return the store of the job."""
    return dist.HashStore()


@pytest.fixture
def repairing(link: Link, store: Any, loop_args: Namespace) -> Iterator[RepairSeam]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watcher, rounds = (
        Watcher(Rounds(signed(store), 0, 1), links := Links(), link),
        Rounds(signed(store), 0, 1),
    )
    listeners, heart = Listeners(LoopState(), []), Heart(link, limit_s=100.0)
    yield RepairSeam(link, listeners, store, rounds, watcher, links, heart)
    dist.destroy_process_group()


def step(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[Any]:
    """Have Megatron's step fail, or return its iteration; return the iterations that it ran."""
    ran: list[Any] = []

    def train_step(*args: Any, iteration: int) -> Any:
        assert args[:-1] == ARGUMENTS[:-1]  # the schedule is watched
        ran.append(iteration)
        if error is not None:
            raise error
        return f"result {iteration}"

    monkeypatch.setattr(training, "train_step", train_step)
    return ran


def test_rank_can_be_replaced_from_its_first_finished_iteration_until_training_ends(
    repairing: RepairSeam, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = step(monkeypatch)
    armed, limits_s = [], []

    def note() -> None:
        armed.append(link.is_armed)
        limits_s.append(link.limit_s)

    def train() -> None:
        note()
        assert training.train_step(*ARGUMENTS, iteration=7) == "result 7"
        note()

    monkeypatch.setattr(training, "train", train)
    with repairing.below_hooks(), repairing.above_hooks():
        training.train()
        note()
    note()
    assert armed == [False, True, False, False]
    assert limits_s == [0, 100, 100, 0], "no beats are expected while a process is set up"
    assert ran == [7]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("a mistake")])
def test_exception_that_no_death_explains_ends_the_rank_as_ever(
    error: Exception, repairing: RepairSeam, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticing, "_NOTICE_S", 0.05)
    ran = step(monkeypatch, error)
    link.arm()
    with (
        repairing.below_hooks(),
        repairing.above_hooks(),
        pytest.raises(type(error), match=str(error)),
    ):
        training.train_step(*ARGUMENTS, iteration=3)
    assert not link.is_armed
    assert ran == [3]


def test_iteration_whose_links_have_ended_is_broken_though_nothing_was_raised(
    repairing: RepairSeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has left a collective computes on, with what it had not received."""
    monkeypatch.setattr(noticing, "_NOTICE_S", 0.05)

    def train_step(*args: Any, iteration: int) -> str:
        repairing._links.end(0)
        return "garbage"

    monkeypatch.setattr(training, "train_step", train_step)
    with (
        repairing.below_hooks(),
        repairing.above_hooks(),
        pytest.raises(LinksEndedError, match="what was computed since does not count"),
    ):
        training.train_step(*ARGUMENTS, iteration=3)


def test_rank_that_has_lost_its_device_ends_while_it_can_be_replaced(
    repairing: RepairSeam, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    step(monkeypatch, error)

    def end() -> int:
        pid = os.fork()
        if pid == 0:
            with suppress(Exception), repairing.below_hooks(), repairing.above_hooks():
                training.train_step(*ARGUMENTS, iteration=3)
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    monkeypatch.setattr(noticing, "_NOTICE_S", 0.05)
    assert end() == 7, "an exception of a rank that cannot be replaced"
    link.arm()
    assert end() == -signal.SIGKILL
    assert link.is_armed


def test_death_that_the_loop_notices_between_iterations_is_named_as_the_reason(
    repairing: RepairSeam, link: Link, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(monkeypatch)

    def train() -> None:
        training.train_step(*ARGUMENTS, iteration=3)
        Rounds(signed(store), 0, 1).join(1, Member(rank=0, died_s=5.0))
        raise RuntimeError("Connection closed by peer")  # in a log line

    monkeypatch.setattr(training, "train", train)
    with (
        repairing.below_hooks(),
        repairing.above_hooks(),
        pytest.raises(
            RepairError, match="died between two iterations, where only some evaluations"
        ),
    ):
        training.train()
    assert not link.is_armed
