"""Agreement of a job some of whose ranks are dead: live processes speak for them, as their deputies.

A process has a seat for its own rank and for each dead one that it speaks for. What all ranks of a job call,
each seat calls on a thread of its own, in the same order; the thread of the own rank puts the values together
and communicates, while the others wait for the answer. Engine and recovery therefore see a job of all its
ranks, of which none is missing.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, override

from msgspec.msgpack import Decoder

from moe_ft.engine import exchange
from moe_ft.engine.agreement import Agreement, StageSum

# Returns a new group of gloo of some ranks; None for who is not in it. Called by all live ranks.
MakeGroup = Callable[[Sequence[int]], Any]


class Seats:
    """All seats of one process, while a set of ranks is dead.

    Attributes:
        own: the rank of the process.
        speakers: by rank of the job, the live one that speaks for it.
        live: who speaks, in the order of the ranks that they speak for.
        ranks: those that this process speaks for, ascending.
        make_group: see `MakeGroup`.
    """

    def __init__(
        self, speakers: Mapping[int, int], own: int, make_group: MakeGroup, limit_s: float
    ) -> None:
        """Take the seats of a process.

        Args:
            speakers: by rank of the job, the live one that speaks for it; each live one for itself.
            own: the rank of this process.
            limit_s: for which one seat waits for another.
        """
        self.own, self.make_group, self._limit_s = own, make_group, limit_s
        self.speakers = dict(sorted(speakers.items()))
        # Who speaks for rank 0 leads, as rank 0 does in a healthy job.
        self.live = tuple(dict.fromkeys(self.speakers.values()))
        self.ranks = tuple(rank for rank, by in self.speakers.items() if by == own)
        self._changed = threading.Condition()
        self._given: dict[int, Any] = {}
        self._answer: Any = None
        self._error: Exception | None = None
        self._num_meetings = 0
        self._end: Exception | None = None

    def exchange(self, rank: int, value: Any, act: Callable[[dict[int, Any]], Any]) -> Any:
        """Return what the own rank's `act` makes of the values of all seats, ascending; called on each seat.

        Raises:
            RuntimeError: if another seat has failed or left, or does not come in time.
            Exception: what `act` raises, on all seats.
        """
        with self._changed:
            self._given[rank] = value
            self._changed.notify_all()
            number = self._num_meetings
            if rank == self.own:
                self._wait(lambda: len(self._given) == len(self.ranks))
                given, self._given = dict(sorted(self._given.items())), {}
                self._answer = self._error = None
                try:
                    self._answer = act(given)
                except Exception as error:  # raised on all seats below
                    self._error = error
                self._num_meetings += 1
                self._changed.notify_all()
            else:
                self._wait(lambda: self._num_meetings > number)
            if self._error is not None:
                raise self._error
            return self._answer

    def _wait(self, is_met: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: is_met() or self._end is not None, self._limit_s)
        if not is_met():
            raise RuntimeError(
                f"a seat of rank {self.own} does not come: it speaks for ranks {list(self.ranks)}"
            ) from self._end

    def leave(self, error: Exception | None = None) -> None:
        """Take no further part on any seat: who waits for this one fails at once."""
        with self._changed:
            self._end = self._end or error or RuntimeError("a seat has left the agreement")
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Seat:
    """The seat of one rank in a process."""

    seats: Seats
    rank: int

    def exchange(self, value: Any, act: Callable[[dict[int, Any]], Any]) -> Any:
        """Return what the own rank makes of the values of all seats; see `Seats.exchange`."""
        return self.seats.exchange(self.rank, value, act)


class _Seated:
    """Exchanges of a reduction on a seat, whatever it adds up."""

    _seat: Seat
    _processes: Any  # an Agreement, or a StageSum

    def _bring_up(self, content: bytes) -> list[bytes] | None:
        parts = self._seat.exchange(
            content, lambda given: self._processes._bring_up(exchange.encode(given))
        )
        if parts is None or self._seat.rank != self._seat.seats.ranks[0]:
            return None
        found = [exchange.decode(part, exchange.BY_RANK) for part in parts]
        everyone = {rank: each for part in found for rank, each in part.items()}
        return [everyone[rank] for rank in sorted(everyone)]

    def _send_down(self, content: bytes) -> bytes:
        first = self._seat.seats.ranks[0]
        found: bytes = self._seat.exchange(
            content, lambda given: self._processes._send_down(given[first])
        )
        return found

    def close(self) -> None:
        self._processes.close()

    def leave(self) -> None:
        self._seat.seats.leave()
        self._processes.leave()


class SeatedAgreement(_Seated, Agreement):
    """Agreement of all ranks of a job, dead ones included. On the own rank's seat it communicates."""

    def __init__(self, timeout_s: float, seat: Seat) -> None:
        super().__init__(timeout_s)
        self._seat, self._processes = seat, Agreement(timeout_s)
        self._has_begun = False

    @property
    @override
    def is_under_way(self) -> bool:
        return self._has_begun

    @override
    def start(self) -> None:
        seats = self._seat.seats
        self._seat.exchange(
            None, lambda _: self._processes._join(seats.live, seats.own, seats.make_group)
        )

    @override
    def begin(self, values: Sequence[int]) -> None:
        self._has_begun = True
        self._seat.exchange(
            values,
            lambda given: self._processes.begin([*map(min, zip(*given.values(), strict=True))]),
        )

    @override
    def result(self) -> list[int]:
        self._has_begun = False
        found: list[int] = self._seat.exchange(None, lambda _: self._processes.result())
        return found

    @override
    def fold[Value](
        self, value: Value, merge: Callable[[Sequence[Value]], Value], decoder: Decoder[Value]
    ) -> Value:
        return merge(self.gather(value, decoder))

    @override
    def hand_out[Value](self, contents: Sequence[bytes], decoder: Decoder[Value]) -> Value:
        """Return this rank's value; unlike in a healthy job, all processes get all values."""
        everyone = self.broadcast([*contents], exchange.CONTENTS)
        return exchange.decode(everyone[self._seat.rank], decoder)

    @override
    def barrier(self) -> None:
        self._seat.exchange(None, lambda _: self._processes.barrier())

    @override
    def once(self, act: Callable[[], None]) -> None:
        self._seat.exchange(None, lambda _: act())


class SeatedStageSum(_Seated, StageSum):
    """Ranks of a stage, dead ones included: their deputies are of the same stage.

    Nothing is counted: only strategies that save everything work without ranks.
    """

    def __init__(self, timeout_s: float, seat: Seat) -> None:
        super().__init__(timeout_s)
        self._seat, self._processes = seat, StageSum(timeout_s)

    @override
    def start(self, stages: Sequence[int], rank: int) -> None:
        seats = self._seat.seats

        def join(_: Any) -> None:
            for stage in sorted(set(stages)):
                live = [each for each in seats.live if stages[each] == stage]
                self._processes._join(live, seats.own, seats.make_group)

        self._seat.exchange(None, join)
