"""Process groups of simulated ranks, as gloo's behave.

A group of gloo connects all its members to each other. When one of them ends or lets go of the group, the
others see that as soon as they need it; when it only falls silent, they wait until a timeout. After either, a
member can use the group no more. Who makes them is in collectives.py.
"""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from tests.simulation.kernel import Process, Waiting

if TYPE_CHECKING:
    from tests.simulation.collectives import Collectives

_FOREVER = float("inf")
_LATE_S = 0.05  # at most, until the end of a process is seen
_COMBINE = (
    (ReduceOp.MIN, torch.minimum),
    (ReduceOp.MAX, torch.maximum),
    (ReduceOp.SUM, torch.add),
)
_PLAIN = (int, float, bytes, str, bool, type(None))


def pack(value: Any) -> Any:
    """Return a value as it travels: what cannot be changed as it is, all else pickled."""
    kind = type(value)
    if kind in _PLAIN or (kind is tuple and all(type(each) in _PLAIN for each in value)):
        return value
    return _Pickled(value)


def unpack(value: Any) -> Any:
    return pickle.loads(value.content) if type(value) is _Pickled else value


class _Pickled:
    __slots__ = ("content",)

    def __init__(self, value: Any) -> None:
        self.content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


class Round:
    """One collective of a group, from its first member to its last.

    Attributes:
        values: by rank in the group, as they travel.
        works: by rank in the group.
        result: computed once from the values; receivers copy it.
    """

    __slots__ = ("kind", "num_arrived", "result", "values", "works")

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.num_arrived = kind, 0
        self.values: list[Any] = [None] * size
        self.works: list[Work | None] = [None] * size
        self.result: Any = None


