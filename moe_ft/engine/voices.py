"""Agreement of a job some of whose ranks are dead: live processes speak for them, as their deputies.

A process has a voice for its own rank and for each dead one for which it speaks. What all ranks of a job
call, each voice calls on a thread of its own, in the same order; the thread of the own rank puts the values
together and communicates, while the others wait for the answer. Engine and recovery therefore see a job of
all its ranks, of which none is missing.
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


class Voices:
    """All voices of one process, while a set of ranks is dead.

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
        """Be the voices of a process.

        Args:
            speakers: by rank of the job, the live one that speaks for it; each live one for itself.
            own: the rank of this process.
            limit_s: for which one voice waits for another.
        """
        self.own = own
        self.make_group = make_group
        self._limit_s = limit_s
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
        """Return what the own rank's `act` makes of the values of all voices, ascending. Called by each.

        Raises:
            RuntimeError: if another voice has failed or left, or does not answer in time.
            Exception: what `act` raises, on all voices.
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
                except Exception as error:  # raised for all voices below
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
                f"a voice of rank {self.own} does not answer: it speaks for ranks {list(self.ranks)}"
            ) from self._end

    def leave(self, error: Exception | None = None) -> None:
        """Take no further part by any voice: who waits for this one fails at once."""
        with self._changed:
            self._end = self._end or error or RuntimeError("a voice has left the agreement")
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Voice:
    """The voice of one rank in a process."""

    voices: Voices
    rank: int

    def exchange(self, value: Any, act: Callable[[dict[int, Any]], Any]) -> Any:
        """Return what the own rank makes of the values of all voices; see `Voices.exchange`."""
        return self.voices.exchange(self.rank, value, act)


class _Voiced:
    """Exchanges of a reduction by a voice, whatever it adds up."""

    _voice: Voice
    _processes: Any  # an Agreement, or a StageSum

    def _bring_up(self, content: bytes) -> list[bytes] | None:
        parts = self._voice.exchange(
            content, lambda given: self._processes._bring_up(exchange.encode(given))
        )
        if parts is None or self._voice.rank != self._voice.voices.ranks[0]:
            return None
        found = [exchange.decode(part, exchange.BY_RANK) for part in parts]
        everyone = {rank: each for part in found for rank, each in part.items()}
        return [everyone[rank] for rank in sorted(everyone)]

    def _send_down(self, content: bytes) -> bytes:
        first = self._voice.voices.ranks[0]
        found: bytes = self._voice.exchange(
            content, lambda given: self._processes._send_down(given[first])
        )
        return found

    def close(self) -> None:
        self._processes.close()

    def leave(self) -> None:
        self._voice.voices.leave()
        self._processes.leave()


class VoicedAgreement(_Voiced, Agreement):
    """Agreement of all ranks of a job, dead ones included. That of the own rank communicates."""

    def __init__(self, timeout_s: float, voice: Voice) -> None:
        super().__init__(timeout_s)
        self._voice = voice
        self._processes = Agreement(timeout_s)
        self._has_begun = False

    @property
    @override
    def is_under_way(self) -> bool:
        return self._has_begun

    @override
    def start(self) -> None:
        voices = self._voice.voices
        self._voice.exchange(
            None, lambda _: self._processes._join(voices.live, voices.own, voices.make_group)
        )

    @override
    def begin(self, values: Sequence[int]) -> None:
        self._has_begun = True
        self._voice.exchange(
            values,
            lambda given: self._processes.begin([*map(min, zip(*given.values(), strict=True))]),
        )

    @override
    def result(self) -> list[int]:
        self._has_begun = False
        found: list[int] = self._voice.exchange(None, lambda _: self._processes.result())
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
        return exchange.decode(everyone[self._voice.rank], decoder)

    @override
    def barrier(self) -> None:
        self._voice.exchange(None, lambda _: self._processes.barrier())

    @override
    def once(self, act: Callable[[], None]) -> None:
        self._voice.exchange(None, lambda _: act())


class VoicedStageSum(_Voiced, StageSum):
    """Ranks of a stage, dead ones included: their deputies are of the same stage.

    Nothing is counted: only strategies that save everything work without ranks.
    """

    def __init__(self, timeout_s: float, voice: Voice) -> None:
        super().__init__(timeout_s)
        self._voice = voice
        self._processes = StageSum(timeout_s)

    @override
    def start(self, stages: Sequence[int], rank: int) -> None:
        voices = self._voice.voices

        def join(_: Any) -> None:
            for stage in sorted(set(stages)):
                live = [each for each in voices.live if stages[each] == stage]
                self._processes._join(live, voices.own, voices.make_group)

        self._voice.exchange(None, join)
