"""Transports of process groups: how backends of one kind are made, and how those of a round end.

gloo.py and nccl.py are the two; links.py ends what they have made, groups.py has them make it again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place of this rank in a group.

    Attributes:
        store: of the group in this round.
        rank: in the group.
        ranks: ``[rank in the group]`` the rank in the job.
        name: of the group.
    """

    store: Any
    rank: int
    ranks: tuple[int, ...]
    name: str


Maker = Callable[[Place, Any, timedelta], Any]
Made = Mapping[Any, Any]


class Transport(Protocol):
    """Backends of one kind. Owned by the training thread, but for `end` and `failure`.

    Links calls `end`, `begin` and `failure` one at a time.

    Attributes:
        name: of the kind in torch.
        fails_silently: whether the device runs on after an end, without an exception, on what it had not
            received.
    """

    name: str
    fails_silently: bool

    def maker(self) -> Maker:
        """Return what makes the backends of a round: of a place, the options of the group, and a timeout."""

    def mark(self) -> Any:
        """Return what `made_since` needs in order to know what exists now."""

    def made_since(self, mark: Any) -> Made:
        """Return what can be ended, and was made since."""

    def end(self, made: Made) -> int:
        """Free all threads and kernels that wait for these. Any thread.

        Returns:
            Their number.
        """

    def begin(self) -> None:
        """Let go of the round before, which all ranks have left."""

    def failure(self, made: Made) -> str:
        """Return why one of these has failed without an exception; empty if none has. Any thread."""

    def settle(self) -> None:
        """Wait until the results of this iteration are there."""

    def leave(self) -> None:
        """Leave what an exception has broken off, when `end` has freed everything."""
