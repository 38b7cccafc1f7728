"""Law of a job's membership: who trains now, as what, after anything that happens to nodes and ranks.

`step(job, event)` returns the job after an event, and commands (words are in membership.py). It has no clock,
store or process. Its driver (coordinator.py) turns silence and values of the store into events, and carries
commands out by writes; nodes and ranks obey. Nothing else decides.

A lost slot goes to a spare. Without one `Policy.without_spare` says who gets it. What cannot be repaired in
place begins another start: in the same layout while each slot has a node, or on fewer nodes if the job is
elastic. Else the job is over.

A verdict may be false: a node that was silent may wake up. It therefore declares a round of its own,
and a node that registers again has another id. Events about ids that are no nodes any more change nothing.

tests/cluster has a transcript for each of these cases.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from moe_ft.cluster import ring
from moe_ft.cluster.membership import (
    MOST_UNFINISHED,
    Begin,
    Changed,
    Command,
    Declare,
    Declared,
    EndSlot,
    Event,
    Failed,
    HearAll,
    Job,
    Lost,
    Node,
    OpenSlot,
    Over,
    Passed,
    Quiet,
    RankReports,
    Registered,
    Save,
    Say,
    Seat,
    StoreTold,
    Strike,
    ToldToEnd,
    Wait,
    Wake,
)
from moe_ft.config.fields import size_text
from moe_ft.config.lost_nodes import CROWDED, FLAG
from moe_ft.verdicts import Failure, FailureKind, first_of, is_repeated

GATHER_S = 3.0  # for further nodes to come, or to be told to end
MISSING_S = 30.0  # for a node to come, after the last one that came
_CORRUPT = 5  # of a job without a node that could replace one that computes wrongly
_REFUSED = (2, 4, _CORRUPT)  # exit codes of ranks that would end so again (loop/refusing.py)

Done = tuple[Job, list[Command]]


def step(job: Job, event: Event) -> Done:
    """Return the job after an event, and commands in their order."""
    if job.over is not None:
        return job, []
    job, commands = _take_in(job, event)
    for rule in (_part, _replace_missing, _uncrowd, _grow, _fill, _end):
        if job.over is None and not job.is_declaring:
            job, more = rule(job)
            commands = [*commands, *more]
    return job, commands


def _take_in(job: Job, event: Event) -> Done:
    """Note what an event says, and decide what it alone decides."""
    match event:
        case RankReports():
            return _note_reports(job, event), []
        case Registered(nodes):
            return _meet(job, nodes)
        case Changed(nodes):
            known = {each.id: each for each in nodes if each.id in job.nodes}
            return replace(job, nodes={**job.nodes, **known}), []
        case Lost() | Quiet():
            here, store = job.nodes, job.policy.store
            lost = ring.missed(here, event, store) if isinstance(event, Quiet) else event
            return _lose(job, *lost)
        case Failed(failures):
            return _judge(job, failures)
        case ToldToEnd(ids):
            return _gather_told(job, ids)
        case StoreTold():
            return _end_all(job, "the node of the job's store is told to end")
        case Declared(number):
            return replace(
                job,
                opened={s: o._replace(round=o.round or number) for s, o in job.opened.items()},
                reports=replace(job.reports, newest=number),
                is_declaring=False,
            ), []
        case Passed(what):
            return _note_time(job, what)


def _note_reports(job: Job, reports: RankReports) -> Job:
    # A finished repair has dealt with them: they do not end the start.
    failures = () if reports.finished > job.reports.finished else job.failures
    return replace(job, reports=reports, failures=failures)


def _note_time(job: Job, what: str) -> Done:
    if what == "told":
        return _let_go(replace(job, is_deciding=False))
    if what == "heard":
        return replace(job, are_heard=True), []
    return replace(job, quiet={"gathered": GATHER_S, "missing": MISSING_S}[what]), []


# Nodes that come


def _meet(job: Job, nodes: Iterable[Node]) -> Done:
    """Give nodes the ranks that they had in the last start, or those of their number."""
    commands: list[Command] = [Wake("gathered", GATHER_S), Wake("missing", MISSING_S)]
    job = replace(job, nodes={**job.nodes, **{each.id: each for each in nodes}}, quiet=0.0)
    for node in nodes:
        slot = None if job.start else own_slot(job, node)
        if node.name in job.unfit:
            commands.append(Say(no_ranks(node), is_warning=True))
        elif slot is None:
            commands.append(Say(f"node {node.name} is a spare{room_of(job, node)}"))
        else:
            job, seat = _seat(job, node.id, slot)
            commands.append(seat)
    return job, commands


def _seat(job: Job, id: str, slot: int, opened: OpenSlot | None = None) -> tuple[Job, Seat]:
    names = job.names
    if id not in job.seats.values():
        names = {**names, slot: job.nodes[id].name}
    seats = {each: node for each, node in job.seats.items() if each != slot} | {slot: id}
    round, lost = opened[:2] if opened else (0, "")
    job = replace(job, seats=seats, names=names)
    return job, Seat(id, slot, round, lost, _host_of(seats, slot))


def _host_of(seats: Mapping[int, str], slot: int) -> int | None:
    """Return the slot of a crowded node that it had first; None for that slot, and for other nodes."""
    first = next(each for each, id in seats.items() if id == seats[slot])
    return None if first == slot else first


def _replace_missing(job: Job) -> Done:
    """Give spares the slots of nodes that have not come, where enough others are there."""
    slots = {*range(job.size)} - {job.policy.store, *job.names}
    if job.start or not slots or not job.quiet:
        return job, []
    spares = {each.number: each for each in job.spares}
    if job.quiet < MISSING_S:
        names = {each.name for each in job.nodes.values()}
        # Enough nodes, and none of the last start, are a new job on other hosts: nobody else will come.
        if len(job.fit) < job.size or names & {*job.before}:
            return job, []
        slots &= spares.keys()
    elif len(slots) > job.num_free:
        return _begin(job, "other nodes have not come") if can_shrink(job) else (job, [])
    commands: list[Command] = []
    for slot in sorted(slots, key=lambda slot: slot not in spares):
        node = next((each for each in job.spares if each.number == slot), job.spares[0])
        why = "" if node.number == slot else ", which is not there"
        commands.append(Say(f"node {node.name} gets the ranks of node {slot}{why}"))
        job, seat = _seat(job, node.id, slot)
        commands.append(seat)
    return job, commands


# Nodes that go


def _lose(job: Job, ids: Collection[str], why: str, code: int = 1) -> Done:
    """Call nodes lost, and answer the loss of their slots; the code is that of a job which this ends."""
    lost = [job.nodes[each] for each in ids if each in job.nodes]
    if not lost:
        return job, []
    needed = job.slots_of([each.id for each in lost if each.code != 0])
    left = dict.fromkeys(job.slots_of([each.id for each in lost]) - needed, 0)
    names = {slot: job.nodes[job.seats[slot]].name for slot in needed}
    commands: list[Command] = [Strike(tuple(each.id for each in lost), why)]
    job = _without(replace(job, left={**job.left, **left}), lost)
    # A repair, or another start, would end ranks that save; nobody needs ranks that wait.
    if job.is_ending or {*job.ranks_of(needed)} <= job.reports.waiting:
        left = dict.fromkeys(needed, int(job.is_ending))
        return replace(job, left={**job.left, **left}), commands
    answer = answer_to(job, lost, needed)
    if answer.how == "over":
        return _over(job, code, f"{_are(lost)} lost, and {answer.why}", commands)
    if answer.how == "start":
        return _begin(job, answer.why, commands)
    opened = {slot: OpenSlot(0, names[slot], answer.hosts.get(slot, "")) for slot in needed}
    job = replace(job, opened={**job.opened, **opened}, is_declaring=True)
    moves = {(job.nodes[host].name, names[slot]): None for slot, host in answer.hosts.items()}
    word = f"{FLAG} {job.policy.without_spare}"
    for host, name in moves:
        line = f"no spare is left: node {host} also runs ranks of node {name} ({word})"
        commands.append(Say(line, is_warning=True))
    return job, [*commands, Declare(tuple(sorted(needed)))]


def _judge(job: Job, failures: Iterable[Failure]) -> Done:
    """Note failures, and call nodes lost that compute wrongly, or whose device has failed twice."""
    unfit, code = dict[str, str](), 1
    for each in failures:
        name = node_of(job, each)
        if why := why_unfit(job, each):
            unfit[name] = why
        code = _CORRUPT if each.kind is FailureKind.CORRUPTION else code
        faulty = {name} if each.kind is FailureKind.DEVICE else set()
        job = replace(job, failures=(*job.failures, each), faulty=job.faulty | faulty)
    job = replace(job, unfit=job.unfit | unfit.keys())
    ids = dict.fromkeys(id for id in job.seats.values() if job.nodes[id].name in unfit)
    return _lose(job, ids.keys(), "; ".join(unfit.values()), code)


def _gather_told(job: Job, ids: Iterable[str]) -> Done:
    told = job.told | (job.nodes.keys() & {*ids})
    if told == job.told or job.is_deciding or job.is_ending:
        return replace(job, told=told), []
    return replace(job, told=told, is_deciding=True), [Wake("told", GATHER_S)]


def _let_go(job: Job) -> Done:
    """Replace nodes that are told to end, or have all ranks save and end."""
    going = [each for id, each in job.nodes.items() if id in job.told]
    if job.is_ending or not going:  # a repair would kill ranks that save
        return job, []
    ids = [each.id for each in going]
    if slots := job.slots_of(ids):
        answer = answer_to(_without(job, going), going, slots, can_wait=False)
        if answer.how == "over":
            return _end_all(job, f"{_are(going)} told to end, without a replacement: {answer.why}")
    return _lose(job, ids, "told to end")


def _part(job: Job) -> Done:
    """Replace a node that does not reach another one, as both report.

    Of the two it is not the node of the store, and else the one with more dead links.
    """
    seated = {*job.seats.values()}
    ids = [id for id, node in job.nodes.items() if id in seated and node.code is None]
    pairs = [(job.nodes[one], other) for one in ids for other in job.nodes[one].unreached]
    links = [
        (one, job.nodes[other])
        for one, other in pairs
        if other in ids and one.id in job.nodes[other].unreached
    ]
    if not links or job.is_ending:
        return job, []
    num_dead = Counter(one.id for one, _ in links)
    node, other = max(
        links, key=lambda link: (link[0].number != job.policy.store, num_dead[link[0].id])
    )
    why = f"it does not reach node {other.name}, and both reach the job's store"
    slots, rest = job.slots_of([node.id]), _without(job, [node])
    answer = answer_to(rest, [node], slots, can_wait=False)
    if answer.how == "repair":
        return _lose(replace(job, parted=job.parted | {node.name}), [node.id], why)
    if node.id in job.stays:
        return job, []
    job = replace(job, stays=job.stays | {node.id})
    return job, [Say(f"node {node.name} stays: {why}: {answer.why}", is_warning=True)]


# Slots that get a node again


def _uncrowd(job: Job) -> Done:
    """Have a spare take the slot that a node got last which has several."""
    host, num_slots = max(
        Counter(job.seats.values()).items(), key=lambda each: each[1], default=("", 0)
    )
    able = (each for each in job.spares if each.id not in job.told)
    spare = next((each.id for each in able if each.name not in job.parted), "")
    if num_slots < 2 or not spare or job.opened or job.is_ending or not job.is_finished:
        return job, []
    slot = [slot for slot, id in job.seats.items() if id == host][-1]
    if why_not_in_place(job, (), [slot]):
        return job, []
    seats = {each: id for each, id in job.seats.items() if each != slot}
    opened = {slot: OpenSlot(0, job.nodes[host].name, spare)}
    job = replace(job, seats=seats, opened=opened, is_declaring=True)
    return job, [EndSlot(host, slot), Declare((slot,), is_loss=False)]


def _fill(job: Job) -> Done:
    """Give open slots to their hosts, and to spares; have ranks wait while there are too few."""
    commands: list[Command] = []
    for slot, opened in sorted(job.opened.items()):
        spares = job.spares
        if not opened.host and not spares:
            if job.waits_in == job.reports.newest:
                return job, commands
            line = f"no spare is left: training waits for a node ({FLAG} wait)"
            said = [Say(line, is_warning=True)] if job.waits_in < 0 else []
            job = replace(job, waits_in=job.reports.newest)
            return job, [*commands, *said, Wait(job.waits_in)]
        rest = {each: its for each, its in job.opened.items() if each != slot}
        job = replace(job, opened=rest)
        if not rest and job.waits_in >= 0:
            commands.append(Wait(job.waits_in, is_over=True))
            job = replace(job, waits_in=-1)
        id = opened.host or spares[0].id
        if id not in job.seats.values():
            line = f"node {job.nodes[id].name} takes over the ranks of node {opened.lost}"
            commands.append(Say(line))
        job, seat = _seat(job, id, slot, opened)
        commands.append(seat)
    return job, commands


# Other starts, and the end


def _grow(job: Job) -> Done:
    """Have all ranks of an elastic job begin again when a node has come, or enough have."""
    if not can_shrink(job):
        return job, []
    is_small = job.size < job.policy.shape.num_nodes and not job.opened and job.num_free > 0
    # In the middle of a repair, all would lose what it brings back.
    if is_small and job.quiet and not job.is_deciding and job.is_finished:
        return _begin(job, "a node has come", is_failure=False)
    return _begin(job, "no spare is left", is_failure=False) if job.num_free < 0 else (job, [])


def _begin(job: Job, why: str, done: Iterable[Command] = (), *, is_failure: bool = True) -> Done:
    """Have all ranks end and begin again: in the same layout if each slot has a node."""
    nodes = {id: replace(each, code=None) for id, each in job.nodes.items()}
    empty = [slot for slot in range(job.size) if slot not in job.seats]
    given = dict(zip(empty, (each.id for each in job.spares), strict=False))
    seats = {**job.seats, **given}
    names = {**job.names, **{slot: nodes[id].name for slot, id in given.items()}}
    most = min(len(job.fit), job.policy.shape.num_nodes)
    if len(seats) < max(job.size, most):
        seats = dict(enumerate(in_order(job)[:most]))
        names = {slot: nodes[id].name for slot, id in seats.items()}
    job = Job(
        policy=job.policy,
        nodes=nodes,
        seats=seats,
        names=names,
        start=job.start + 1,
        size=len(seats),
        vain=next_vain(job) - (not is_failure),
        quiet=job.quiet,
        told=job.told,
        is_deciding=job.is_deciding,
        parted=job.parted,
        last_failure=first_of(job.failures),
        faulty=job.faulty,
        unfit=job.unfit,
    )
    begin = Begin(job.start, job.size, why)
    return job, [
        *done,
        begin,
        *(Seat(id, slot, host=_host_of(seats, slot)) for slot, id in seats.items()),
    ]


def _end(job: Job) -> Done:
    """End the job when all its ranks have ended, or some have failed; begin again where that may help."""
    codes = {slot: job.nodes[id].code for slot, id in job.seats.items()}
    if code := max((each or 0 for each in codes.values()), default=0):
        # A node may be lost, and that is why.
        if (job.policy.shape.fewest or job.policy.max_restarts) and not job.are_heard:
            return replace(job, is_asking=True), [] if job.is_asking else [HearAll()]
        first = first_of(job.failures)
        words = f": {first.words}" if first else ""
        if code not in _REFUSED and is_repeated(job.failures, job.last_failure):
            return _over(job, 1, f"another start would end in the same way{words}")
        if code not in _REFUSED and can_restart(job):
            return _begin(job, f"a rank has failed with exit code {code}{words}")
        return _over(job, code, f"a rank has failed{words}")
    rest = {*range(job.size)} - job.left.keys()
    if any(codes.get(slot) is None for slot in rest):
        return job, []
    is_worse = any(job.left.values())
    return _over(
        job, int(is_worse), "a node was lost while its ranks were to save" if is_worse else ""
    )


def _end_all(job: Job, why: str) -> Done:
    return (job, []) if job.is_ending else (replace(job, is_ending=True), [Save(why)])


def _over(job: Job, code: int, why: str, commands: Iterable[Command] = ()) -> Done:
    return replace(job, over=code), [*commands, Over(code, why)]


def _without(job: Job, nodes: Iterable[Node]) -> Job:
    """Return the job without nodes, whose slots have none."""
    ids = {each.id for each in nodes}
    return replace(
        job,
        nodes={id: each for id, each in job.nodes.items() if id not in ids},
        seats={slot: id for slot, id in job.seats.items() if id not in ids},
        told=job.told - ids,
        lost_bytes=job.used_bytes,
    )


def _are(nodes: Collection[Node]) -> str:
    names = ", ".join(each.name for each in nodes)
    return f"node {names} is" if len(nodes) == 1 else f"nodes {names} are"


# Answers to lost slots: who may take them, whether all ranks may begin again, or why neither is possible


class SlotAnswer(NamedTuple):
    """Answer to lost slots.

    Attributes:
        how: "repair" in place, another "start", or the job is "over".
        why: they are not repaired; empty if they are.
        hosts: ids of nodes with ranks that get slots, too.
    """

    how: str
    why: str = ""
    hosts: Mapping[int, str] = {}


def answer_to(
    job: Job, lost: Collection[Node], slots: frozenset[int], *, can_wait: bool = True
) -> SlotAnswer:
    """Return the answer to lost slots, in a job without the nodes that had them."""
    why, few, kind = why_not_in_place(job, lost, slots), len(slots) - job.num_free, ""
    if not why and few <= 0:
        return SlotAnswer("repair")
    if not why:
        kind = job.policy.without_spare
        may_crowd = kind in CROWDED and not job.reports.full
        if may_crowd and (hosts := _hosts_of(job, sorted(slots)[-few:])):
            return SlotAnswer("repair", hosts=hosts)
        in_vain = "; no other node has room for these ranks" if kind in CROWDED else ""
        why = f"no spare is left ({FLAG} {kind}){in_vain}{_too_small(job)}; start more of them"
    if can_restart(job) or can_shrink(job):
        return SlotAnswer("start", why)
    return SlotAnswer("repair" if kind == "wait" and can_wait else "over", why)


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
    knowing = reports.knowing
    if knowing is None:
        knowing = frozenset(range(job.size * job.policy.shape.ranks_per_node))
    if knowing <= ranks:
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
