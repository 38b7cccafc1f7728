"""Many ranks of the control plane on one machine: what they ask of the job's store in a start and a repair.

The store, its coordinator and law, seats of nodes, members and rounds are the product's. A rank is a
thread with two connections, without model and process groups; eight processes have all of them. All
ranks begin to train, a node goes silent, a spare gets its ranks, and all meet in a round of repairs.
The store counts what ranks ask about rounds. What they ask in vain is apart: it is a matter of time.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import RawArray
from typing import Any, NoReturn

import psutil

from moe_ft.cluster import job_store, store_server
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.coordinator import Coordinator
from moe_ft.cluster.member import LoopPosition, Member
from moe_ft.cluster.membership import Policy, Shape
from moe_ft.cluster.roster import PERIOD_S, NodeSeat, Order
from moe_ft.cluster.rounds import RoundMark, Rounds
from moe_ft.cluster.signed_store import SignedStore, poll_s
from moe_ft.cluster.store_wire import StoreReply, StoreRequest
from moe_ft.processes import raise_descriptors

RANKS_PER_NODE, NUM_PROCESSES = 8, 8
TOKEN = "0" * 32
LOST_NODE = 1
_LOST_AFTER_S, _CONNECT_S, _DEADLINE_S = 10.0, 60.0, 240.0
_STACK_BYTES = 256 << 10
# Counters of the store.
_WRITES, _ANSWERS, _IDLE, _BYTES = range(4)


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests of all ranks in a phase, with the seconds of a core that the store had for everything.

    Attributes:
        writes, answers: requests that write, and that are answered with a value.
        num_bytes: of the values in the answers.
        idle: requests to which nothing was there to be answered.
    """

    writes: int
    answers: int
    idle: int
    num_bytes: int
    core_s: float
    seconds: float


class _Shared:
    """Things that all processes see."""

    def __init__(self) -> None:
        self.counts: Any = RawArray("q", 4)
        self.num_training: Any = multiprocessing.Value("q")
        self.num_repaired: Any = multiprocessing.Value("q")
        self.loses, self.ends = multiprocessing.Event(), multiprocessing.Event()


def _count(counts: Any) -> None:
    """Have the server of this process count what ranks ask about rounds."""
    answer, reply = store_server.StoreServer.answer, store_server._Client.reply
    coordinator: list[Any] = []

    def counting(self: Any, client: Any, request: StoreRequest) -> None:
        if not coordinator:
            coordinator.append(client)
        client.counted = None
        if client is not coordinator[0] and any("/round_" in each for each in request.keys):
            client.counted = request
        answer(self, client, request)

    def replying(client: Any, given: StoreReply) -> None:
        request = client.counted
        if request is not None:
            values = [each for each in (given.value, *given.values) if each and each != b"-"]
            is_write = request.op in ("set", "append", "add") or request.expected != request.value
            counts[_WRITES if is_write else _ANSWERS if values else _IDLE] += 1
            counts[_BYTES] += 0 if is_write else sum(map(len, values))
        reply(client, given)

    store_server.StoreServer.answer = counting  # type: ignore[method-assign]
    store_server._Client.reply = replying  # type: ignore[method-assign, assignment]


def _coordinate(num_nodes: int, open_start: Callable[[int], SignedStore]) -> NoReturn:
    policy = Policy(shape=Shape(num_nodes, RANKS_PER_NODE), store=num_nodes + 1)
    coordinator = Coordinator(open_start, policy, _LOST_AFTER_S)
    while True:
        coordinator.step()
        time.sleep(PERIOD_S)


def _serve(listener: socket.socket, num_nodes: int, counts: Any) -> NoReturn:
    _count(counts)
    coordinate = partial(_coordinate, num_nodes)
    job_store.serve(listener, "", TOKEN, num_nodes * RANKS_PER_NODE, coordinate)


class _Rank:
    """One process of a rank: it trains until a round begins, and meets the others in that."""

    def __init__(self, assignment: Assignment, shared: _Shared) -> None:
        self._member, self._shared, self._is_gone = Member(assignment), shared, False

    def start(self) -> None:
        """Begin to train."""
        threading.Thread(target=self._run, daemon=True).start()

    def end(self) -> None:
        """Take no part any more."""
        self._is_gone = True

    def _run(self) -> None:
        member, size = self._member, self._member.assignment.world_size
        address = member.assignment.meet
        own, watched = (job_store.reach(address, "", TOKEN, 0, _CONNECT_S) for _ in range(2))
        rounds, of_watcher = (
            member.connect(own, size),
            Rounds(member.sign(watched), member.rank, size),
        )
        if member.is_replacement:
            member.take_place()
            member.wait_for_survivors()
        else:
            member.position = _position(reads=member.rank % RANKS_PER_NODE == 0)
            member.become_replaceable()
            _add_one(self._shared.num_training)
            while not of_watcher.wait_until_broken(1):
                if self._is_gone:
                    return
                if self._shared.loses.is_set() and member.rank // RANKS_PER_NODE == LOST_NODE + 1:
                    rounds.note(RoundMark.SUSPECTED, 1)  # it has lost a connection
            assert rounds.is_declared(1)
        member.meet()
        member.wait_until_ready()
        member.finish()
        assert member.round == 1
        assert not rounds.is_declared(2)
        _add_one(self._shared.num_repaired)


