"""Peers that follow a rank by its gradients: when they can, and what they are sent otherwise.

A peer follows if it is known to have exactly the state that the step began with, and keeps that. Anything
else is state: a replica is never made of something that is only likely to be there. What a peer makes
otherwise than the owner is also a check: one of the two computes or keeps wrong bits. links/peers.py sends,
capture.py keeps the gradients, adam.py is the peer's side. No torch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

from moe_ft.engine.background import BackgroundPart, EventQueue
from moe_ft.engine.links.messages import PeerReply
from moe_ft.format.entries import UnitEntry
from moe_ft.format.updates import Update

_MOST_REFUSALS = 3  # one after the other: another kind of CPU would refuse for ever
MOST_LOSSY_STEPS = 100  # that a peer repeats with other rounding before it gets state again


Put = Callable[[Update | None], PeerReply]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """Ranks one of which has computed or kept wrong bits: all of them if it is decided."""

    ranks: tuple[int, ...]
    is_decided: bool
    reason: str


def find_suspects(
    owner: int,
    doubts: Mapping[int, tuple[PeerReply, PeerReply]],
    agreed: Collection[int],
    comparable: Collection[int],
) -> Iterator[Suspicion]:
    """Yield whom one step accuses that did not come out as the owner's at some peers.

    Args:
        doubts: by peer, its answers to the same step, which it was sent twice.
        agreed, comparable: peers that made the owner's bits at once, and that ever did: they round alike.
    """
    steady = {}
    for rank, (first, second) in doubts.items():
        accused = partial(Suspicion, ranks=(rank,), is_decided=True)
        if not second.error:
            yield accused(reason="its second try gave the owner's bits")
        elif second.is_base_damaged:
            yield accused(reason="the replica that it began with has changed in its memory")
        elif second.made == first.made:
            steady[rank] = second.made
        elif second.made:
            yield accused(reason="its two tries gave different bits")
        else:
            reason = "it could not make a second try"
            yield Suspicion(ranks=(owner, rank), is_decided=False, reason=reason)
    if steady:
        yield _decide(owner, steady, agreed, is_comparable={*comparable} >= steady.keys())


def _decide(
    owner: int, steady: Mapping[int, str], agreed: Collection[int], *, is_comparable: bool
) -> Suspicion:
    """Return whom peers accuse that make the same other bits twice, of which checksums are given."""
    ranks: tuple[int, ...] = (owner, *steady)
    if not is_comparable:
        reason = "twice the same other bits, as another kind of CPU also gives them"
        return Suspicion(ranks=ranks, is_decided=False, reason=reason)
    if agreed:
        reason = f"rank {min(agreed)} gives the owner's bits"
        return Suspicion(ranks=tuple(steady), is_decided=True, reason=reason)
    if len(steady) > 1 and len({*steady.values()}) == 1:
        reason = "all its peers give the same other bits"
        return Suspicion(ranks=(owner,), is_decided=True, reason=reason)
    reason = "twice the same other bits, and no further peer that decides"
    return Suspicion(ranks=ranks, is_decided=False, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class LentUpdate:
    """The step that made a snapshot, on loan until it is released. Any thread may release it.

    Attributes:
        update: None if there is none to send.
        gradients: bytes of all gradients.
        is_lent: keeps others from being put there.
        reason: why there is no update.
    """

    update: Update | None
    gradients: memoryview = memoryview(b"")
    is_lent: Event | None = None
    reason: str = ""

    def release(self) -> None:
        """Let other gradients be put there; nobody may read these any longer."""
        if self.is_lent is not None:
            self.is_lent.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Bytes that a peer was sent of a snapshot: as state and as gradients.

    Attributes:
        num_followed: units in slots that it makes of gradients.
        fallback: why it got state where gradients were kept; empty if it did not.
    """

    state_bytes: int
    gradient_bytes: int = 0
    num_followed: int = 0
    fallback: str = ""

    @property
    def num_bytes(self) -> int:
        """All bytes."""
        return self.state_bytes + self.gradient_bytes


def fields_of(sent: Mapping[int, Sent]) -> dict[str, Any]:
    """Return the fields of the event `replicate`, of what each peer was sent."""
    return {
        "bytes": max(each.num_bytes for each in sent.values()),
        "state_bytes": sum(each.state_bytes for each in sent.values()),
        "gradient_bytes": sum(each.gradient_bytes for each in sent.values()),
        "followed": max(each.num_followed for each in sent.values()),
        "fallbacks": {str(rank): each.fallback for rank, each in sent.items() if each.fallback},
    }


def made_slots(lent: LentUpdate | None) -> frozenset[str]:
    """Return the names of the units in slots that a step makes."""
    return frozenset() if lent is None or lent.update is None else frozenset(lent.update.units)


