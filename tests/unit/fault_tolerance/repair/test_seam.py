"""The seam around `train_step`: when a death can be repaired, and what is no death.

Repairs themselves are in tests/distributed/test_repair.py.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from megatron.training import training

from megatron.fault_tolerance.repair import seam as seams
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.position import Position
from megatron.fault_tolerance.repair.seam import RepairSeam
from megatron.fault_tolerance.repair.watcher import Watcher
from megatron.fault_tolerance.seams.listeners import Listeners, LoopState
from moe_ft.errors import RepairError
from moe_ft.keeper.heartbeat import Heart
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Member, Rounds

ARGUMENTS = ("forward", "data", "model", "optimizer", "scheduler", "config", "schedule")


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def repairing(link: Link, loop_args: Namespace) -> Iterator[RepairSeam]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watcher, rounds = Watcher(Rounds(store, 1), links := Links(), link), Rounds(store, 1)
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


def test_state_after_the_broken_iteration_is_recovered_only_where_all_can_have_its_result() -> None:
    def of_members(*iterations: int, is_evaluated: bool = False, **flags: bool) -> int:
        facts = [{"iteration": each, "is_evaluated": is_evaluated} for each in iterations]
        survivors = [Member(rank=1, facts=each) for each in facts]
        return seams._most_iteration([Member(rank=0, died_s=5.0), *survivors], Namespace(**flags))

    assert of_members(4, 4) == 5
    assert of_members(4, 5) == 4
    assert of_members(4, 4, log_num_zeros_in_grad=True) == 4
    assert of_members(4, 4, is_evaluated=True) == 4, "its result was returned before"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("a mistake")])
def test_exception_that_no_death_explains_ends_the_rank_as_ever(
    error: Exception, repairing: RepairSeam, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "_NOTICE_S", 0.05)
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


def test_death_that_the_loop_notices_between_iterations_is_named_as_the_reason(
    repairing: RepairSeam, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(monkeypatch)

    def train() -> None:
        training.train_step(*ARGUMENTS, iteration=3)
        repairing._rounds.join(1, Member(rank=0, died_s=5.0))
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


def test_replacement_begins_at_the_iteration_of_the_survivors() -> None:
    def member(rank: int, iteration: int, is_evaluated: bool = False) -> Member:
        position = Position(
            iteration=iteration,
            consumed_train_samples=iteration * 8,
            consumed_valid_samples=0,
            skipped_train_samples=0,
            num_floating_point_operations_so_far=0.0,
            num_groups=9,
            do_train=True,
            do_valid=False,
            do_test=False,
            gathers_weights=False,
            evaluations_draw=False,
            is_evaluated=is_evaluated,
        )
        return Member(rank=rank, facts=position.facts())

    dead = Member(rank=1, died_s=5.0)
    position = seams.position_of_survivors([member(0, 4), dead, member(2, 5)])
    assert (position.iteration, position.consumed_train_samples) == (5, 40)
    with pytest.raises(RepairError, match="all ranks have died"):
        seams.position_of_survivors([dead])
    with pytest.raises(RepairError, match="some ranks were in an evaluation, and others were not"):
        seams.position_of_survivors([member(0, 4), dead, member(2, 4, is_evaluated=True)])


def test_process_ends_for_good_if_a_repair_takes_too_long(link: Link) -> None:
    pid = os.fork()
    if pid == 0:
        link.arm()
        with seams._ending_after(0.05, link) as deadline:
            deadline.join()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert not link.is_armed, "or the zygote would replace it"