class Work:
    """One member's part in a collective.

    Attributes:
        source: the member from which alone something comes; None if all are needed.
    """

    __slots__ = (
        "_deadline_s",
        "_group",
        "_receive",
        "_round",
        "_timeout_s",
        "error",
        "index",
        "is_done",
        "is_under_way",
        "source",
        "waiting",
    )

    def __init__(
        self,
        group: "Group",
        current: Round,
        index: int,
        timeout_s: float,
        source: int | None,
        receive: Callable[[Round], None] | None,
    ) -> None:
        self._group, self._round, self.index = group, current, index
        self._timeout_s, self._deadline_s = timeout_s, group.kernel.now + timeout_s
        self._receive, self.source = receive, source
        self.error = ""
        self.is_done = self.is_under_way = False
        self.waiting = Waiting()

    @property
    def values(self) -> list[Any]:
        """Values of the members by rank in the group, as they travel."""
        return self._round.values

    def is_completed(self) -> bool:
        return self.is_done or bool(self.error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until everything has arrived; raises RuntimeError if it does not."""
        group = self._group
        if not self.is_done and not self.error:
            kernel = group.kernel
            rest_s = self._deadline_s - kernel.now
            if timeout is not None:
                rest_s = min(rest_s, timeout.total_seconds())
            if rest_s > 0:
                kernel.wait(self.waiting, rest_s)
            if not self.is_done and not self.error:
                group.time_out(self._timeout_s)
                assert self.error
        if self.error:
            raise RuntimeError(self.error)
        return True

    def advance(self) -> None:
        """Take what has arrived, when its time has come."""
        if self.is_under_way or self.is_done or self.error:
            return
        values, source = self._round.values, self.source
        is_whole = self._round.num_arrived == len(values)
        # A source has sent everything only when the others have received it.
        if is_whole or (source not in (None, self._group.own) and values[source] is not None):
            self.is_under_way = True
            self._group.kernel.call_later(self._group.draw_delay(), self._arrive)

    def _arrive(self) -> None:
        group = self._group
        if self.error or not group.process.is_alive:
            return
        if self.index >= group.limit:  # the other end of a connection is silent
            return
        rest_s = group.severed_s()
        if rest_s > 0:
            if rest_s < _FOREVER:
                group.kernel.call_later(rest_s + group.draw_delay(), self._arrive)
            return
        if self._receive is not None:
            self._receive(self._round)
        self.is_done = True
        group.num_done = max(group.num_done, self.index + 1)
        group.pending.pop(self, None)
        group.kernel.wake(self.waiting)

    def fail(self, error: str) -> None:
        self.error = error
        self._group.pending.pop(self, None)
        self._group.kernel.wake(self.waiting)


class Shared:
    """Common part of a group.

    Attributes:
        rounds: collectives that not all members have begun, by number.
        store: of the start, once somebody has asked for it.
    """

    __slots__ = ("groups", "members", "rounds", "store")

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.groups: list[Group | None] = [None] * len(members)
        self.rounds: dict[int, Round] = {}
        self.store: Any = None


class Group:
    """A process group as one member has it.

    Attributes:
        own: this member's rank in the group.
        limit: number of the first collective for which somebody has gone whom it needs.
        num_done: how many collectives it has completed.
        pending: what it has begun and not completed.
    """

    def __init__(
        self,
        collectives: "Collectives",
        shared: Shared,
        process: Process,
        own: int,
        timeout_s: float,
    ) -> None:
        self._collectives, self.shared = collectives, shared
        self.kernel, self.process, self.own = collectives.kernel, process, own
        self.timeout_s = timeout_s
        self.limit = _FOREVER
        self.num_done = self._num_begun = 0
        self.pending: dict[Work, None] = {}
        self._error = ""
        self.is_destroyed = False

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the job, ascending or as they were given."""
        return self.shared.members

    def size(self) -> int:
        return len(self.shared.members)

    def rank(self) -> int:
        return self.own

    def begin(
        self,
        kind: str,
        value: Any,
        timeout_s: float | None = None,
        *,
        source: int | None = None,
        receive: Callable[[Round], None] | None = None,
    ) -> Work:
        """Begin a collective.

        Args:
            value: what this member puts in, as it travels.
            source: the only member whose value counts; None for all.
            receive: called when everything has arrived.
        """
        self.kernel.event(kind)
        if self.is_destroyed:
            raise ValueError("Invalid process group specified")
        index, self._num_begun = self._num_begun, self._num_begun + 1
        rounds = self.shared.rounds
        current = rounds.get(index) or rounds.setdefault(index, Round(kind, self.size()))
        assert current.kind == kind, f"{self.process} begins {kind}, others {current.kind}"
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        work = Work(self, current, index, limit_s, source, receive)
        if self._error and index >= self.limit:
            work.error = self._error
            return work
        current.values[self.own], current.works[self.own] = value, work
        current.num_arrived += 1
        self.pending[work] = None
        if current.num_arrived == self.size():
            del rounds[index]
        elif source != self.own:
            work.advance()
            return work
        for each in current.works:
            if each is not None:
                each.advance()
        return work

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        """Begin an all-reduce of one tensor, which changes when it is done."""
        (tensor,) = tensors
        timeout_s = options.timeout.total_seconds()
        work = self.reduce(tensor, options.reduceOp, timeout_s if timeout_s > 0 else None)
        if work.error and self._collectives.random() < 0.3:
            raise RuntimeError(work.error)
        return work

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        """Begin to send the tensor of one member to the others, where it changes when it is done."""
        (tensor,) = tensors
        source = int(options.rootRank)
        is_own = source == self.own

        def receive(current: Round) -> None:
            tensor.copy_(current.values[source])

        work = self.begin(
            "broadcast",
            tensor.detach().clone() if is_own else None,
            options.timeout.total_seconds(),
            source=source,
            receive=None if is_own else receive,
        )
        if work.error and self._collectives.random() < 0.3:
            raise RuntimeError(work.error)
        return work

    def reduce(self, tensor: torch.Tensor, op: Any, timeout_s: float | None) -> Work:
        combine = next(function for known, function in _COMBINE if op == known)

        def receive(current: Round) -> None:
            if current.result is None:
                result = current.values[0].clone()
                for value in current.values[1:]:
                    combine(result, value, out=result)
                current.result = result
            tensor.copy_(current.result)

        return self.begin("all-reduce", tensor.detach().clone(), timeout_s, receive=receive)

    # Failures

    def draw_delay(self) -> float:
        """Return the seconds that a collective takes after its last member has come."""
        seconds, network = self._collectives.draw_delay(), self._collectives.network
        if network is None or not network.has_slowness:
            return seconds
        nodes = [each.process.node for each in self.shared.groups if each is not None]
        return seconds * network.slowness(*nodes)

    def severed_s(self) -> float:
        """Return the seconds until this member can talk to all others; 0 if it can."""
        network = self._collectives.network
        if network is None or not network.has_outage:
            return 0.0
        own = self.process.node
        groups = self.shared.groups
        # What somebody has sent before its node was lost arrives or does not, as chance has it.
        nodes = {each.process.node: None for each in groups if each and each.process.is_alive}
        return max(network.severed_s(own, node) for node in nodes)

    def notify_others(self) -> None:
        for other in self.shared.groups:
            if other is not None and other is not self and other.process.is_alive:
                self.tell(other)

    def tell(self, other: "Group", *, is_silent: bool = False) -> None:
        """Let another member see that this one has gone.

        Args:
            is_silent: whether it only waits in vain.
        """
        collectives, num_done = self._collectives, self.num_done
        delay_s = collectives.random() ** 4 * _LATE_S  # often as soon as messages arrive
        if collectives.network is not None:
            delay_s += collectives.network.severed_s(self.process.node, other.process.node)
        if delay_s == _FOREVER:
            delay_s, is_silent = 0.0, True
        reason = f"Connection closed by peer [{self.process.node}]:{self.process.pid}"

        def see() -> None:
            # What this member has completed it has also sent.
            other.limit = min(other.limit, num_done)
            if not is_silent:
                other.break_off(reason)

        collectives.kernel.call_later(delay_s, see)

    def break_off(self, reason: str) -> None:
        """Fail in everything that needs a member that has gone, now and from now on."""
        self._error = self._error or f"[gloo/transport/tcp/pair.cc:553] {reason}"
        for work in list(self.pending):
            if work.index >= self.limit:
                work.fail(self._error)

    def time_out(self, timeout_s: float) -> None:
        """Fail after too long a time; the others see that."""
        self._error = (
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
            f"{timeout_s * 1000:.0f}ms for recv operation to complete"
        )
        self.limit = 0
        for work in list(self.pending):
            work.fail(self._error)
        self.notify_others()

    def destroy(self) -> None:
        self.is_destroyed = True
        for work in list(self.pending):
            work.fail("[gloo/transport/tcp/pair.cc:553] Connection closed: the group was destroyed")
        self.notify_others()
