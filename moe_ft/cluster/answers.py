"""Answers to lost slots: who may take them, whether all ranks may begin again, or why neither is possible.

law.py asks. Nothing here changes a job.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from moe_ft.cluster.membership import Job, Node
from moe_ft.config.fields import size_text
from moe_ft.config.lost_nodes import FLAG
from moe_ft.verdicts import Failure, FailureKind

MOST_UNFINISHED = 3  # rounds, or smaller starts, in a row before an iteration is finished
_IN_VAIN = {
    "crowd": "; no other node has room for these ranks",
    "reroute": "; peers cannot play the roles of all ranks of a stage",
}


class LossAnswer(NamedTuple):
    """Answer to lost slots.

    Attributes:
        how: "repair" in place, another "start", or the job is "over".
        why: they are not repaired; empty if they are.
        played: slots whose roles peers play.
        hosts: ids of nodes with ranks that get slots, too.
    """

    how: str
    why: str = ""
    played: frozenset[int] = frozenset()
    hosts: Mapping[int, str] = {}


def answer(
    job: Job, lost: Collection[Node], slots: frozenset[int], *, can_wait: bool = True
) -> LossAnswer:
    """Return the answer to lost slots, in a job without the nodes that had them."""
    why, few, kind = why_not_in_place(job, lost, slots), len(slots) - job.num_free, ""
    if not why and few <= 0:
        return LossAnswer("repair")
    if not why:
        kind = job.policy.without_spare
        can_crowd = kind == "crowd" and not job.reports.full
        if can_crowd and (hosts := _hosts_of(job, sorted(slots)[-few:])):
            return LossAnswer("repair", hosts=hosts)
        if kind == "reroute" and (played := _played_of(job, slots)):
            return LossAnswer("repair", played=played)
        why = f"no spare is left ({FLAG} {kind}){_IN_VAIN.get(kind, '')}{_too_small(job)}"
        why += "; start more of them"
    if can_restart(job) or can_shrink(job):
        return LossAnswer("start", why)
    return LossAnswer("repair" if kind == "wait" and can_wait else "over", why)


def why_not_in_place(job: Job, lost: Iterable[Node], slots: Iterable[int]) -> str:
    """Return why lost ranks cannot be repaired in place, however many spares there are; empty if they can."""
    reports, ranks = job.reports, {*job.ranks_of(slots)}
    for node in lost:
        if node.number == job.policy.store:
            return f"node {node.name} keeps the job's store (one without ranks can: --store)"
    if ranks & reports.waiting:
        return "some of its ranks took no part"
    if reports.ended:
        return "training has ended"
    if not (job.policy.repair and reports.in_place):
        where = "in this job" if job.policy.repair else "without --moe-ft-repair auto"
        return f"{where} no node is replaced"
    if not reports.trained:
        return "no iteration was finished before"
    if reports.newest - reports.finished >= MOST_UNFINISHED:
        return f"{MOST_UNFINISHED} rounds of repairs were broken before an iteration was finished"
    absent = {*job.ranks_of(job.played)}
    knowing = reports.knowing
    if knowing is None:
        knowing = frozenset(range(job.size * job.policy.shape.ranks_per_node))
    if knowing - absent <= ranks:
        return "no rank is left that knows where training is"
    return ""


def _hosts_of(job: Job, slots: Iterable[int]) -> dict[int, str]:
    """Return nodes with ranks that have room for further slots; none if some slot has none.

    Replicas of ranks are in other failure domains than these: a host in their domain keeps them apart. Of
    several, that with the fewest ranks is the host.
    """
    loads = Counter(job.seats.values())
    room = {id: job.nodes[id].room_bytes - job.nodes[id].used_bytes for id in loads}
    hosts, domains, needed = dict[int, str](), job.policy.domains, job.needed_bytes

    def place(id: str, slot: int) -> tuple[bool, int]:
        is_elsewhere = domains.get(job.nodes[id].name) != domains.get(job.names[slot])
        return is_elsewhere, loads[id]

    for slot in slots:
        able = [
            id
            for id in loads
            if room[id] >= needed and id not in job.told and job.nodes[id].code is None
        ]
        if not able:
            return {}
        host = hosts[slot] = min(able, key=lambda id: place(id, slot))
        loads[host] += 1
        room[host] -= needed
    return hosts


def _played_of(job: Job, lost: Collection[int]) -> frozenset[int]:
    """Return the lost slots that no spare takes; none if a stage would have no group that lives.

    A stage that has no other group gets spares first.
    """
    played, left = {*lost}, max(0, job.num_free)
    before = {*job.ranks_of(job.played)}
    for stage in job.reports.stages:
        dead = before.union(job.ranks_of(played))
        if any(dead.isdisjoint(group) for group in stage):
            continue
        needed = [
            {slot for slot in played if not {*job.ranks_of([slot])}.isdisjoint(group)}
            for group in stage
            if before.isdisjoint(group)
        ]
        fewest = min(reversed(needed), key=len, default=set[int]())
        if not fewest or len(fewest) > left:
            return frozenset()
        played, left = played - fewest, left - len(fewest)
    found = sorted(played)[: max(0, len(played) - left)]
    return frozenset(found if job.reports.stages else ())


def node_of(job: Job, failure: Failure) -> str:
    """Return the name of the node of a rank that has failed; empty if it is not known."""
    id = job.seats.get(failure.rank // job.policy.shape.ranks_per_node, "")
    return failure.node or (job.nodes[id].name if id else "")


def why_unfit(job: Job, failure: Failure) -> str:
    """Return why the node of a failure gets no ranks any more; empty if it does.

    Ranks of one node may report one failure of a device each: they count once.
    """
    name = node_of(job, failure)
    if failure.kind is FailureKind.CORRUPTION:
        return f"rank {failure.rank} computes wrongly ({failure.what})" if name else ""
    is_new = not any(
        each.kind is FailureKind.DEVICE and node_of(job, each) == name for each in job.failures
    )
    if failure.kind is FailureKind.DEVICE and is_new and name in job.faulty:
        return f"its device has failed again, on rank {failure.rank} ({failure.what})"
    return ""


def no_ranks(node: Node) -> str:
    """Return words on a node that has come again, and is not fit for ranks."""
    return f"node {node.name} gets no ranks: it computes wrongly, or its device fails again"


def next_vain(job: Job) -> int:
    """Return how many starts in a row follow a failure if this one fails now."""
    return 1 if job.reports.trained else job.vain + 1


def _may_begin(job: Job, most: int) -> bool:
    """Return whether all ranks may begin again after a failure: not too often in a row, nor at the end."""
    shape, store = job.policy.shape, job.policy.store
    numbers = (each.number for each in job.nodes.values())
    is_there = store >= shape.num_nodes or store in numbers
    return is_there and not job.is_ending and not job.reports.ended and next_vain(job) <= most


def can_shrink(job: Job) -> bool:
    """Return whether all ranks may begin again on the nodes that are there, however many."""
    is_enough = 0 < job.policy.shape.fewest <= len(job.fit)
    return is_enough and _may_begin(job, MOST_UNFINISHED)


def can_restart(job: Job) -> bool:
    """Return whether all ranks may begin again in the same layout."""
    has_nodes = len(job.seats) + len(job.spares) >= job.size
    return has_nodes and _may_begin(job, job.policy.max_restarts)


def room_of(job: Job, node: Node) -> str:
    """Return words on the room of a node; none if that is not known."""
    if node.room_bytes == math.inf:
        return ""
    of = f" of {size_text(needed)}" if (needed := int(job.needed_bytes)) else ""
    return f" (has room for {size_text(int(node.room_bytes))}{of})"


def _too_small(job: Job) -> str:
    """Return words on nodes without ranks that are no spares for lack of room."""
    small = job.fit.keys() - job.seats.values() - {each.id for each in job.spares}
    nodes = (each for id, each in job.nodes.items() if id in small)
    return "".join(f"; node {each.name}{room_of(job, each)} is too small" for each in nodes)


def own_slot(job: Job, node: Node) -> int | None:
    """Return the slot of a node that has come; None if it has none, or that is kept for another one."""
    kept = dict(enumerate(job.before))
    kept.pop(job.policy.store, None)  # that node alone may have these ranks
    for slot, name in job.names.items():
        kept.pop(slot, None)
        if job.before[slot : slot + 1] != (name,):  # it has others than in the last start
            kept.pop(next((each for each in kept if kept[each] == name), -1), None)
    slot = node.number
    if node.number != job.policy.store and kept.get(node.number) != node.name:
        if node.name in kept.values():
            slot = next(each for each, name in kept.items() if name == node.name)
        elif node.number in kept:
            return None
    return slot if slot < job.size and slot not in job.names else None


def in_order(job: Job) -> list[str]:
    """Return nodes for a start: that of the store first, others in the order of their slots, spares last."""
    slots = {id: slot for slot, id in reversed([*job.seats.items()])}

    def place(node: Node) -> tuple[bool, int]:
        return node.number != job.policy.store, slots.get(node.id, job.size)

    return [each.id for each in sorted(job.fit.values(), key=place)]


def came_in_vain(job: Job, slot: int) -> bool:
    """Return whether ranks that came back from peers have failed, or others wait for them in vain."""
    if slot not in job.seats:
        return False
    is_missed = job.reports.met and not {*job.ranks_of([slot])} <= job.reports.ready
    return bool(job.nodes[job.seats[slot]].code) or (slot in job.late and is_missed)
