"""Links of the process groups of one round, which end together when a rank has died.

The transports know them: connections of gloo (gloo.py), communicators of NCCL (nccl.py).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from moe_ft.cluster.member import Member
from moe_ft.errors import LinksEndedError


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendPlace:
    """Place of this rank in a group, whose store is new in each round."""

    store: Any
    rank: int  # in the group
    ranks: tuple[int, ...]  # [rank in the group] the rank in the job
    name: str  # of the group


Maker = Callable[[BackendPlace, Any, timedelta], Any]


class GroupTransport(ABC):
    """Backends of one kind. Owned by the training thread, but for `end` and `failure`.

    Links calls `end`, `begin` and `failure` one at a time.

    Attributes:
        name: of the kind in torch.
    """

    name: str

    @abstractmethod
    def maker(self) -> Maker:
        """Return what makes the backends of a round: of a place, the options of the group, and a timeout."""

    @abstractmethod
    def mark(self) -> Any:
        """Return what `made_since` needs in order to know what exists now."""

    @abstractmethod
    def made_since(self, mark: Any) -> Mapping[Any, Any]:
        """Return what can be ended, and was made since."""

    @abstractmethod
    def end(self, made: Any) -> int:
        """Free all threads and kernels that wait for these, and return their number. Any thread."""

    def begin(self) -> None:
        """Let go of the round before, which all ranks have left."""
        return

    def failure(self, made: Any) -> str:
        """Return why one of these has failed without an exception; empty if none has. Any thread."""
        return ""

    def settle(self) -> None:
        """Wait until the results of this iteration are there."""
        return

    def leave(self) -> None:
        """Leave what an exception has broken off, when `end` has freed everything."""
        return


class Links:
    """The links of the present round. Any thread may end them, once, and only those of its round."""

    def __init__(self, member: Member, transports: Sequence[GroupTransport]) -> None:
        """Begin without links; transports whose ends raise in all that waits come first."""
        self._member = member
        self.transports = transports
        self._lock = threading.Lock()
        self._made: list[dict[Any, Any]] = [{} for _ in transports]
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """True until the links have been ended."""
        return self._is_open

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add the links that are made in this context: those of groups.

        They are ended at once if those of the round have been ended meanwhile.
        """
        marks = [each.mark() for each in self.transports]
        yield
        made = [each.made_since(mark) for each, mark in zip(self.transports, marks, strict=True)]
        with self._lock:
            for known, new in zip(self._made, made, strict=True):
                known |= new
            if not self._is_open:
                self._end(made)

    def begin(self) -> None:
        """Begin the present round, without links. All ranks have left the one before."""
        with self._lock:
            for each in self.transports:
                each.begin()
            self._is_open = True
            self._made = [{} for _ in self.transports]

    def end(self, number: int) -> int:
        """End the links of a round, unless they have ended or it is over. Return their number."""
        with self._lock:
            if number != self._member.round or not self._is_open:
                return 0
            self._is_open = False
            return self._end(self._made)

    def _end(self, made: Sequence[Any]) -> int:
        return sum(each.end(own) for each, own in zip(self.transports, made, strict=True))

    def failure(self) -> str:
        """Return why links have failed without an exception; empty if none have. Any thread."""
        with self._lock:
            pairs = zip(self.transports, self._made, strict=True)
            return next(filter(None, (each.failure(own) for each, own in pairs)), "")

    def check(self) -> None:
        """Wait for what this rank is computing. It counts only if the links are still there then.

        Raises:
            LinksEndedError: if they are not: the device may have left a collective without its result.
        """
        for each in self.transports:
            each.settle()
        if not self._is_open:
            raise LinksEndedError(
                "the links of the process groups have ended: what was computed since does not count"
            )

    def leave(self) -> None:
        """Leave what an exception has broken off. The links have ended. Training thread."""
        for each in self.transports:
            each.leave()
