"""Agent of a node: the process of `moe_ft launch`, which has the ranks of its node run as it is told.

It needs neither torch nor Megatron, so it registers while its fork server (fork_server.py, forks.py) still
imports. The law (law.py) gives it orders, from a process on node 0 or on a node without ranks. If
its node was called lost, it kills its ranks and registers again, as a spare. So it does if the store is
silent for as long as makes a node lost: others may have its ranks, and it would not know.

SIGTERM tells it that its node is to end. If no spare takes over, all ranks of the job get the exit signal of
Megatron, bring their state to storage and end. If that takes too long, they get SIGTERM in time to leave
breakpoints in memory.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from moe_ft.addresses import own_host
from moe_ft.cluster import job_store
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.coordinator import Coordinator, policy_of
from moe_ft.cluster.fork_server import serve_forks
from moe_ft.cluster.forks import FORWARDED, Forks, Role
from moe_ft.cluster.link import exit_signal
from moe_ft.cluster.observer import LOOK_S, Observer
from moe_ft.cluster.options import LEAVING_S, KeepOptions
from moe_ft.cluster.own_node import NodeMemory, OwnNode
from moe_ft.cluster.roster import PERIOD_S, NodeSeat, Order
from moe_ft.cluster.signed_store import SignedStore, poll_s
from moe_ft.errors import RepairError
from moe_ft.files.progress import call_within
from moe_ft.processes import follow_parent, set_process_name
from moe_ft.saying import say, warn

_AGAIN_S = 5.0  # until ranks get the exit signal again: those that start ignore it
_MEET_S = 900.0  # for the node that keeps the store to listen
_GRACE_S = 20.0  # between SIGTERM and SIGKILL
_KILLED_S = 5.0  # after SIGKILL, for a rank to end
_LINGER_S = 2.0  # of the node that keeps the store, for the others to learn that the job is over
_RETURNS = 6  # times the silence that makes a node lost, until it must reach the store again
_FAILED = 1
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PLACE = "meet"  # key of the place where ranks of a start meet that have no repairs


class PlannedEnd:
    """Signals that ranks get when their node, or the job, is told to end. Single-threaded."""

    def __init__(
        self, words: Sequence[str], grace_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Be told nothing yet.

        Args:
            words: command line of the ranks.
            grace_s: seconds from SIGTERM to SIGKILL of what has started `keep`.
        """
        self._exit_signal = exit_signal(words)
        can_save = self._exit_signal is not None and grace_s > LEAVING_S
        self._save_by = self._exit_signal if can_save else signal.SIGTERM
        self._grace_s = grace_s
        self._clock = clock
        self._told_s: float | None = None
        self._next_s = 0.0
        self._has_said = self._has_ended = False

    def tell(self) -> None:
        """Learn that this node is to end; may be called by a handler of SIGTERM."""
        if self._told_s is None:
            self._told_s = self._clock()

    @property
    def is_told(self) -> bool:
        """True if this node, or the job, is to end."""
        return self._told_s is not None

    def is_new(self) -> bool:
        """Return, once, that this node is to end."""
        is_told = self.is_told  # a handler may change it at any time
        is_new, self._has_said = is_told and not self._has_said, is_told
        return is_new

    def describe(self) -> str:
        """Return what the time is enough for."""
        grace = f"{self._grace_s:.0f} s (--grace)"
        if self._exit_signal is signal.SIGTERM:
            return f"if no spare takes over, all ranks have {grace} to bring their state to storage"
        if self._save_by is signal.SIGTERM:
            why = (
                f"{grace} are not enough" if self._exit_signal else "without --exit-signal-handler"
            )
            return f"{why}: if no spare takes over, the newest state stays in memory, and storage lacks it"
        return (
            f"if no spare takes over, all ranks have {self._grace_s - LEAVING_S:.0f} s to bring their state "
            f"to storage, of {grace}"
        )

    def describe_sigterm(self) -> str:
        """Return what ranks do that get SIGTERM."""
        if self._exit_signal is signal.SIGTERM:
            return "its ranks get SIGTERM, save and end"
        return "its ranks end, and what they have in memory stays"

    def due_signal(self, is_to_save: bool) -> signal.Signals | None:
        """Return a signal that the ranks are to get now.

        Args:
            is_to_save: whether all ranks of the job are to save and end.
        """
        if is_to_save:
            self._has_said = True
            self.tell()
        if self._told_s is None or self._has_ended:
            return None
        now_s = self._clock()
        if now_s - self._told_s > max(self._grace_s - LEAVING_S, _AGAIN_S) or (
            is_to_save and self._save_by is signal.SIGTERM
        ):
            self._has_ended = True
            return signal.SIGTERM
        if not is_to_save or now_s < self._next_s:
            return None
        self._next_s = now_s + _AGAIN_S
        return self._save_by


