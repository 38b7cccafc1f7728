"""Agreement of all ranks, by one small reduction per iteration, and sums over the ranks of a stage.

A reduction begins before the optimizer step and is read at the end of train_step. The step's own collectives
bring the ranks together in between, so nobody waits for long. The groups run gloo on the CPU and serve
nothing else. The votes, and the way out when ranks can no longer agree, are in engine/decisions.py.

gloo connects each rank of a group to all others of it, and an all-reduce takes a step for each of them. Many
ranks therefore agree in levels (planning/levels.py): a value goes up from leader to leader, and the result
comes down. It needs all ranks, as that of one group does.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from msgspec.msgpack import Decoder

from moe_ft.engine import exchange
from moe_ft.engine.background import ThreadWorker
from moe_ft.errors import SnapshotError
from moe_ft.planning.levels import divide, plan_levels

# The norm of the gradients has just brought the ranks together: the slowest one answers soon.
_ANSWER_S = 120.0
_PENDING_S = 1.0  # for a thread that has little time
_PENDING_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    """A group that this rank is in. It leads all but its last one.

    Attributes:
        members: ranks of the group; the first one leads it.
        is_top: whether what the group knows is the result.
    """

    group: Any
    members: tuple[int, ...]
    is_top: bool


class _Parts:
    """Works of torch, or futures, as one work."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._parts)

    def wait(self, timeout: timedelta) -> None:
        for each in self._parts:
            each.wait(timeout)


class _Passed:
    """Work of a worker, in the form of a work of torch."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: timedelta) -> None:
        self._future.result(timeout.total_seconds())


class _Reduction:
    """Reductions of integers over groups of their own, one at a time. Owned by the training thread.

    The worker of a rank that leads a group passes values on between the levels.
    """

    def __init__(self, op: Any, timeout_s: float) -> None:
        self._op = op
        self._timeout = timedelta(seconds=timeout_s)
        # Shorter than what ends the job: a rank that does not answer costs checkpoints, not the run.
        self._answer = timedelta(seconds=min(_ANSWER_S, timeout_s / 2))
        self._levels: list[_Level] = []  # from the lowest
        self._values: torch.Tensor | None = None
        self._work: Any = None
        self._worker: ThreadWorker | None = None
        self._has_left = False
        self._leaving: list[threading.Thread] = []

    @property
    def is_under_way(self) -> bool:
        """True if a reduction was begun and its result was not read."""
        return self._values is not None

    def _join(self, ranks: Sequence[int], own: int) -> None:
        """Make the groups of some ranks. Called by all ranks of the job, as torch wants it."""
        levels = plan_levels(ranks)
        for level in levels:
            for members in level:
                group = dist.new_group(members, backend="gloo", timeout=self._timeout)
                if own in members:
                    self._levels.append(
                        _Level(group=group, members=members, is_top=level is levels[-1])
                    )
        if len(self._levels) > 1:
            self._worker = ThreadWorker("agreement")
            self._worker.start()

    def _begin(self, values: torch.Tensor) -> None:
        assert self._values is None and not self._has_left
        self._values = values
        if not self._levels:
            return
        lowest = self._levels[0]
        reducing = self._reduce(lowest, values)
        if len(self._levels) > 1:
            assert self._worker is not None
            self._work = _Passed(self._worker.submit(partial(self._pass_on, values, reducing)))
        elif lowest.is_top:
            self._work = reducing
        else:
            self._values = torch.empty_like(values)
            self._work = _Parts(reducing, self._spread(lowest, self._values))

    def _reduce(self, level: _Level, values: torch.Tensor) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = self._op, self._answer
        return level.group.allreduce([values], options)

    def _spread(self, level: _Level, values: torch.Tensor) -> Any:
        """Begin to send the leader's values to the others of its group."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._answer
        return level.group.broadcast([values], options)

    def _pass_on(self, values: torch.Tensor, reducing: Any) -> None:
        """Take values up from the lowest level, and the result down to it. Runs on the worker.

        A level is not held while another one is waited for: whoever leaves lets go of all of them at once.
        """
        reducing.wait(self._answer)
        num_levels = len(self._levels)
        for number in range(1, num_levels):
            self._reduce(self._level(number), values).wait(self._answer)
        first_down = num_levels - 1 - self._level(num_levels - 1).is_top
        for number in range(first_down, -1, -1):
            self._spread(self._level(number), values).wait(self._answer)

    def _level(self, number: int) -> _Level:
        levels = self._levels
        if self._has_left or number >= len(levels):
            raise SnapshotError("this rank has left the agreement")
        return levels[number]

    def _result(self) -> torch.Tensor:
        assert self._values is not None
        if self._work is not None:
            # Each step of the way has its own limit; this is for a worker that hangs.
            self._work.wait(self._answer * max(1, 2 * len(self._levels) - 1))
        values, self._values, self._work = self._values, None, None
        return values

    def gather[Value](self, value: Value, decoder: Decoder[Value]) -> list[Value]:
        """Return the values of all ranks, ascending. Setup and recovery only; called by all of them."""
        contents = self._send_down(exchange.encode(self._bring_up(exchange.encode(value))))
        return [
            exchange.decode(each, decoder) for each in exchange.decode(contents, exchange.CONTENTS)
        ]

    def _bring_up(self, content: bytes) -> list[bytes] | None:
        """Return the contents of all ranks on the first one, ascending, and None on others."""
        assert not self._has_left
        contents = [content]
        for level in self._levels:
            parts = exchange.gather(level.group, exchange.encode(contents))
            if parts is None:
                return None
            contents = [each for part in parts for each in exchange.decode(part, exchange.CONTENTS)]
        return contents

    def _send_down(self, content: bytes) -> bytes:
        """Return the first rank's content. Called by all ranks."""
        for level in reversed(self._levels):
            content = exchange.scatter(level.group, [content] * len(level.members))
        return content

    def close(self) -> None:
        """Close the connections at the end of a start. Not collective.

        Closing waits for an all-reduce that is under way, so such groups are left to the end of the process.
        After `leave` this waits for its threads: a process that ends meanwhile would abort.
        """
        levels, self._levels = self._levels, []
        self._has_left = True
        if self._worker is not None:
            self._worker.close(self._answer.total_seconds() if self._work is None else 0.0)
        for thread in self._leaving:
            thread.join(self._answer.total_seconds())
        if self._work is None:
            for level in levels:
                with suppress(ValueError):  # Megatron may have destroyed all groups on its way out
                    dist.destroy_process_group(level.group)

    def leave(self) -> None:
        """Take no further part: close the connections, so that the others need not wait for this rank.

        Each of them fails at once in the reduction that is under way, or in the next one. Not collective.
        """
        self._has_left = True
        boxes = [[level.group] for level in self._levels]
        self._levels = []
        self._values = self._work = None
        for box in boxes:
            with suppress(Exception):  # broken in whatever way: without references it closes itself
                dist.destroy_process_group(box[0])
            # The last reference waits for what is under way, until its deadline: on a thread of its own.
            thread = threading.Thread(target=box.clear, name="moe_ft-leave", daemon=True)
            self._leaving.append(thread)
            thread.start()


