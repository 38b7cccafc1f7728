"""Agreement of all ranks, by one small all-reduce per iteration, and sums over the ranks of a stage.

An all-reduce begins before the optimizer step and is read at the end of train_step. The step's own
collectives bring the ranks together in between, so nobody waits for long. The groups run gloo on the CPU and
serve nothing else. The votes, and the way out when ranks can no longer agree, are in engine/decisions.py.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from moe_ft.errors import SnapshotError

# The norm of the gradients has just brought the ranks together: the slowest one answers soon.
_ANSWER_S = 120.0
_PENDING_S = 1.0  # for a thread that has little time
_PENDING_POLL_S = 0.01


class Reduction[Given, Found](Protocol):
    """One value of each rank in, one for all of them out."""

    @property
    def is_under_way(self) -> bool:
        """True if a value was put in and the result was not read."""

    def begin(self, values: Given) -> None:
        """Put in this rank's value."""

    def result(self) -> Found:
        """Return the value of all of them."""

    def leave(self) -> None:
        """Take no further part."""


Minimum = Reduction[Sequence[int], list[int]]


class Sum(Reduction[torch.Tensor, npt.NDArray[np.int64]], Protocol):
    """Sums of counts."""

    def pending(self) -> Callable[[], npt.NDArray[np.int64] | None]:
        """Return what returns the sums that are under way, None if there are none.

        Any thread may call it. It waits for a moment, and raises SnapshotError if they are not known then.
        """


class _Reduction:
    """All-reduces of integers over a group of its own, one at a time. Owned by the training thread."""

    def __init__(self, op: Any, timeout_s: float) -> None:
        self._op, self._timeout = op, timedelta(seconds=timeout_s)
        # Shorter than what ends the job: a rank that does not answer costs checkpoints, not the run.
        self._answer = timedelta(seconds=min(_ANSWER_S, timeout_s / 2))
        self._group: Any = None
        self._values: torch.Tensor | None = None
        self._work: Any = None
        self._has_left = False
        self._leaving: threading.Thread | None = None

    @property
    def is_under_way(self) -> bool:
        """True if an all-reduce was begun and its result was not read."""
        return self._values is not None

    def _begin(self, values: torch.Tensor) -> None:
        assert self._values is None and not self._has_left
        self._values = values
        if self._group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp, options.timeout = self._op, self._answer
            self._work = self._group.allreduce([values], options)

    def _result(self) -> torch.Tensor:
        assert self._values is not None
        if self._work is not None:
            self._work.wait(self._answer)
        values, self._values, self._work = self._values, None, None
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the group. Setup and recovery only; called by all of them."""
        assert not self._has_left
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Close the connections at the end of a start. Not collective.

        Closing waits for an all-reduce that is under way, so such a group is left to the end of the process.
        After `leave` this waits for its thread: a process that ends meanwhile would abort.
        """
        group, self._group = self._group, None
        self._has_left = True
        if self._leaving is not None:
            self._leaving.join(self._answer.total_seconds())
        if group is not None and self._work is None:
            with suppress(ValueError):  # Megatron may have destroyed all groups on its way out
                dist.destroy_process_group(group)

    def leave(self) -> None:
        """Take no further part: close the connections, so that the others need not wait for this rank.

        Each of them fails at once in the all-reduce that is under way, or in the next one. Not collective.
        """
        self._has_left = True
        groups, self._group = [self._group], None
        self._values = self._work = None
        if groups[0] is None:
            return
        with suppress(Exception):  # broken in whatever way: without references it closes itself
            dist.destroy_process_group(groups[0])
        # The last reference waits for what is under way, until its deadline: on a thread of its own.
        self._leaving = threading.Thread(target=groups.clear, name="moe_ft-leave", daemon=True)
        self._leaving.start()


class Agreement(_Reduction):
    """Element-wise minimum over all ranks."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(dist.ReduceOp.MIN, timeout_s)

    def start(self) -> None:
        """Make the group. Called by all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def begin(self, values: Sequence[int]) -> None:
        """Put in this rank's values, equally many on all ranks; raises RuntimeError if one has left."""
        self._begin(torch.tensor(values, dtype=torch.int64))

    def result(self) -> list[int]:
        """Return the least values over all ranks; raises RuntimeError if a rank does not answer in time."""
        return list(self._result().tolist())

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value. Setup and recovery only; called by all ranks."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks; raises RuntimeError if one does not come in time."""
        assert not self._has_left
        if self._group is not None:
            dist.monitored_barrier(group=self._group, timeout=self._timeout)


class StageSum(_Reduction):
    """Adds up counts over the ranks of each stage."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(dist.ReduceOp.SUM, timeout_s)

    def start(self, stages: Sequence[int], rank: int) -> None:
        """Make the groups from the ``[rank]`` stages of all ranks. Called by all ranks."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for stage in sorted(set(stages)):
            members = [member for member, other in enumerate(stages) if other == stage]
            if len(members) > 1:
                group = dist.new_group(members, backend="gloo", timeout=self._timeout)
                self._group = group if rank in members else self._group

    def begin(self, counts: torch.Tensor) -> None:
        """Put in counts, equally often on all ranks of a stage; raises RuntimeError if one has left."""
        self._begin(counts.to("cpu", copy=True))

    def result(self) -> npt.NDArray[np.int64]:
        """Return the sums over the stage; raises RuntimeError if a rank does not answer in time."""
        sums: npt.NDArray[np.int64] = self._result().numpy()
        return sums

    def pending(self) -> Callable[[], npt.NDArray[np.int64] | None]:
        """Return what returns the sums, once they are known; see `Sum.pending`."""
        values, work = self._values, self._work

        def sums() -> npt.NDArray[np.int64] | None:
            if values is None:
                return None
            if work is not None:
                deadline_s = time.monotonic() + _PENDING_S
                while not work.is_completed():
                    if time.monotonic() > deadline_s:
                        raise SnapshotError("the tokens of the iteration are not added up")
                    time.sleep(_PENDING_POLL_S)
                work.wait()  # raises if it has failed
            found: npt.NDArray[np.int64] = values.numpy()
            return found

        return sums
