"""Words between the nodes of a job and their coordinator (nodes.py), and who has which ranks."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.keeper.protocol import say

PERIOD_S = 0.25  # between two beats of a node, and two looks at them
ARRIVED, LEAVING, SAVE, OVER = (f"nodes/{what}" for what in ("arrived", "leaving", "save", "over"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Ranks that a node is to run.

    Attributes:
        round: in which they join; 0 at the start.
        died_s: time since 1970 when their node was heard last; 0 at the start.
        lost_node: that had them before.
        start: for which all ranks end that run for an earlier one; 0 is the first.
        num_nodes: on which ranks of that start are.
    """

    ranks: tuple[int, ...]
    round: int = 0
    died_s: float = 0.0
    lost_node: str = ""
    start: int = 0
    num_nodes: int = 0


class NodeSeat:
    """One node's view of the store, as long as it is not lost. Used by one thread."""

    def __init__(self, store: SignedStore, name: str, number: int) -> None:
        """Come to the job.

        Args:
            number: among the nodes that were started; those that train come first.
        """
        self._store, self._id, self._beats, self._num_taken = store, secrets.token_hex(8), 0, 0
        self._has_left = False
        store.append(ARRIVED, {"id": self._id, "name": name, "number": number})

    def beat(self, code: int | None, start: int = 0) -> None:
        """Show that the node lives, and how its ranks have ended; None if some run, or there are none.

        Args:
            start: of these ranks.
        """
        self._beats += 1
        self._store.set(of_node(self._id, "beats"), [self._beats, code, start])

    def new_orders(self) -> list[Order]:
        """Return orders that were not returned before."""
        if self._store.length(key := of_node(self._id, "orders")) <= self._num_taken:
            return []
        found = self._store.values(key)[self._num_taken :]
        self._num_taken += len(found)
        return [Order(**{**each, "ranks": tuple(each["ranks"])}) for each in found]

    def is_lost(self) -> bool:
        """Return whether the node was called lost: another one has its ranks, or will have them."""
        return self._store.get(of_node(self._id, "lost")) is not None

    def leave(self) -> None:
        """Say, once, that this node is told to end. Then it is lost, or all ranks are to save and end."""
        if not self._has_left:
            self._store.append(LEAVING, self._id)
            self._has_left = True

    def is_to_save(self) -> bool:
        """Return whether all ranks are to save their state and end."""
        return self._store.get(SAVE) is not None

    def over(self) -> tuple[int, str] | None:
        """Return the exit code of the job, and the reason if it failed; None as long as it runs."""
        found = self._store.get(OVER)
        return None if found is None else (found["code"], found["why"])


class Slots:
    """Names of the nodes that have ranks, by slot, and those of the job's last start."""

    def __init__(self, num_nodes: int, own_number: int, status: Path | None) -> None:
        self._num_nodes, self._own_number, self._status = num_nodes, own_number, status
        self.names: dict[int, str] = {}  # of the node that has had the slot last
        self._before = _read_names(status, num_nodes)

    def replace(self, names: Sequence[str]) -> None:
        """Have other nodes: slots of earlier ones mean nothing any more."""
        self.names, self._before = dict(enumerate(names)), []

    def slot_of(self, name: str, number: int) -> int | None:
        """Return whose ranks a node gets that has come: its own of the last start, or those of its number."""
        slot, kept = number, self._kept()
        if number != self._own_number and kept.get(number) != name:
            if name in kept.values():
                slot = next(each for each, kept_name in kept.items() if kept_name == name)
            elif number in kept:
                return None
        return slot if slot < self._num_nodes and slot not in self.names else None

    def _kept(self) -> dict[int, str]:
        """Return slots that are kept for nodes of the last start that have not come, and their names."""
        kept = dict(enumerate(self._before))
        kept.pop(self._own_number, None)  # that node alone may have these ranks
        for slot, name in self.names.items():
            kept.pop(slot, None)
            if self._before[slot : slot + 1] != [name]:  # it has others than in the last start
                kept.pop(next((each for each in kept if kept[each] == name), -1), None)
        return kept

    def is_elsewhere(self, names: Sequence[str]) -> bool:
        """Return whether enough nodes have come, and none of the last start: a new job on other hosts."""
        return len(names) >= self._num_nodes and not {*names} & {*self._before}

    def write(self, over: int | None) -> None:
        """Write the names to the file, after the exit code of the job if it is over."""
        if self._status is None:
            return
        code = "-" if over is None else str(over)
        names = dict(enumerate(self._before)) | self.names
        lines = [code, *(name for _, name in sorted(names.items()))]
        part = self._status.with_name(f"{self._status.name}.{os.getpid()}")
        try:
            part.write_text("\n".join(lines) + "\n")
            part.rename(self._status)
        except OSError as error:  # the job goes on without it
            say(f"warning: {self._status} is not written: {error}")


def of_node(node: str, what: str) -> str:
    """Return the key of something that one node says or is told."""
    return f"node_{node}/{what}"


def _read_names(status: Path | None, num_nodes: int) -> list[str]:
    """Return the nodes of the last start by slot; none if it had another number of nodes, or is not known."""
    try:
        names = [] if status is None else status.read_text().splitlines()[1:]
    except OSError:  # there was none, or it will not be written either
        return []
    return names if len(names) == num_nodes else []
