"""Collectives of simulated ranks, and functions of torch.distributed in the places of the real ones.

What groups do, and how they fail, is in groups.py.
"""

from collections.abc import Sequence
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as real

from moe_ft.engine import agreement, exchange
from moe_ft.recovery import agree, meet, put_back
from tests.simulation.active import Patches, World, world
from tests.simulation.groups import Group, Round, Shared, pack, unpack
from tests.simulation.kernel import Kernel, Process
from tests.simulation.store import default_store

if TYPE_CHECKING:
    from tests.simulation.network import Network

_DELAY_S, _JITTER_S = 50e-6, 300e-6
_TIMEOUT = timedelta(minutes=30)


class Collectives:
    """All groups of all jobs.

    Attributes:
        hang_probability: with which a member does not see that another one has ended.
    """

    def __init__(self, kernel: Kernel, network: "Network | None" = None) -> None:
        self.kernel, self.network = kernel, network
        self.random = kernel.random.random
        self.hang_probability = 0.0
        self._shared: dict[tuple[int, tuple[int, ...], int], Shared] = {}
        self._num_made: dict[tuple[Process, tuple[int, ...]], int] = {}
        self._groups: dict[Process, list[Group]] = {}
        if network is not None:
            network.on_cut.append(self._cut)

    def draw_delay(self) -> float:
        """Return seconds that a message takes."""
        seconds = _DELAY_S + _JITTER_S * self.random()
        return seconds + 0.05 * self.random() if self.random() < 0.01 else seconds

    def join(self, process: Process, *, rank: int, start: int, world_size: int) -> Group:
        """Make a process a rank of a job; return the group of all ranks."""
        process.local.update(rank=rank, start=start, world_size=world_size)
        self._groups[process] = []
        if self.network is not None:
            self.network.host_of(process.node)
        process.at_death.append(lambda: self._end(process))
        group = self._make(process, tuple(range(world_size)), -1, _TIMEOUT.total_seconds())
        process.local["world_group"] = group
        return group

    def new_group(
        self,
        process: Process,
        members: Sequence[int] | None,
        timeout_s: float = _TIMEOUT.total_seconds(),
    ) -> Group | None:
        """Make a group together with its other members; return None if this process is none.

        Raises:
            RuntimeError: if the others do not come in time.
        """
        self.kernel.event("new group")
        everyone = range(process.local["world_size"])
        ranks = tuple(everyone) if members is None else tuple(members)
        if process.local["rank"] not in ranks:
            return None
        number = self._num_made.get((process, ranks), 0)
        self._num_made[process, ranks] = number + 1
        group = self._make(process, ranks, number, timeout_s)
        group.begin("connect", True).wait()
        return group

    def _make(
        self, process: Process, ranks: tuple[int, ...], number: int, timeout_s: float
    ) -> Group:
        key = (process.local["start"], ranks, number)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = Shared(ranks)
        own = ranks.index(process.local["rank"])
        group = shared.groups[own] = Group(self, shared, process, own, timeout_s)
        self._groups[process].append(group)
        return group

    def destroy(self, process: Process, group: Group | None) -> None:
        """Let go of a group, or of all; raises ValueError if that was done before."""
        self.kernel.event("destroy group")
        own = self._groups[process]
        for each in list(own) if group is None else [group]:
            if each not in own:
                raise ValueError("Invalid process group specified")
            own.remove(each)
            each.destroy()

    def exchange(self, group: Group, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the values of all members. Called by all of them."""
        work = group.begin("exchange", pack(value), timeout_s)
        work.wait()
        return [unpack(each) for each in work.values]

    def _end(self, process: Process) -> None:
        is_lost = self.network is not None and self.network.is_lost(process.node)
        for group in self._groups.pop(process):
            for other in group.shared.groups:
                if other is not None and other is not group and other.process.is_alive:
                    is_silent = is_lost or self.random() < self.hang_probability
                    group.tell(other, is_silent=is_silent)

    def _cut(self, a: list[str], b: list[str]) -> None:
        """Break the groups that have members on both sides."""
        for groups in list(self._groups.values()):
            for group in groups:
                own = group.process.node
                side = b if own in a else a if own in b else []
                for other in group.shared.groups:
                    if other is not None and other is not group and other.process.node in side:
                        group.tell(other)


def _world() -> World:
    current = world()
    assert current is not None
    return current


def _group_of(group: Group | None) -> Group:
    found = _world().process.local["world_group"] if group is None else group
    assert isinstance(found, Group)
    return found


class Distributed:
    """`torch.distributed` in a module of the product. In no simulated thread everything is the real one's."""

    def __getattr__(self, name: str) -> Any:
        simulated = _SIMULATED.get(name)
        return getattr(real, name) if simulated is None or world() is None else simulated


def is_initialized() -> bool:
    return "world_group" in _world().process.local


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta = _TIMEOUT,
    backend: str | None = None,
    **_: Any,
) -> Any:
    """Make a group. Called by all its members, in the same order."""
    current = _world()
    seconds = timeout.total_seconds()
    made = current.collectives.new_group(current.process, ranks, seconds)
    return real.GroupMember.NON_GROUP_MEMBER if made is None else made


