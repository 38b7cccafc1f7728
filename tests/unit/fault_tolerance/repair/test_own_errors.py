"""An exception of this rank alone ends its process; of others it waits for news of a death first."""

import os
from argparse import Namespace
from collections.abc import Callable

import pytest
import torch

from megatron.fault_tolerance.repair.own_errors import (
    OwnErrors,
    may_be_of_others,
    num_batches_left_out,
)
from moe_ft.cluster.rounds import Entry, Rounds
from moe_ft.errors import (
    ConfigError,
    CorruptionError,
    InjectedFaultError,
    LinksEndedError,
    RepairError,
    SnapshotError,
)
from moe_ft.faults import Section
from moe_ft.loop.listeners import LoopState
from moe_ft.recovery.failures import failure_of
from moe_ft.verdicts import Failure
from tests.unit.fault_tolerance.repair.members import Watched

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2")


class Rank(Watched):
    """Rank 0 of two in an iteration, that can be replaced."""

    def __init__(self) -> None:
        super().__init__(2)
        self.link.arm()
        self.loop = LoopState(iteration=4, section=Section.ITERATION, is_in_iteration=True)
        self.told: list[Failure] = []
        self.own = OwnErrors(self.member, self.links, self.loop, self._tell, lambda _: True)

    def _tell(self, failure: Failure, error: Exception) -> None:
        self.told.append(failure)
        os.write(2, f"{failure.kind}: {failure.what}".encode())

    def ends(self, error: BaseException) -> bool:
        """Return whether the exception ends a process."""
        pid = os.fork()
        if pid == 0:
            try:
                self.own.end_if_own(error)
            finally:
                os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a mistake"), "code"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "code"),
        (InjectedFaultError("--moe-ft-inject-fault exception:0@4"), "code"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            "out of memory",
        ),
        (MemoryError(), "out of memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "device"),
    ],
)
def test_exception_of_one_rank_ends_its_process_at_once(
    error: Exception, kind: str, rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not may_be_of_others(error)
    assert rank.ends(error)
    assert capfd.readouterr().err.startswith(f"{kind}: {type(error).__name__}")
    assert rank.link.is_armed


@pytest.mark.parametrize(
    "error",
    [GLOO, LinksEndedError("ended"), SnapshotError("a peer"), RuntimeError("NCCL error: remote")],
)
def test_exceptions_that_a_death_may_cause_wait_for_its_news(error: Exception, rank: Rank) -> None:
    assert may_be_of_others(error)
    assert not rank.ends(error)


@pytest.mark.parametrize(
    "error",
    [
        *(ConfigError("a flag"), RepairError("no state"), CorruptionError("a bit"), SystemExit(1)),
        RuntimeError("Unexpected result nan (message='found NaN in local forward loss')"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_refusals_and_results_of_checks_end_no_process(error: BaseException, rank: Rank) -> None:
    assert not rank.ends(error)


def _lose_the_other(rank: Rank) -> None:
    Rounds(rank.store, 1, 2).join_for_dead(Entry(rank=1, died_s=5.0))


def _end_links(rank: Rank) -> None:
    rank.links.end(0)


def _disarm(rank: Rank) -> None:
    rank.link.disarm()


def _recover(rank: Rank) -> None:
    rank.loop.section = Section.SETUP


def _save(rank: Rank) -> None:
    rank.loop.section = Section.CHECKPOINT


@pytest.mark.parametrize("act", [_lose_the_other, _end_links, _disarm, _recover, _save])
def test_rank_lives_on_where_a_death_may_explain_it_or_nothing_would_replace_it(
    act: Callable[[Rank], None], rank: Rank
) -> None:
    act(rank)
    assert not rank.ends(ValueError("a mistake"))


def test_exception_outside_of_an_iteration_leaves_no_batch_out(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.loop.section, rank.loop.is_in_iteration = Section.EVALUATION, False
    error = ValueError("a mistake")
    before = failure_of(error, rank=0, iteration=4)
    rank.member.notes.answer(before, lambda: True)
    with pytest.raises(ValueError, match="a mistake"):
        rank.own.end_if_own(error)
    assert not rank.link.is_armed
    assert "has raised ValueError: a mistake again in iteration 4" in capsys.readouterr().err
    assert rank.member.notes.left_out() == []


def test_batches_that_the_run_has_left_out_count_without_those_of_the_flag(
    loop_args: Namespace,
) -> None:
    loop_args.iterations_to_skip, loop_args.skipped_train_samples = [3, 9], 0
    assert num_batches_left_out(loop_args, 5) == 0
    loop_args.skipped_train_samples = 2 * loop_args.global_batch_size
    assert num_batches_left_out(loop_args, 5) == 1