def _position(*, reads: bool) -> LoopPosition:
    """Return where training is; ranks that read data know a little more."""
    return LoopPosition(
        iteration=7,
        counters={"consumed_train_samples": 1024, "do_train": reads},
        num_groups=90,
        gathers_weights=True,
        evaluations_draw=False,
    )


def _add_one(number: Any) -> None:
    with number.get_lock():
        number.value += 1


def _be_nodes(address: tuple[str, int], nodes: range, num_nodes: int, shared: _Shared) -> None:
    """Be the agents of some nodes and all their ranks, in a process of their own."""
    threading.stack_size(_STACK_BYTES)
    store = SignedStore(job_store.reach(address, "", TOKEN, 0, _CONNECT_S), lambda: TOKEN)
    seats = {number: NodeSeat(store, f"node-{number}", number) for number in nodes}
    ranks: dict[int, list[_Rank]] = {number: [] for number in nodes}
    period_s = poll_s(RANKS_PER_NODE * num_nodes, PERIOD_S)
    while not shared.ends.wait(period_s):
        if shared.loses.is_set() and seats.pop(LOST_NODE, None) is not None:
            for rank in ranks[LOST_NODE]:
                rank.end()
        for number, seat in seats.items():
            seat.beat(None)
            for order in seat.new_orders():
                ranks[number] += [
                    _Rank(_assignment(order, rank, number, address), shared) for rank in order.ranks
                ]
                for each in ranks[number]:
                    each.start()
    os._exit(0)


def _assignment(order: Order, rank: int, node: int, address: tuple[str, int]) -> Assignment:
    return Assignment(
        rank=rank,
        local_rank=rank % RANKS_PER_NODE,
        world_size=order.num_nodes * RANKS_PER_NODE,
        node=f"node-{node}",
        round=order.round,
        died_s=order.died_s if order.round else None,
        lost_node=order.lost_node,
        meet=address,
        token=TOKEN,
    )


@contextmanager
def _running(num_ranks: int, shared: _Shared) -> Iterator[int]:
    """Run the store and all ranks, and a spare node; yield the process of the store."""
    num_nodes = num_ranks // RANKS_PER_NODE
    listener = job_store.listen_at(("127.0.0.1", 0), is_alone=True)
    address = listener.getsockname()[:2]
    processes = [_forked(_serve, listener, num_nodes, shared.counts)]
    listener.close()
    size = -(-(num_nodes + 1) // NUM_PROCESSES)
    for low in range(0, num_nodes + 1, size):
        nodes = range(low, min(low + size, num_nodes + 1))
        processes.append(_forked(_be_nodes, address, nodes, num_nodes, shared))
    try:
        yield processes[0]
    finally:
        for each in processes:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)


def _forked(act: Callable[..., Any], *given: Any) -> int:
    if (pid := os.fork()) == 0:
        try:
            act(*given)
        finally:
            os._exit(1)
    return pid


def measure(num_ranks: int) -> tuple[Asked, Asked]:
    """Return what ranks ask until all train, and in a repair; raises TimeoutError if they hang."""
    raise_descriptors(4 * num_ranks + 1024)
    shared = _Shared()
    with _running(num_ranks, shared) as server:
        started = _until(shared.num_training, num_ranks, shared.counts, server)
        shared.loses.set()
        repaired = _until(shared.num_repaired, num_ranks, shared.counts, server)
        shared.ends.set()
    return started, repaired


def _until(number: Any, awaited: int, counts: Any, server: int) -> Asked:
    """Return what is asked until all ranks have got as far."""
    process, begin_s, before = psutil.Process(server), time.monotonic(), list(counts)
    core_s = sum(process.cpu_times()[:2])
    while number.value < awaited:
        if time.monotonic() > begin_s + _DEADLINE_S:
            raise TimeoutError(f"{number.value} of {awaited} ranks have got there")
        time.sleep(0.02)
    writes, answers, idle, num_bytes = (
        now - then for now, then in zip(counts, before, strict=True)
    )
    core_s = sum(process.cpu_times()[:2]) - core_s
    seconds = time.monotonic() - begin_s
    return Asked(writes, answers, idle, num_bytes, core_s, seconds)
