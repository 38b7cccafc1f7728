"""The process of a node that `keep` starts without torchrun: it has the zygote fork ranks, as it is told.

It is forked from the zygote, as ranks are, and asks it for each rank over a connection. It stands for them:
if it ends, they are killed. The law (law.py) gives it orders, from a process on node 0 or on a node without
ranks. If its node was called lost, it kills its ranks and comes again, as a spare. So it does if the
store is silent for as long as makes a node lost: others may have its ranks, and it would not know.

SIGTERM tells it that its node is to end, and when: then a spare gets its ranks, or all ranks of the job get
Megatron's exit signal, bring their state to storage and end. If that takes too long, they get SIGTERM in time
to leave breakpoints in memory.
"""

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from moe_ft.cluster import job_store
from moe_ft.cluster.coordinator import Coordinator, policy_of
from moe_ft.cluster.forked_rank import follow_parent
from moe_ft.cluster.link import START, Link, exit_signal, token_of
from moe_ft.cluster.own_node import OwnNode
from moe_ft.cluster.protocol import (
    FORWARDED,
    Answer,
    RankRequest,
    receive_answer,
    say,
    send_request,
    send_signal,
)
from moe_ft.cluster.roster import PERIOD_S, NodeSeat, Order
from moe_ft.cluster.signed_store import SignedStore, poll_s
from moe_ft.cluster.target import LEAVING_S
from moe_ft.errors import RepairError
from moe_ft.files.progress import call_within
from moe_ft.processes import set_process_name

_MEET_S = 900.0  # for the node that keeps the store to import and listen
_ANSWER_S = 30.0  # of the zygote
_GRACE_S = 20.0  # between SIGTERM and SIGKILL
_AGAIN_S = 5.0  # until ranks get the exit signal again: those that start ignore it
_LINGER_S = 2.0  # of the node that keeps the store, for the others to learn that the job is over
_RETURNS = 6  # times the silence that makes a node lost, until it must reach the store again
_FAILED = 1


@dataclass(eq=False, slots=True)
class _Rank:
    """A rank of this node.

    Attributes:
        asked_s: when the zygote was asked for it; None once it has answered.
        code: its exit code, as a shell has it.
    """

    rank: int
    connection: socket.socket
    asked_s: float | None
    code: int | None = None


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
        self._grace_s, self._clock = grace_s, clock
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