class Agreement(_Reduction):
    """Element-wise minimum over all ranks."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(dist.ReduceOp.MIN, timeout_s)

    def start(self) -> None:
        """Make the groups. Called by all ranks."""
        if dist.is_initialized():
            self._join(range(dist.get_world_size()), dist.get_rank())

    def begin(self, values: Sequence[int]) -> None:
        """Put in this rank's values, equally many on all ranks; raises RuntimeError if one has left."""
        self._begin(torch.tensor(values, dtype=torch.int64))

    def result(self) -> list[int]:
        """Return the least values over all ranks; raises RuntimeError if a rank does not answer in time."""
        return list(self._result().tolist())

    def broadcast[Value](self, value: Value, decoder: Decoder[Value]) -> Value:
        """Return rank 0's value. Setup and recovery only; called by all ranks."""
        return exchange.decode(self._send_down(exchange.encode(value)), decoder)

    def collect[Value](self, value: Value, decoder: Decoder[Value]) -> list[Value] | None:
        """Return the values of all ranks on rank 0, ascending, and None on others; see `broadcast`."""
        contents = self._bring_up(exchange.encode(value))
        if contents is None:
            return None
        return [exchange.decode(each, decoder) for each in contents]

    def fold[Value](
        self, value: Value, merge: Callable[[Sequence[Value]], Value], decoder: Decoder[Value]
    ) -> Value:
        """Return what the values of all ranks make together; leaders merge those of their groups.

        Setup and recovery only; called by all ranks.

        Args:
            merge: takes values in the order of their ranks, and must not fail.
        """
        assert not self._has_left
        for level in self._levels:
            parts = exchange.gather(level.group, exchange.encode(value))
            if parts is None:
                break
            value = merge([exchange.decode(each, decoder) for each in parts])
        return self.broadcast(value, decoder)

    def hand_out[Value](self, contents: Sequence[bytes], decoder: Decoder[Value]) -> Value:
        """Return this rank's value of those that rank 0 gives, ``[rank]``, encoded; see `collect`."""
        assert not self._has_left
        parts = dict(enumerate(contents))
        for level in reversed(self._levels):
            given = map(exchange.encode, divide(parts, level.members))
            parts = exchange.decode(exchange.scatter(level.group, [*given]), exchange.BY_RANK)
        (content,) = parts.values()
        return exchange.decode(content, decoder)

    def barrier(self) -> None:
        """Wait for all ranks; raises RuntimeError if one does not come in time."""
        assert not self._has_left
        below = [level for level in self._levels if not level.is_top]
        for level in (*self._levels, *reversed(below)):
            dist.monitored_barrier(group=level.group, timeout=self._timeout)


class StageSum(_Reduction):
    """Adds up counts over the ranks of each stage."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(dist.ReduceOp.SUM, timeout_s)

    def start(self, stages: Sequence[int], rank: int) -> None:
        """Make the groups from the ``[rank]`` stages of all ranks. Called by all ranks."""
        if dist.is_initialized():
            for stage in sorted(set(stages)):
                self._join([each for each, other in enumerate(stages) if other == stage], rank)

    def begin(self, counts: torch.Tensor) -> None:
        """Put in counts, equally often on all ranks of a stage; raises RuntimeError if one has left."""
        self._begin(counts.to("cpu", copy=True))

    def result(self) -> npt.NDArray[np.int64]:
        """Return the sums over the stage; raises RuntimeError if a rank does not answer in time."""
        sums: npt.NDArray[np.int64] = self._result().numpy()
        return sums

    def pending(self) -> Callable[[], npt.NDArray[np.int64] | None]:
        """Return what returns the sums that are under way, None if there are none.

        Any thread may call it. It waits for a moment, and raises SnapshotError if they are not known then.
        """
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
                work.wait(timedelta(seconds=_PENDING_S))  # raises if it has failed
            found: npt.NDArray[np.int64] = values.numpy()
            return found

        return sums