def destroy_process_group(group: Group | None = None) -> None:
    current = _world()
    current.collectives.destroy(current.process, group)


def get_world_size(group: Group | None = None) -> int:
    return _group_of(group).size()


def get_rank(group: Group | None = None) -> int:
    return _group_of(group).own


def get_global_rank(group: Group, group_rank: int) -> int:
    return group.members[group_rank]


def get_process_group_ranks(group: Group | None = None) -> list[int]:
    return list(_group_of(group).members)


def gather(_: World, group: Group, content: bytes) -> list[bytes] | None:
    work = group.begin("gather", content)
    work.wait()
    return None if group.own else list(work.values)


def scatter(_: World, group: Group, contents: Sequence[bytes]) -> bytes:
    packed = None if group.own else tuple(contents)
    work = group.begin("scatter", packed, source=0)
    work.wait()
    found: bytes = work.values[0][group.own]
    return found


def meet_ranks(_: World, value: Any, decoder: Any) -> list[Any]:
    work = _group_of(None).begin("meet", msgspec.json.encode(value))
    work.wait()
    return [exchange.decode(each, decoder) for each in work.values]


def monitored_barrier(
    group: Group | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    seconds = None if timeout is None else timeout.total_seconds()
    _group_of(group).begin("monitored_barrier", None, seconds).wait()


def barrier(group: Group | None = None, **_: Any) -> None:
    monitored_barrier(group)


def broadcast(tensor: torch.Tensor, src: int, group: Group | None = None) -> None:
    found = _group_of(group)
    source = found.members.index(src)
    is_own = source == found.own
    value = tensor.detach().clone() if is_own else None

    def receive(current: Round) -> None:
        tensor.copy_(current.values[source])

    found.begin("broadcast", value, source=source, receive=None if is_own else receive).wait()


def all_reduce(
    tensor: torch.Tensor, op: Any = real.ReduceOp.SUM, group: Group | None = None
) -> None:
    _group_of(group).reduce(tensor, op, None).wait()


_SIMULATED: dict[str, Any] = {
    each.__name__: each
    for each in (
        is_initialized,
        new_group,
        destroy_process_group,
        get_world_size,
        get_rank,
        get_global_rank,
        get_process_group_ranks,
        monitored_barrier,
        barrier,
        broadcast,
        all_reduce,
    )
}
_SIMULATED["distributed_c10d"] = SimpleNamespace(_get_default_store=lambda: default_store(_world()))


def install(patches: Patches, *modules: ModuleType) -> None:
    """Replace torch.distributed in the product, and in more modules."""
    for module in (agreement, agree, meet, put_back, *modules):
        patches.set(module, "dist", Distributed())
    for name, simulated in (("gather", gather), ("scatter", scatter), ("meet", meet_ranks)):
        patches.divert(exchange, name, simulated)