class Node:
    """Ranks of one node, and its seat. Single-threaded."""

    def __init__(
        self,
        environment: Mapping[str, str],
        words: Sequence[str],
        reach: Callable[[float], SignedStore],
    ) -> None:
        """Come to the job, and have no rank yet.

        Args:
            environment: of all ranks; it names the node and its number.
            words: command line of the ranks.
            reach: returns a new connection to the job's store, or raises OSError or RepairError if there is
                none in so many seconds.
        """
        self._environment, self._words = dict(environment), tuple(words)
        self._reach, self._store = reach, reach(_MEET_S)
        self._name, self._number = environment["MOE_FT_NODE_ID"], int(environment["GROUP_RANK"])
        self._period_s = poll_s(8 * int(environment["GROUP_WORLD_SIZE"]), PERIOD_S)
        self._store_name = f"the job's store on {environment['MASTER_ADDR']}"
        self._lost_after_s = float(environment["MOE_FT_KEEP_LOST_AFTER_S"])
        self._ranks: list[_Rank] = []
        self._start = 0  # of these
        self._own = OwnNode(environment, words, self._period_s, self._lost_after_s)
        self._own.open()
        self._selector = selectors.DefaultSelector()
        self._end = PlannedEnd(words, float(environment["MOE_FT_KEEP_GRACE_S"]))
        self._seat = self._ask(self._come)

    def run(self) -> int:
        """Run ranks until the job is over, and return its exit code."""
        over: tuple[int, str] | None = None
        try:
            while over is None:
                try:
                    over = self._step()
                except TimeoutError as error:
                    if self._end.is_told:  # as a spare it would take ranks again
                        self._end_ranks(signal.SIGKILL)
                        code = _FAILED * _keeps_store(self._environment)  # the job ends with it
                        over = code, f"it is told to end, and is cut off ({error})"
                    else:
                        self._give_up(f"is cut off ({error})")
                        self._come_again()
        except (RuntimeError, RepairError, TimeoutError) as error:  # the first is torch's
            over = _FAILED, f"{self._store_name} cannot be reached: {error}"
        except ConnectionError as error:
            over = _FAILED, f"the process that forks ranks has ended: {error}"
        if over[1]:
            say(f"node {self._name} ends: {over[1]}")
        if over == (0, "") and not self._ranks:  # else these have removed it, if nobody needs it
            self._own.remove_memory()
        self._end_ranks(signal.SIGTERM)
        if _keeps_store(self._environment):
            time.sleep(_LINGER_S)
        return over[0]

    def _step(self) -> tuple[int, str] | None:
        """Do what is to be done now; return how the job has ended, or None."""
        orders = self._ask(self._seat.new_orders)
        for each in orders:  # before it is said how the others have ended
            self._let_go(each)
        codes = [each.code for each in self._ranks]
        have_ended = any(codes) or (codes and None not in codes)
        code = max(each or 0 for each in codes) if have_ended else None
        if self._end.is_new():
            say(f"node {self._name} is told to end: {self._end.describe()}")
        facts = self._own.facts(has_ranks=bool(self._ranks))
        over, is_lost, is_to_save = self._ask(partial(self._report, code, facts))
        if over is not None:
            return over
        if is_lost:
            if self._end.is_told:
                why = "another node has its ranks" if self._ranks else "it was a spare"
                self._end_ranks(signal.SIGKILL)
                return 0, f"{why}, and it is told to end"
            self._give_up("is replaced: it was silent, or did not reach another node")
            self._seat, orders = self._ask(self._come), []
        if (number := self._end.due_signal(is_to_save)) is not None:
            if number is signal.SIGTERM:
                say(f"node {self._name}: {self._end.describe_sigterm()}")
            self.pass_on(number)
        for order in orders:
            self._take(order)
        self._hear(self._period_s)
        return None

    def _report(
        self, code: int | None, facts: Mapping[str, Any]
    ) -> tuple[tuple[int, str] | None, bool, bool]:
        """Show that this node lives; return how the job has ended, and the others as in `NodeSeat`."""
        self._seat.beat(code, self._start, **facts)
        if self._end.is_told:
            self._seat.leave()
        if self._own.is_due():
            self._own.learn(self._seat.id, self._seat.addresses())
        return self._seat.over(), self._seat.is_lost(), self._seat.is_to_save()

    def _ask[Answer](self, ask: Callable[[], Answer]) -> Answer:
        """Return what the store answers; raises TimeoutError if it is silent as long as a lost node.

        torch waits up to 15 minutes for a host that has lost its power.
        """
        return call_within(ask, self._lost_after_s, self._store_name)

    def _come(self) -> NodeSeat:
        facts = self._own.facts(has_ranks=False)
        return NodeSeat(self._store, self._name, self._number, **facts)

    def _come_again(self) -> None:
        """Come over a new connection: what waits on the old one may wait on."""
        limit_s = _RETURNS * self._lost_after_s
        self._store = call_within(
            lambda: self._reach(limit_s), limit_s + self._lost_after_s, self._store_name
        )
        self._seat = self._ask(self._come)

    def on_signal(self, number: int) -> None:
        """Pass a signal on to all ranks, or learn from SIGTERM that this node is to end; a handler."""
        if number == signal.SIGTERM:
            self._end.tell()
        else:
            self.pass_on(number)

    def pass_on(self, number: int) -> None:
        """Send a signal to all ranks."""
        for each in self._ranks:
            if each.code is None:
                with suppress(OSError):
                    send_signal(each.connection, number)

    def _give_up(self, why: str) -> None:
        """Kill all ranks: others may have them."""
        say(f"node {self._name} {why}: its ranks are killed, and it comes again as a spare")
        self._end_ranks(signal.SIGKILL)

    def _let_go(self, order: Order) -> None:
        """Kill ranks that another node gets."""
        for each in [each for each in self._ranks if each.rank in order.ends]:
            self._ranks.remove(each)
            with suppress(OSError):  # it has ended
                send_signal(each.connection, signal.SIGKILL)

    def _take(self, order: Order) -> None:
        """Have the zygote fork the ranks of an order, once those of an earlier start have ended."""
        if order.start != self._start:
            self._end_ranks(signal.SIGTERM, lives=True)
            self._start = order.start
        num_ranks = order.num_nodes * len(order.ranks)
        for place, rank in enumerate(order.ranks):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(place), "WORLD_SIZE": str(num_ranks)}
            if order.start:
                variables[START] = str(order.start)
            os.umask(mask := os.umask(0))
            request = RankRequest(
                words=self._words,
                environment=self._environment | variables,
                folder=os.getcwd(),
                mask=mask,
                cpus=tuple(sorted(os.sched_getaffinity(0))),
                round=order.round,
                died_s=order.died_s,
                lost_node=order.lost_node,
            )
            connection = _connect(self._environment["MOE_FT_KEEP_SOCKET"])
            send_request(connection, request, (0, 1, 2))
            self._ranks.append(found := _Rank(rank, connection, time.monotonic()))
            self._selector.register(connection, selectors.EVENT_READ, found)

    def _hear(self, timeout_s: float) -> None:
        """Take answers of the zygote for a while."""
        for key, _ in self._selector.select(timeout_s):
            rank: _Rank = key.data
            answer, number = receive_answer(rank.connection)
            rank.asked_s = None
            if answer is Answer.RUNS:
                continue
            rank.code = _FAILED
            if answer is Answer.ENDED:
                code = os.waitstatus_to_exitcode(number)
                rank.code = 128 - code if code < 0 else code
            self._selector.unregister(rank.connection)
            rank.connection.close()
        now_s = time.monotonic()
        if any(
            each.asked_s is not None and now_s - each.asked_s > _ANSWER_S for each in self._ranks
        ):
            raise ConnectionError(f"it has not answered for {_ANSWER_S:.0f} s")

    def _end_ranks(self, number: int, *, lives: bool = False) -> None:
        """End all ranks with a signal, and kill those that do not; with `lives`, beat meanwhile."""
        self.pass_on(number)
        end_s = time.monotonic() + _GRACE_S
        try:
            while any(each.code is None for each in self._ranks) and time.monotonic() < end_s:
                self._hear(PERIOD_S)
                if lives:
                    self._ask(partial(self._seat.beat, None, self._start))
        except ConnectionError:
            pass
        for each in self._ranks:
            if each.code is None:  # the zygote kills it then
                self._selector.unregister(each.connection)
                each.connection.close()
        self._ranks.clear()