class Agent:
    """Ranks of one node, and its seat. Single-threaded."""

    def __init__(
        self,
        options: KeepOptions,
        forks: Forks,
        reach: Callable[[float], SignedStore],
        memory: NodeMemory | None = None,
    ) -> None:
        """Register, and have no rank yet.

        Args:
            reach: returns a new connection to the job's store, or raises OSError or RepairError if there is
                none in so many seconds.
            memory: of the ranks on this node; None if nothing is known about it.
        """
        self._options = options
        self._forks = forks
        self._reach = reach
        self._store = reach(_MEET_S)
        self._period_s = poll_s(8 * options.num_nodes, PERIOD_S)
        self._store_name = f"the job's store on {options.meet[0]}"
        self._start = 0  # of all ranks, of which this node has some
        self._orders: list[Order] = []  # whose ranks do not run yet
        self._is_ready = False
        self._own = OwnNode(options.meet[0], memory, self._period_s, options.lost_after_s)
        self._own.open()
        silence_s = 0.0 if options.is_alone else options.kernel_silence_s
        self._observer = Observer(options.meet[0], options.run, options.token, silence_s)
        self._observer.open()
        self._look_s = LOOK_S if silence_s else self._period_s
        self._end = PlannedEnd(options.words, options.grace_s)
        self._seat = self._ask(self._register)

    def run(self) -> int | Role:
        """Run ranks until the job is over, and return its exit code; in a fork, what that is to do."""
        over: tuple[int, str] | None = None
        try:
            while over is None:
                if not self._forks.runs and (role := self._forks.start()) is not None:
                    return role
                over = self._step_or_register()
        except (RuntimeError, RepairError, TimeoutError) as error:
            over = _FAILED, f"{self._store_name} cannot be reached: {error}"
        except ConnectionError as error:
            over = _FAILED, f"processes that fork ranks fail: {error}"
        if over[1]:
            warn(f"node {self._options.name} ends: {over[1]}")
        if over == (0, "") and not self._forks.has_ranks:
            self._own.remove_memory()  # else these have removed it, if nobody needs it
        self._end_ranks(signal.SIGTERM)
        self._forks.close()
        return over[0]

    def drop(self) -> None:
        """Close in a forked process what belongs to the agent."""
        self._forks.drop()
        self._own.close()
        self._observer.close()
        self._store.close()

    def _step_or_register(self) -> tuple[int, str] | None:
        try:
            return self._step()
        except TimeoutError as error:
            if self._end.is_told:  # as a spare it would take ranks again
                self._end_ranks(signal.SIGKILL)
                code = _FAILED * self._options.keeps_store  # the job ends with it
                return code, f"it is told to end, and is cut off ({error})"
            self._give_up(f"is cut off ({error})")
            self._register_again()
        return None

    def _step(self) -> tuple[int, str] | None:
        """Do what is to be done now; return how the job has ended, or None."""
        name = self._options.name
        orders = self._ask(self._seat.new_orders)
        for order in orders:  # before it is reported how the others have ended
            self._forks.end(order.ends)
        if self._end.is_new():
            say(f"node {name} is told to end: {self._end.describe()}")
        facts = self._own.facts(has_ranks=self._has_ranks, server=self._forks.pid)
        facts |= self._observer.facts()
        over, is_lost, is_to_save = self._ask(partial(self._report, facts))
        if over is not None:
            return over
        if is_lost:
            if self._end.is_told:
                why = "another node has its ranks" if self._has_ranks else "it was a spare"
                self._end_ranks(signal.SIGKILL)
                return 0, f"{why}, and it is told to end"
            self._give_up("is replaced: it was silent, or did not reach another node")
            self._seat, orders = self._ask(self._register), []
        if (number := self._end.due_signal(is_to_save)) is not None:
            if number is signal.SIGTERM:
                say(f"node {name}: {self._end.describe_sigterm()}")
            self._forks.pass_on(number)
        for order in orders:
            self._take(order)
        self._run_ranks()
        self._hear()
        if self._forks.has_imported and not self._is_ready:
            self._is_ready = True
            set_process_name("moe_ft_node")  # examples/kubernetes calls a pod ready then
        return None

    def _hear(self) -> None:
        """Hear the fork server until the next beat: at once if this misses other nodes than before."""
        end_s = time.monotonic() + self._period_s
        while (rest_s := end_s - time.monotonic()) > 0 and not self._observer.look():
            self._forks.hear(min(rest_s, self._look_s))

    @property
    def _has_ranks(self) -> bool:
        return self._forks.has_ranks or bool(self._orders)

    def _report(self, facts: Mapping[str, Any]) -> tuple[tuple[int, str] | None, bool, bool]:
        """Show that this node lives; return how the job has ended, and the others as in `NodeSeat`."""
        self._seat.beat(self._forks.code, self._start, **facts)
        if self._end.is_told:
            self._seat.leave()
        if self._own.is_due():
            self._own.learn(self._seat.id, self._seat.addresses())
            self._observer.learn(self._seat.watched())
        return self._seat.over(), self._seat.is_lost(), self._seat.is_to_save()

    def _ask[Answer](self, ask: Callable[[], Answer]) -> Answer:
        """Return what the store answers; raises TimeoutError if it is silent as long as a lost node.

        A host that has lost its power closes no connection.
        """
        return call_within(ask, self._options.lost_after_s, self._store_name)

    def _register(self) -> NodeSeat:
        facts = self._own.facts(has_ranks=False) | self._observer.facts()
        return NodeSeat(self._store, self._options.name, self._options.number, **facts)

    def _register_again(self) -> None:
        """Register over a new connection. Calls that are blocked on the old one are abandoned."""
        limit_s = _RETURNS * self._options.lost_after_s
        self._store = call_within(
            lambda: self._reach(limit_s), limit_s + self._options.lost_after_s, self._store_name
        )
        self._seat = self._ask(self._register)

    def on_signal(self, number: int) -> None:
        """Learn that this node is to end, or pass another signal on to all ranks; a handler."""
        if number in _ENDING:
            self._end.tell()
        else:
            self._forks.pass_on(number)

    def _give_up(self, why: str) -> None:
        """Kill all ranks: others may have them."""
        warn(
            f"node {self._options.name} {why}: its ranks are killed, and it registers again as a spare"
        )
        self._end_ranks(signal.SIGKILL)

    def _take(self, order: Order) -> None:
        """Take an order; ranks of an earlier start end first."""
        if order.start != self._start:
            self._end_ranks(signal.SIGTERM, reports=True)
            self._start = order.start
        if 0 in order.ranks and not self._options.repairs:
            self._draw_place(order)
        self._orders.append(order)

    def _run_ranks(self) -> None:
        """Have ranks of orders forked, once it is known where they meet."""
        waiting = []
        for order in self._orders:
            if (place := self._place_of(order)) is None:
                waiting.append(order)
                continue
            for rank in order.ranks:
                assignment = self._assignment(order, rank)
                self._forks.run(assignment, self._variables(assignment, place))
        self._orders = waiting

    def _draw_place(self, order: Order) -> None:
        """Draw a port at which rank 0 listens for the other ranks of a start, as torchrun does."""
        host = own_host(self._options.meet[0])
        listener = job_store.listen_at((host, 0), is_alone=self._options.is_alone)
        place = [host, listener.getsockname()[1]]
        listener.close()
        self._ask(lambda: self._store.set(f"{_PLACE}/{order.start}", place))

    def _place_of(self, order: Order) -> tuple[str, int] | None:
        """Return where the ranks of an order meet: with repairs in the job's store; None if not known yet."""
        if self._options.repairs:
            return self._options.meet
        place = self._ask(lambda: self._store.get(f"{_PLACE}/{order.start}"))
        return None if place is None else (place[0], place[1])

    def _assignment(self, order: Order, rank: int) -> Assignment:
        size = self._options.ranks_per_node
        local_rank = rank % size
        return Assignment(
            rank=rank,
            local_rank=local_rank,
            world_size=order.num_nodes * size,
            node=self._options.name,
            start=self._options.restart + order.start,
            begun_from=self._options.restart + order.start - 1,
            round=order.round,
            died_s=order.died_s if order.round else None,
            lost_node=order.lost_node,
            host_rank=None if order.host is None else order.host * size + local_rank,
            is_watched=not self._options.is_alone,
            max_restarts=self._options.max_restarts,
            fewest_nodes=self._options.fewest,
            store=self._options.store,
            meet=self._options.meet,
            token=self._options.token,
        )

    def _variables(self, assignment: Assignment, place: tuple[str, int]) -> dict[str, str]:
        """Return the variables that torchrun would give to a rank: scripts read them."""
        size = self._options.ranks_per_node
        return {
            "RANK": str(assignment.rank),
            "LOCAL_RANK": str(assignment.local_rank),
            "WORLD_SIZE": str(assignment.world_size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": str(assignment.rank // size),
            "GROUP_WORLD_SIZE": str(assignment.world_size // size),
            "MASTER_ADDR": place[0],
            "MASTER_PORT": str(place[1]),
            "MOE_FT_NODE_ID": self._options.name,
            "TORCHELASTIC_RUN_ID": self._options.run,
            "TORCHELASTIC_RESTART_COUNT": str(assignment.start),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }

    def _end_ranks(self, number: int, *, reports: bool = False) -> None:
        """End all ranks with a signal, then kill those that live; with `reports`, show life meanwhile."""
        self._orders.clear()
        for signal_, grace_s in ((number, _GRACE_S), (signal.SIGKILL, _KILLED_S)):
            self._forks.pass_on(signal_)
            end_s = time.monotonic() + grace_s
            while self._forks.are_running and time.monotonic() < end_s:
                self._forks.hear(PERIOD_S)
                if reports:
                    self._ask(partial(self._seat.beat, None, self._start))
        self._forks.forget()


def coordinate(options: KeepOptions, open_start: Callable[[int], SignedStore]) -> NoReturn:
    """Decide about nodes, in the process that keeps the store, until it is killed.

    On a node without ranks it ends with the exit code of the job, and SIGTERM has all ranks save and end.
    """
    coordinator = Coordinator(
        lambda start: open_start(options.restart + start),
        policy_of(options),
        options.lost_after_s,
        options.status,
        options.kernel_silence_s,
    )
    if not options.has_ranks:
        signal.signal(signal.SIGTERM, lambda *_: coordinator.tell())
    while coordinator.over is None or options.has_ranks:
        coordinator.step()
        time.sleep(PERIOD_S)
    time.sleep(_LINGER_S)
    raise SystemExit(coordinator.over)


def _be_store(options: KeepOptions, listener: socket.socket) -> NoReturn:
    # SLURM signals all processes of a step: those who end save state first.
    for each in FORWARDED:
        signal.signal(each, signal.SIG_IGN)
    set_process_name("moe_ft_store")
    num_ranks = options.num_nodes * options.ranks_per_node
    job_store.serve(listener, options.run, options.token, num_ranks, partial(coordinate, options))


def main(options: KeepOptions, memory_of: Callable[[KeepOptions], NodeMemory | None]) -> NoReturn:
    """Be the agent of a node, and end with the exit code of the job.

    Args:
        memory_of: returns the memory that ranks use on this node.
    """
    set_process_name("moe_ft_joins")
    if options.ranks_per_node > 1:  # as torchrun does: each rank would use all cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    forks = Forks(partial(serve_forks, options.target))
    if options.has_ranks and (role := forks.start()) is not None:
        _run(role)
    found = join(options, forks, memory_of)
    if not isinstance(found, int):
        _run(found)
    raise SystemExit(found)


def join(
    options: KeepOptions,
    forks: Forks,
    memory_of: Callable[[KeepOptions], NodeMemory | None],
) -> int | Role:
    """Have a node take part in a job, and return its exit code; in a fork, what that is to do."""
    store = 0
    try:
        if options.keeps_store:
            listener = job_store.listen_at(options.meet, is_alone=options.is_alone)
            options = replace(options, meet=(options.meet[0], listener.getsockname()[1]))
            act = partial(_be_store, options, listener)
            if not options.has_ranks:
                return act
            agent_pid, store = os.getpid(), os.fork()
            if store == 0:
                forks.drop()
                os.setsid()
                follow_parent(agent_pid)
                return act
            listener.close()
        place = options.meet, options.run, options.token, options.restart

        def reach(deadline_s: float) -> SignedStore:
            return SignedStore(job_store.reach(*place, deadline_s), lambda: options.token)

        agent = Agent(options, forks, reach, memory_of(options))
    except (OSError, RepairError) as error:
        warn(f"node {options.name} cannot join the job: {error}")
        return _FAILED
    for each in FORWARDED:
        signal.signal(each, lambda number, _: agent.on_signal(number))
    found = agent.run()
    if not isinstance(found, int):
        agent.drop()
    elif store:
        time.sleep(0.0 if options.is_alone else _LINGER_S)
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
    return found


def _run(role: Role) -> NoReturn:
    """Be a forked process, and end with it."""
    role()
    raise SystemExit(0)
