"""Nodes of a job that `keep` starts without torchrun: who is there, who has which ranks, who takes over.

Each node has a process (node.py) that comes, beats, and does what it is told, all by signed values in the
job's store. The process that keeps the store decides, and nobody else: it gives ranks to nodes, calls a node
lost that is silent, and gives its ranks to a spare. If none is left it may have peers play their roles, until
one comes. The node where it runs cannot be replaced: node 0, or one without ranks.

A node that is told to end says so. It is replaced like one that is lost if spares are left that stay. Else
all ranks save their state and end: it may be the end of the job, of which all nodes are told.

An elastic job needs no spare: all ranks begin again, on the nodes that are left, and once more when a node
comes. Each such start has values of its own in the store, which earlier processes cannot sign.

A verdict may be false: a node that was stopped, or cut off, may wake up. It therefore begins a round of its
own (rounds.py), and a node has a new name after it. The old one can still say things, and nobody listens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_ft.cluster.protocol import say
from moe_ft.cluster.roster import (
    BUILT_S,
    GATHER_S,
    OVER,
    SAVE,
    HeardNode,
    Order,
    PlayedSlots,
    Roster,
    Slots,
    of_node,
)
from moe_ft.cluster.rounds import MOST_UNFINISHED, Rounds
from moe_ft.cluster.signed_store import SignedStore

_MISSING_S = 30.0  # for a node to come, after the last one that came
_PLAYED = "no spare is left: peers play the roles of ranks {} (--moe-ft-without-spare)"
_BROKEN = f"{MOST_UNFINISHED} rounds of repairs were broken before an iteration was finished"


class Coordinator:
    """Gives ranks to nodes. One thread, in the process that keeps the store."""

    def __init__(
        self,
        open_start: Callable[[int], SignedStore],
        *,
        num_nodes: int,
        fewest: int = 0,
        ranks_per_node: int,
        own_number: int,
        lost_after_s: float,
        can_repair: bool,
        waits: bool,
        status: Path | None = None,
        can_play: bool = False,
    ) -> None:
        """Know no node yet.

        Args:
            open_start: returns the store of a start by its number; nodes use the first one, 0.
            num_nodes: that train.
            fewest: nodes with which all ranks begin again if nodes are lost; 0 if none may be missing.
            own_number: of the node where this runs; it has no ranks if it is not among them.
            lost_after_s: silence of a node after which it is lost.
            can_repair, waits, can_play: as --moe-ft-repair, --moe-ft-spare and --moe-ft-without-spare say.
            status: file that `Slots` reads and writes.
        """
        self._open_start, self._store = open_start, open_start(0)
        self._rounds = Rounds(self._store, 0, num_nodes * ranks_per_node)
        self._num_nodes, self._ranks_per_node = num_nodes, ranks_per_node
        self._fewest, self._start, self._num_untrained = fewest, 0, 0
        self._num_training = num_nodes  # nodes of this start
        self._own_number = own_number
        self._can_repair, self._waits = can_repair, waits
        self._slots = Slots(num_nodes, ranks_per_node, own_number, status)
        self._ranks_of = self._slots.ranks_of
        self._played = PlayedSlots(self._ranks_of, can_play)
        self._roster = Roster(self._store, lost_after_s)
        self._nodes = self._roster.nodes
        self._open: dict[int, Order] = {}  # by slot, until a spare takes it
        self._newest, self._arrived_s = 0, time.monotonic()
        self._ends = False  # all ranks have been told to save and end
        self._num_gone = 0  # nodes of this start that nobody replaces
        self._is_told = False  # that the store is to end
        self.over: int | None = None  # exit code of the job

    def tell(self) -> None:
        """Learn that the store is to end; may be called by a handler of a signal."""
        self._is_told = True

    def step(self) -> None:
        """Look once, and decide."""
        if self.over is not None:
            return
        self._meet_arrivals()
        lost = self._roster.hear(self._start, lambda: self._rounds.is_next_suspected(self._newest))
        if lost:
            self._lose(lost, f"silent for {lost[0].silent_s:.1f} s")
        self._let_go()
        if not self._ends and (link := self._roster.dead_link(self._own_number)):
            self._part(*link)
        self._replace_missing()
        self._bring_back()
        self._grow()
        self._give_away()
        self._end()

    def _meet_arrivals(self) -> None:
        arrived = self._roster.arrived()
        for node in arrived:
            slot = None if self._start else self._slots.slot_of(node.name, node.number)
            if slot is None:
                say(f"node {node.name} is a spare{self._roster.room_of(node)}")
            else:
                self._seat(node, slot, self._order(slot))
        if arrived:
            self._arrived_s = time.monotonic()
            self._slots.write(self.over)

    def _part(self, node: HeardNode, why: str) -> None:
        """Replace a node that does not reach another one, or say once that nobody can take its ranks."""
        if not (reason := self._why_over([node.slot or 0], can_wait=False)):
            self._lose([node], why)
        elif not node.is_told:
            node.is_told = True
            say(f"node {node.name} stays: {why}: {reason}")

    def _replace_missing(self) -> None:
        """Have spares take the ranks of nodes that have not come, where enough others are there."""
        missing = sorted({*range(self._num_nodes)} - {self._own_number, *self._slots.names})
        if self._start or not missing:
            return
        numbers = [each.number for each in self._roster.spares()]
        passed_s = time.monotonic() - self._arrived_s
        is_elsewhere = self._slots.is_elsewhere([each.name for each in self._nodes])
        if GATHER_S < passed_s < _MISSING_S and is_elsewhere:
            missing = [slot for slot in missing if slot in numbers]
        elif passed_s < _MISSING_S:
            return
        elif len(missing) > self._roster.num_free(self._open):
            if self._can_shrink(self._nodes):
                self._begin_start("other nodes have not come")
            return
        for slot in sorted(missing, key=lambda slot: slot not in numbers):
            spare = self._roster.spare_for(slot)
            why = "" if spare.number == slot else ", which is not there"
            say(f"node {spare.name} gets the ranks of node {slot}{why}")
            self._seat(spare, slot, self._order(slot))
        if missing:
            self._slots.write(self.over)

    def _order(self, slot: int, **changes: Any) -> Order:
        ranks = self._ranks_of(slot)
        return Order(ranks=ranks, start=self._start, num_nodes=self._num_training, **changes)

    def _seat(self, node: HeardNode, slot: int, order: Order) -> None:
        """Give a node the ranks of a slot."""
        node.slot, self._slots.names[slot] = slot, node.name
        self._store.append(of_node(node.id, "orders"), asdict(order))

    def _let_go(self) -> None:
        """Replace nodes that are told to end, or have all ranks save and end."""
        if self._ends:  # a repair would kill ranks that save
            return
        if self._is_told:
            self._end_all("the node of the job's store is told to end")
            return
        if (going := self._roster.told_to_end()) is None:
            return
        left = [each for each in self._nodes if each not in going]
        slots = [each.slot for each in going if each.slot is not None]
        why = self._why_over(slots) if slots else ""
        free = sum(each in left for each in self._roster.spares()) - len(self._open)
        if slots and not why and len(slots) > free and not self._to_play(slots, free):
            why = "there are too few spares that stay; start more of them"
        if why and not self._can_shrink(left):
            self._end_all(f"{_are(going)} told to end, without a replacement: {why}")
        elif going:
            self._lose(going, "told to end")

    def _end_all(self, why: str) -> None:
        say(f"{why}. All ranks are to end")
        self._ends = True
        self._store.set(SAVE, True)

    def _lose(self, lost: Sequence[HeardNode], why: str) -> None:
        """Call nodes lost, and begin a round if they had ranks."""
        self._num_gone += sum(each.code == 0 for each in lost)  # nobody needs them any more
        slots = [each.slot for each in lost if each.slot is not None and each.code != 0]
        say(f"{_are(lost)} lost: {why}")
        self._roster.strike(lost)
        # A repair, or another start, would end ranks that save; nobody needs ranks that wait.
        if not slots or self._ends or self._rounds.are_waiting(self._ranks_of(*slots)):
            self._num_gone += len(slots)
            return
        reason = self._why_over(slots)
        self._num_untrained += not self._rounds.has_trained()
        free = self._roster.num_free(self._open)
        if (reason or len(slots) > free) and self._can_shrink(self._nodes):
            self._begin_start(reason or "no spare is left")
            return
        if reason:
            self._set_over(1, f"{_are(lost)} lost, and {reason}")
            return
        self._played.slots |= (played := self._to_play(slots, free))
        absent = self._ranks_of(*self._played.slots) if played else None
        self._newest = self._rounds.declare_lost(
            self._ranks_of(*slots), self._newest, absent, max(each.heard_s for each in lost)
        )
        if played:
            say(_PLAYED.format(", ".join(map(str, self._ranks_of(*played)))))
        for each in lost:
            if each.slot is not None and each.slot not in played:
                self._offer(each.slot, each.heard_s)
        if self._roster.num_free(self._open) < 0:
            say("no spare is left: training waits for a node (--moe-ft-spare wait)")

    def _why_over(self, slots: Sequence[int], *, can_wait: bool = True) -> str:
        """Return why the ranks of lost nodes cannot be replaced in place; empty if they can."""
        if self._own_number in slots:
            own = self._slots.names[self._own_number]
            return f"node {own} keeps the job's store (one without ranks can: --store)"
        if self._rounds.some_wait(self._ranks_of(*slots)):
            return "some of its ranks took no part"
        if self._rounds.have_ended():
            return "training has ended"
        if not self._can_repair:
            return "without --moe-ft-repair auto no node is replaced"
        if not self._rounds.has_trained():
            return "no iteration was finished before"
        newest = self._rounds.newest(self._newest)
        if self._rounds.has_broken_too_many(newest + 1):
            return _BROKEN
        if self._rounds.survivors(newest) <= {*self._ranks_of(*slots)}:
            return "no rank is left that knows where training is"
        free = self._roster.num_free(self._open)
        if not (can_wait and self._waits) and len(slots) > free and not self._to_play(slots, free):
            why = "; peers cannot play the roles of all ranks of a stage" * self._played.is_allowed
            why += self._roster.small()
            return f"no spare is left (--moe-ft-spare restart){why}; start more of them"
        return ""

    def _to_play(self, lost: Sequence[int], num_free: int) -> set[int]:
        """Return the slots of lost nodes whose roles peers play; none if spares suffice, or peers cannot."""
        is_asked = self._played.is_allowed and len(lost) > num_free
        return self._played.choose(lost, num_free, self._rounds.stages()) if is_asked else set()

    def _bring_back(self) -> None:
        """Have spares that have come take the ranks whose roles peers play, once an iteration is finished."""
        slots = self._played.to_return(self._roster.num_free(self._open))
        if not slots or self._ends or not self._rounds.is_newest_finished(self._newest):
            return
        absent, now_s = {*self._played.slots}.difference(slots), time.time()
        self._newest = self._rounds.declare_lost(
            self._ranks_of(*slots), self._newest, self._ranks_of(*absent), now_s
        )
        self._played.note_return(slots, self._newest)
        for slot in slots:
            self._offer(slot, now_s)

    def _offer(self, slot: int, died_s: float) -> None:
        """Have the next spare take ranks, in the newest round."""
        name = self._slots.names[slot]
        self._open[slot] = self._order(slot, round=self._newest, died_s=died_s, lost_node=name)

    def _give_away(self) -> None:
        """Have spares take over what is open."""
        for slot, order in sorted(self._open.items()):
            if not (spares := self._roster.spares()):
                self._newest = self._rounds.newest(self._newest)
                self._rounds.wait_for_spare(self._newest)
                return
            say(f"node {spares[0].name} takes over the ranks of node {order.lost_node}")
            del self._open[slot]
            if not self._open:
                self._rounds.note_spare(self._newest)
            self._seat(spares[0], slot, order)
            self._slots.write(self.over)

    def _can_shrink(self, nodes: Sequence[HeardNode]) -> bool:
        """Return whether all ranks may begin again on some nodes."""
        if self._ends or not 0 < self._fewest <= len(nodes) or self._rounds.have_ended():
            return False
        own = {self._own_number} & {*range(self._num_nodes)}
        return own <= {each.number for each in nodes} and self._num_untrained <= MOST_UNFINISHED

    def _grow(self) -> None:
        """Have all ranks begin again if nodes have come that have none, and others are missing."""
        if self._ends or not self._can_shrink(self._nodes):
            return
        is_small = self._start and self._num_training < self._num_nodes and not self._open
        free = self._roster.num_free(self._open)
        is_calm = time.monotonic() - self._arrived_s > GATHER_S and not self._roster.is_leaving
        # In the middle of a repair, all would lose what it brings back.
        if is_small and is_calm and free > 0 and self._rounds.is_newest_finished(self._newest):
            self._begin_start("a node has come")
        elif free < 0:  # fewer are needed now than when they were lost
            self._begin_start("no spare is left")

    def _begin_start(self, why: str) -> None:
        """Have all ranks end, and others begin on the nodes that are there, in another layout."""
        self._start += 1
        if self._rounds.has_trained():
            self._num_untrained = 0
        nodes = _in_order(self._nodes, self._own_number)
        self._num_training = min(len(nodes), self._num_nodes)
        self._open.clear()
        self._played.clear()
        self._newest = self._num_gone = 0
        self._roster.begin_start()
        num_ranks = self._num_training * self._ranks_per_node
        self._rounds = Rounds(self._open_start(self._start), 0, num_ranks)
        self._slots.replace([each.name for each in nodes[: self._num_nodes]])
        say(f"all ranks begin again on nodes {', '.join(self._slots.names.values())}: {why}")
        for slot, each in enumerate(nodes[: self._num_nodes]):
            each.code = None
            self._seat(each, slot, self._order(slot))
        self._slots.write(self.over)

    def _end(self) -> None:
        """End the job when all its ranks have ended, or some have failed."""
        ended = [each for each in self._nodes if each.slot is not None and each.code is not None]
        failed = [each for each in ended if each.code]
        if vain := self._played.to_give_up(self._nodes, self._rounds):
            self._lose(vain, f"its ranks have failed, or were not built within {BUILT_S:g} s")
        elif failed:
            # Else one may be lost, and that is why.
            if not self._fewest or self._roster.has_heard_all():
                self._set_over(max(each.code or 0 for each in failed), "a rank has failed")
        elif len(ended) + self._num_gone == self._num_training - len(self._played.slots):
            is_worse = self._ends and self._num_gone > 0
            self._set_over(int(is_worse), "a node was lost while its ranks were to save" * is_worse)

    def _set_over(self, code: int, why: str) -> None:
        if why:
            say(f"the job ends: {why}")
        self.over = code
        self._slots.write(self.over)
        self._store.set(OVER, {"code": code, "why": why})


def _are(nodes: Sequence[HeardNode]) -> str:
    names = ", ".join(each.name for each in nodes)
    return f"node {names} is" if len(nodes) == 1 else f"nodes {names} are"


def _in_order(nodes: Sequence[HeardNode], own_number: int) -> list[HeardNode]:
    """Return nodes for a start: that of the store first, others in the order of their slots, spares last."""

    def place(node: HeardNode) -> tuple[bool, bool, int]:
        return node.number != own_number, node.slot is None, node.slot or 0

    return sorted(nodes, key=place)
