"""Decisions that all ranks take together in each iteration, and the way out when they no longer can.

Each rank votes before the optimizer step; the least of all votes, read at the end of the iteration, is what
all of them act on (engine/engine.py). How votes travel is engine/agreement.py.

A rank that cannot vote, hear the result or act on it leaves for the rest of this start: from then on it
begins no snapshot and frees no region. The others cannot complete the next vote without it, and leave there.
One complete state of all ranks then remains, although some may have heard the last result and others not:

- A window counts as complete when all ranks vote so: each of them has committed it by then.
- A rank that hears this result may fill the region of the window before it. One that does not hear it keeps
  both.
- The complete window itself is overwritten after a newer one is complete, which takes a later vote of all
  ranks. There is none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import Any

import torch

from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import BackgroundPart, EventQueue, describe
from moe_ft.engine.clock import Clock
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.planning.experts import Counts

_REMINDER_S = 300.0
_OFF = (
    "checkpointing is off until the next start, because the ranks cannot decide together any more; the last "
    "complete state stays in memory"
)


class EndVote(IntEnum):
    """Next step at the end of training, ordered so that the least over all ranks is that of the job."""

    GIVE_UP = 0
    WAIT = 1
    TRY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Votes:
    """Votes of a rank, or the least of those of all ranks.

    Each field is one integer in the agreement, a tuple as many as it has. All ranks run the same version and
    have equally long tuples, so a new vote is a new field and nothing else.

    Attributes:
        state: progress of the window under way.
        is_ready: whether there is memory for the next window.
        is_idle: whether nothing is being written to storage.
        can_persist: whether nothing has failed of what was written last.
        is_protected: whether peers have the window.
        can_grow: whether no snapshot of the window has failed.
    """

    state: SnapshotState
    turn: EndVote
    is_ready: bool
    is_idle: bool
    can_persist: bool
    is_protected: bool
    can_grow: bool
    strategy: tuple[int, ...]
    interval: tuple[int, ...]

    def as_numbers(self) -> list[int]:
        """Return all votes; equally many on all ranks."""
        numbers: list[int] = []
        for each in fields(self):
            value = getattr(self, each.name)
            numbers += value if isinstance(value, tuple) else (int(value),)
        return numbers

    def with_numbers(self, numbers: Sequence[int]) -> "Votes":
        """Return votes of the form of these from numbers as `as_numbers` returns them."""
        rest = iter(numbers)
        values: dict[str, Any] = {}
        for each in fields(self):
            own = getattr(self, each.name)
            is_tuple = isinstance(own, tuple)
            values[each.name] = tuple(islice(rest, len(own))) if is_tuple else type(own)(next(rest))
        return Votes(**values)


class Decisions:
    """Owned by the training thread. Nothing here raises: without an answer, checkpointing is off."""

    def __init__(
        self, agreement: Agreement, stage_load: StageSum | None, reports: EventQueue, clock: Clock
    ) -> None:
        """Take what reduces votes over all ranks, and counts over the stage if anything is counted."""
        self._agreement = agreement
        self._stage_load = stage_load
        self._reports = reports
        self._clock = clock
        self._votes: Votes | None = None
        self._reminded_s = 0.0
        self.is_off = False

    @property
    def is_under_way(self) -> bool:
        """True if this rank has voted and not heard the result."""
        return self._agreement.is_under_way

    def begin_count(self, tokens: torch.Tensor | None, iteration: int) -> None:
        """Put in the ``[layer, expert]`` tokens of an iteration. All ranks of a stage do or do not."""
        if not self.is_off and self._stage_load is not None and tokens is not None:
            self.attempt(iteration, partial(self._stage_load.begin, tokens))

    def pending_tokens(self) -> Callable[[], Counts | None]:
        """Return what returns the tokens that were put in and not read; see `StageSum.pending`."""
        if self.is_off or self._stage_load is None:
            return lambda: None
        return self._stage_load.pending()

    def begin(self, votes: Callable[[], Votes], iteration: int) -> None:
        """Vote. Called by all ranks once per iteration."""
        if not self.is_off:
            self.attempt(iteration, partial(self._begin, votes))

    def _begin(self, votes: Callable[[], Votes]) -> None:
        self._votes = votes()
        self._agreement.begin(self._votes.as_numbers())

    def read(self, iteration: int) -> tuple[Votes, Counts | None] | None:
        """Return what was decided, and the stage's tokens if they were counted; None if this is off."""
        if self.is_off:
            self._remind(iteration)
            return None
        return self.attempt(iteration, self._read)

    def _read(self) -> tuple[Votes, Counts | None]:
        assert self._votes is not None
        votes = self._votes.with_numbers(self._agreement.result())
        load = self._stage_load
        return votes, load.result() if load is not None and load.is_under_way else None

    def attempt[Answer](self, iteration: int, act: Callable[[], Answer]) -> Answer | None:
        """Do what the other ranks do in the same way, and return its answer; if it raises, leave."""
        try:
            return act()
        except Exception as error:  # whatever it is, training continues and says so
            self._reminded_s = self._clock.monotonic()
            self.is_off = True
            self._reports.degraded(
                BackgroundPart.AGREEMENT, iteration, f"{_OFF} ({describe(error)})", error
            )
            for group in (self._agreement, self._stage_load):
                if group is not None:
                    group.leave()
            return None

    def _remind(self, iteration: int) -> None:
        if self._clock.monotonic() - self._reminded_s >= _REMINDER_S:
            self._reminded_s = self._clock.monotonic()
            self._reports.degraded(BackgroundPart.AGREEMENT, iteration, _OFF)
