"""What all ranks must know together, decided by one small all-reduce per iteration, and sums over a stage.

Started before the optimizer step and read at the end of train_step: the step's own collectives have brought
the ranks together in between, so that nobody waits for long. The group is gloo on the CPU and of this purpose
only.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist


class Agreement:
    """Element-wise minimum over all ranks. Owned by the training thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._values: torch.Tensor | None = None
        self._work: Any = None

    def start(self) -> None:
        """Make the group. Called by all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def begin(self, values: Sequence[int]) -> None:
        """Put in this rank's values. Called once per iteration by all ranks, with equally many values."""
        assert self._values is None
        self._values = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            self._work = dist.all_reduce(
                self._values, op=dist.ReduceOp.MIN, group=self._group, async_op=True
            )

    @property
    def is_under_way(self) -> bool:
        """Whether `begin` was called and `result` was not."""
        return self._values is not None

    def result(self) -> list[int]:
        """Return the least values over all ranks; raises RuntimeError if a rank does not answer."""
        assert self._values is not None
        if self._work is not None:
            self._work.wait()
        values = [int(value) for value in self._values]
        self._values = self._work = None
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Setup and recovery only; called by all ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value. Setup and recovery only; called by all ranks."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks; raises RuntimeError if one does not come in time."""
        if self._group is not None:
            dist.monitored_barrier(group=self._group, timeout=self._timeout)


class StageSum:
    """Adds up counts over the ranks of each stage. Owned by the training thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._values: torch.Tensor | None = None
        self._work: Any = None

    def start(self, stages: Sequence[int], rank: int) -> None:
        """Make the groups. Called by all ranks.

        Args:
            stages: ``[rank]`` the stage of each rank.
            rank: this one.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for stage in sorted(set(stages)):
            members = [member for member, other in enumerate(stages) if other == stage]
            group = dist.new_group(members, backend="gloo", timeout=self._timeout)
            if rank in members and len(members) > 1:
                self._group = group

    def begin(self, counts: torch.Tensor) -> None:
        """Put in this rank's counts. Called equally often by all ranks of a stage."""
        assert self._values is None
        self._values = counts.to("cpu", copy=True)
        if self._group is not None:
            self._work = dist.all_reduce(self._values, group=self._group, async_op=True)

    @property
    def is_under_way(self) -> bool:
        """Whether `begin` was called and `result` was not."""
        return self._values is not None

    def result(self) -> npt.NDArray[np.int64]:
        """Return the sums over the stage; raises RuntimeError if a rank does not answer."""
        assert self._values is not None
        if self._work is not None:
            self._work.wait()
        sums: npt.NDArray[np.int64] = self._values.numpy()
        self._values = self._work = None
        return sums

    def gather(self, value: Any) -> list[Any]:
        """Return the values of the stage's ranks. Recovery only; called by all ranks of a stage."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values