def known_bases(
    known: Mapping[tuple[int, str], tuple[int, str]],
    units: Mapping[tuple[int, str], UnitEntry],
    made: Collection[str],
    iteration: int,
) -> set[int]:
    """Return the iterations of what a step changes, as a peer is known to have it; -1 if it is not.

    Args:
        known: iterations and checksums, by snapshot and name of the unit.
        units: of the replica, likewise.
        made: units in slots that the step makes; one that the replica has not as of its iteration spoils it.
        iteration: of the replica.
    """
    bases = {at for each, (at, _) in known.items() if each not in units or not units[each].file}
    for each in ((-1, name) for name in made):
        is_made = each in units and units[each].iteration == iteration
        bases.add(known[each][0] if is_made and each in known else -1)
    return bases


class Followers:
    """Decides what each peer of a rank is sent. Owned by the sending worker."""

    def __init__(self, reports: EventQueue) -> None:
        self._reports = reports
        self._num_refused: dict[int, int] = {}  # in a row, by rank
        self._num_lossy: dict[int, int] = {}  # since state was sent, by rank
        self._doubts: dict[int, tuple[PeerReply, PeerReply]] = {}  # of this snapshot, by rank
        self._agreed: set[int] = set()  # to this snapshot
        self._comparable: set[int] = set()
        self._accusations: Counter[int] = Counter()

    def send(
        self,
        rank: int,
        lent: LentUpdate | None,
        keep_iteration: int | None,
        known: Collection[int],
        put: Put,
        region_bytes: int,
        slots: Mapping[str, int],
    ) -> Sent:
        """Send a peer the step that made a replica, or the whole of it if that cannot be repeated there.

        Args:
            lent: None where gradients are not kept.
            keep_iteration: what the peer keeps, whatever it is sent.
            known: iterations of the versions that the peer is known to have.
            put: sends either, and returns why the peer wants the whole.
            region_bytes: of the whole.
            slots: bytes of units in slots that are sent as state, but for those that the step makes.
        """
        state_bytes = region_bytes + sum(slots.values())
        if lent is None:
            put(None)
            return Sent(state_bytes=state_bytes)
        update, why = lent.update, self._reason(rank, lent, keep_iteration, known)
        gradient_bytes = 0
        if update is not None and not why:
            gradient_bytes, answer = update.num_bytes, put(update)
            if answer.made and not update.is_lossy:  # again: what it does then tells who is wrong
                first, answer = answer, put(update)
                gradient_bytes += update.num_bytes
                self._doubts[rank] = first, answer
            elif not answer.error and not update.is_lossy and update.num_bytes:
                self._agreed.add(rank)
            why = answer.error
            if not why:
                self._num_refused[rank] = 0
                self._num_lossy[rank] = self._num_lossy.get(rank, 0) + update.is_lossy
                return Sent(
                    state_bytes=sum(slots.values())
                    - sum(slots.get(each, 0) for each in update.units),
                    gradient_bytes=gradient_bytes,
                    num_followed=len(update.units),
                )
            self._note_refusal(rank, update, why)
        put(None)
        self._num_lossy[rank] = 0
        return Sent(state_bytes=state_bytes, gradient_bytes=gradient_bytes, fallback=why)

    def judge(self, owner: int, iteration: int) -> None:
        """Report whom the answers to a snapshot accuse of wrong bits, once all peers have answered."""
        doubts, agreed = self._doubts, self._agreed
        self._doubts = {}
        self._agreed = set()
        self._comparable |= agreed
        for each in find_suspects(owner, doubts, agreed, self._comparable):
            self._accusations.update(each.ranks if each.is_decided else ())
            first = next(
                why
                for rank, (why, _) in doubts.items()
                if rank in each.ranks or owner in each.ranks
            )
            self._reports.add(
                "corruption",
                iteration,
                check="replica",
                ranks=sorted(each.ranks),
                decided=each.is_decided,
                where=first.error.removesuffix(" does not match its checksum"),
                since=iteration - 1,
                reason=each.reason,
                times=max(self._accusations[rank] for rank in each.ranks),
            )

    @property
    def can_follow(self) -> bool:
        """True unless a peer has refused so often that it gets state until the next start."""
        return all(count < _MOST_REFUSALS for count in self._num_refused.values())

    def _reason(
        self, rank: int, lent: LentUpdate, keep_iteration: int | None, known: Collection[int]
    ) -> str:
        """Return why a peer cannot follow; empty if it can."""
        if lent.update is None:
            return lent.reason
        base = lent.update.base_iteration
        if self._num_refused.get(rank, 0) >= _MOST_REFUSALS:
            return "it has refused every update"
        if {*known} != {base}:
            return f"it is not known to have iteration {base}"
        if self._num_lossy.get(rank, 0) >= MOST_LOSSY_STEPS:
            return f"it has repeated {MOST_LOSSY_STEPS} steps that round otherwise"
        if keep_iteration != base:
            return f"it need not keep iteration {base}"
        return ""

    def _note_refusal(self, rank: int, update: Update, why: str) -> None:
        count = self._num_refused[rank] = self._num_refused.get(rank, 0) + 1
        if count == _MOST_REFUSALS:
            self._reports.degraded(
                BackgroundPart.REPLICATE,
                update.base_iteration + 1,
                f"rank {rank} has refused {count} updates in a row and gets state from now on, as its CPU "
                f"may compute other bits: {why}",
            )
