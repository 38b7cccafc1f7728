"""Exceptions of this rank alone, such as a bad sample: its process ends, and is replaced like a dead one.

A fresh process has a device that works. The others learn of a death, and nothing of the exception. If the
replacement raises the same one in the same iteration, the exception would come again: all ranks end, or leave
that iteration out (--moe-ft-skip-bad-batches). Not here: whether an exception comes from the death of another
rank, once that may be so (watcher.py); how an iteration is left out (catch_up.py).
"""

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.seams.uneven_batches import samples_of_iteration
from moe_ft.cluster.failures import Consequence
from moe_ft.cluster.member import Member
from moe_ft.errors import InjectedFaultError, MoeFtError, SnapshotError
from moe_ft.faults import Section
from moe_ft.loop.hangs import LAST_WORDS_S
from moe_ft.loop.listeners import LoopState
from moe_ft.processes import exit_within
from moe_ft.recovery.failures import failure_of, is_rejected
from moe_ft.saying import warn
from moe_ft.verdicts import Failure, FailureKind

# Words of gloo, NCCL and torch.distributed when a rank is gone, or its store.
_OF_OTHERS = re.compile(
    r"gloo|nccl|peer|connection|socket|timed? ?out|\bstore\b|process ?group", re.IGNORECASE
)
_REPAIRED_IN = (Section.ITERATION, Section.BETWEEN, Section.EVALUATION)

Report = Callable[[Failure, Exception], None]


class OwnErrors:
    """Decides what an exception of the training thread does to its process. Owned by that thread."""

    def __init__(
        self,
        member: Member,
        links: Links,
        loop: LoopState,
        report: Report,
        may_leave_out: Callable[[int], bool] = lambda iteration: False,
    ) -> None:
        """Have none.

        Args:
            report: tells people of an exception for which this process ends.
            may_leave_out: returns whether the run may leave out one iteration more, the given one.
        """
        self._member = member
        self._links = links
        self._loop = loop
        self._report = report
        self._has_room = may_leave_out

    def _may_leave_out(self, iteration: int) -> bool:
        return self._loop.is_in_iteration and self._has_room(iteration)

    def end_if_own(self, error: BaseException) -> None:
        """End this process if only this rank can have raised the exception, and another one can help.

        Returns if it may come from another rank, or this one cannot be replaced.

        Raises:
            BaseException: this one, without an armed link, if it would come again.
        """
        if not isinstance(error, Exception) or not self._is_repaired(error):
            return
        member = self._member
        if not self._links.is_open or member.rounds.is_declared(member.round + 1):
            return  # what this rank has computed may lack what a dead one has not sent
        iteration, section = self._loop.iteration, self._loop.section.value
        failure = failure_of(error, rank=member.rank, iteration=iteration, section=section)
        if failure.kind is FailureKind.NETWORK:
            return
        answer = member.notes.answer(failure, partial(self._may_leave_out, iteration))
        if answer is Consequence.END:
            warn(
                f"rank {member.rank} has raised {failure.what} again in iteration {failure.iteration}, for "
                "which it was replaced: it is not replaced another time"
            )
            member.link.disarm()
            raise error
        exit_within(LAST_WORDS_S)  # standard error may take nothing more
        self._report(failure, error)
        sys.stdout.flush()
        os._exit(1)

    def tell_of_device(self, reason: str) -> None:
        """Report an error of the device, for which this process ends: the law counts them."""
        iteration, section = self._loop.iteration, self._loop.section.value
        self._member.report_failure(
            Failure(
                rank=self._member.rank,
                kind=FailureKind.DEVICE,
                what=reason,
                iteration=iteration,
                section=section,
            )
        )

    def _is_repaired(self, error: Exception) -> bool:
        is_ours = isinstance(error, MoeFtError) and not isinstance(error, InjectedFaultError)
        is_other = is_ours or is_rejected(error)
        return self._member.link.is_armed and self._loop.section in _REPAIRED_IN and not is_other


def may_be_of_others(error: BaseException) -> bool:
    """Return whether an exception may come from another rank's death: the news of that may be on their way.

    torch.distributed and its backends raise such ones, and threads of the engine.
    """
    if isinstance(error, MoeFtError):
        return isinstance(error, RuntimeError | SnapshotError)
    is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
    return is_of_torch and _OF_OTHERS.search(str(error)) is not None


def num_batches_left_out(args: Any, iteration: int) -> int:
    """Return how many iterations before one the run has left out that --iterations-to-skip does not name.

    The state counts samples that were left out; where batches grow, this is too low.
    """
    num_asked = sum(bool(each <= iteration) for each in args.iterations_to_skip)
    return max(0, int(args.skipped_train_samples) // samples_of_iteration(args) - num_asked)