def _connect(path: str) -> socket.socket:
    """Return a connection to the zygote, which listens: this process is its fork."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def _keeps_store(environment: Mapping[str, str]) -> bool:
    return environment["GROUP_RANK"] == environment["MOE_FT_KEEP_STORE_ON"]


def _has_ranks(environment: Mapping[str, str]) -> bool:
    """Return whether this node trains or is a spare."""
    return not _keeps_store(environment) or environment["GROUP_RANK"] == "0"


def serve_store(
    environment: Mapping[str, str], words: Sequence[str], listener: socket.socket
) -> NoReturn:
    """Keep the job's store, and decide about nodes, until this process is killed.

    On a node without ranks it ends with the exit code of the job, and SIGTERM has all ranks save and end.
    """

    def coordinate(open_start: Callable[[int], SignedStore]) -> NoReturn:
        lost_after_s = float(environment["MOE_FT_KEEP_LOST_AFTER_S"])
        policy, status = policy_of(environment, words), environment["MOE_FT_KEEP_STATUS"]
        coordinator = Coordinator(open_start, policy, lost_after_s, status)
        if not _has_ranks(environment):
            signal.signal(signal.SIGTERM, lambda *_: coordinator.tell())
        while coordinator.over is None or _has_ranks(environment):
            coordinator.step()
            time.sleep(PERIOD_S)
        time.sleep(_LINGER_S)
        raise SystemExit(coordinator.over)

    job_store.serve(listener, environment, token_of(environment), coordinate)


def start_store(environment: Mapping[str, str], words: Sequence[str]) -> None:
    """Fork the process that keeps the store of the job."""
    listener, parent = job_store.listen(environment), os.getpid()
    if os.fork() == 0:
        os.setsid()
        follow_parent(parent)
        _be_store(environment, words, listener)
    listener.close()


def _be_store(
    environment: Mapping[str, str], words: Sequence[str], listener: socket.socket
) -> NoReturn:
    # SLURM signals all processes of a step, and the zygote its group: those who end save state first.
    for each in FORWARDED:
        signal.signal(each, signal.SIG_IGN)
    set_process_name("moe_ft_store")
    serve_store(environment, words, listener)


def main(words: Sequence[str]) -> None:
    """Be the process of a node.

    Args:
        words: command line of the ranks.
    """
    set_process_name("moe_ft_joins")
    environment = dict(os.environ)
    names = (environment.get(name) for name in ("MOE_FT_NODE_ID", "SLURMD_NODENAME"))
    environment["MOE_FT_NODE_ID"] = next(filter(None, names), socket.gethostname())
    link = Link(token=token_of(environment))
    try:
        if not _has_ranks(environment):
            _be_store(environment, words, job_store.listen(environment))
        if _keeps_store(environment):
            start_store(environment, words)
        node = Node(
            environment,
            words,
            lambda s: SignedStore(job_store.connect(environment, link, s), lambda: link.token),
        )
    except (OSError, RepairError) as error:
        say(f"node {environment['MOE_FT_NODE_ID']} cannot join the job: {error}")
        raise SystemExit(_FAILED) from None
    set_process_name("moe_ft_node")  # examples/kubernetes calls a pod ready then
    for each in FORWARDED:
        signal.signal(each, lambda number, _: node.on_signal(number))
    raise SystemExit(node.run())


if __name__ == "__main__":
    main(sys.argv[1:])
