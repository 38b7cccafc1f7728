"""A simulated rank that trains and repairs in place, with the membership, rounds and watcher of the product.

It stands for Megatron's loop, for megatron/fault_tolerance/repair/seam.py and for the phases of a round, in
their order. Its state is a chain of hashes, so that a value of a wrong iteration, rank or start shows.
"""

import os
import zlib
from dataclasses import dataclass, field
from typing import Any

from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import RepairError
from moe_ft.keeper import job_store
from moe_ft.keeper.link import Heart, Link
from moe_ft.keeper.rounds import Rounds
from tests.simulation.active import World
from tests.simulation.kernel import Process, Waiting
from tests.simulation.repairs import product
from tests.simulation.repairs.machine import LINK, MACHINE

TIMEOUT_S = 60.0  # of groups in training, and twice that in a repair
HEARTBEAT_S = 5.0
CONNECT_S = 30.0
REPAIR_S = 600.0
LONGEST_BUILD_S = 15.0
ITERATION_S = 1.0
KEPT = 3  # iterations whose state is in memory
HANGS, RAISES = "hangs", "raises"  # local state of a process


@dataclass(eq=False, slots=True)
class Operation:
    """One collective operation, by the ranks that have come to it."""

    values: dict[int, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Group:
    """All ranks of a round of a start.

    Attributes:
        ends: ``[rank]`` the process and its links.
    """

    number: int
    ends: dict[int, tuple[Process, "Ends"]] = field(default_factory=dict)
    operations: dict[int, Operation] = field(default_factory=dict)


class Ends:
    """Links of one rank: a transport of the product's `Links`, and its collectives. One group at a time."""

    name, fails_silently = "simulated", False

    def __init__(self, job: Any, start: Any, rank: int) -> None:
        self._job, self._start, self._rank = job, start, rank
        self._kernel, self._process = job.world.kernel, job.world.process
        self._group: Group | None = None
        self._place, self._has_ended = 0, False

    def mark(self) -> None:
        """Say that there is nothing before."""

    def made_since(self, mark: None) -> dict[Any, Any]:
        return {self: None}

    def end(self, made: dict[Any, Any]) -> int:
        self._has_ended = bool(made) or self._has_ended
        self._job.machine.changed()
        return len(made)

    def begin(self) -> None:
        self._group, self._has_ended = None, False

    def failure(self, made: dict[Any, Any]) -> str:
        """Say that nothing fails in silence."""
        return ""

    settle = leave = mark

    def connect(self, number: int, timeout_s: float) -> None:
        """Connect to all ranks of a round. Nobody learns meanwhile that one of them has died."""
        self._kernel.event("swap")
        group = self._start.groups.setdefault(number, Group(number))
        self._job.oracle.connects(group, self._rank, self._process)
        group.ends[self._rank] = self._process, self
        self._job.machine.changed()
        if not self._job.machine.wait_for(lambda: len(group.ends) == self._start.size, timeout_s):
            raise RuntimeError(f"timed out after {timeout_s:g} s waiting for ranks to connect")
        self._group, self._place = group, 0

    def gather(self, name: str, value: Any, timeout_s: float) -> list[Any]:
        """Return what all ranks bring to an operation that has a name. Called by all ranks."""
        kernel, group = self._kernel, self._group
        kernel.event(name.partition(":")[0])
        assert group is not None
        operation = group.operations.setdefault(self._place, Operation())
        self._place += 1
        if self._is_broken(group):
            raise RuntimeError("[gloo] Connection closed by peer")
        operation.values[self._rank] = value
        operation.names.add(name)
        size = self._start.size
        if len(operation.values) == size:
            self._job.oracle.completes(group, operation)
            self._job.machine.changed()
        self._job.machine.wait_for(
            lambda: len(operation.values) == size or self._is_broken(group), timeout_s
        )
        if len(operation.values) == size:
            return [operation.values[rank] for rank in range(size)]
        if self._is_broken(group):
            raise RuntimeError("[gloo] Connection closed by peer")
        raise RuntimeError(f"Timed out waiting {timeout_s:g} s for recv operation to complete")

    def _is_broken(self, group: Group) -> bool:
        ends = group.ends.values()
        return any(links._has_ended or not process.is_alive for process, links in ends)


class Rank:
    """One process of a rank: as the first of its start, or in the place of one that has died."""

    def __init__(self, world: World) -> None:
        process = world.process
        self._kernel, self._process = world.kernel, process
        self._job, self.link = process.local[MACHINE].job, process.local[LINK]
        self.rank, self._start = int(process.environ["RANK"]), self._job.starts[-1]
        self._memory = self._job.memory_on(self.rank, process.node)
        self.is_alone = self.link.is_replacement
        self.state, self._timeout_s = 0, 2 * TIMEOUT_S

    def run(self) -> None:
        """Train to the end, with all repairs; raises as a rank would."""
        link: Link = self.link
        self._ends = Ends(self._job, self._start, self.rank)
        store, watched = (job_store.connect(os.environ, link, TIMEOUT_S) for _ in range(2))
        if not link.is_replacement:
            job_store.take_seat(store, os.environ)
        rounds, of_watcher = (
            Rounds(SignedStore(each, lambda: link.token), self.rank, self._start.size)
            for each in (store, watched)
        )
        self.links = product.links_of(link, self._ends)
        self._watcher = product.Watcher(of_watcher, self.links, link)
        self._heart = Heart(link, HEARTBEAT_S)
        self.membership = product.Membership(link, rounds, self.rank)
        self._deaths = product.Deaths(link, rounds, self.membership, self._watcher, self.links)
        if not self.is_alone:
            self._connect(0, self._timeout_s)
            link.token = self._ends.gather("start", link.token, self._timeout_s)[0]
            job_store.check_owner(store, os.environ, link.token)
        self._watcher.start()
        try:
            self._train(self._build() if self.is_alone else self._recover(self._job.iterations))
            self._job.oracle.has_trained(self)
            self._ends.gather("done", None, self._timeout_s)
        except Exception as error:
            self._job.oracle.leaves(self, error)
            link.retire()
            raise
        finally:
            link.disarm()
            self._heart.close()
            self._watcher.close()

    def _connect(self, number: int, timeout_s: float) -> None:
        with self.links.recording():
            self._ends.connect(number, timeout_s)

    def _pass(self, name: str) -> None:
        """Pass a moment at which this rank may hang, or raise an exception of its own."""
        self._kernel.event(name)
        if self._process.local.get(HANGS):
            self._job.oracle.hangs(self, is_in_iteration=self._watcher._inside_since_s is not None)
            self._kernel.wait(Waiting())
        if self._process.local.pop(RAISES, False):
            raise ValueError("a mistake of the rank itself")

    def _build(self) -> int:
        """Become a rank, alone; return the iteration in which the others are."""
        for _ in range(3):
            self._pass("build")
            self._kernel.sleep(self._kernel.random.random() * LONGEST_BUILD_S / 3)
        return self.membership.wait_for_survivors().iteration

    def _train(self, iteration: int) -> None:
        while iteration < self._job.iterations:
            self._train_step(iteration)
            self._pass("between")
            iteration += 1

    def _train_step(self, iteration: int) -> None:
        if self.is_alone:
            self._become_replaceable()
        else:
            self.membership.position = product.position_at(iteration)
            try:
                with self._watcher.inside():
                    self._iterate(iteration)
                self._become_replaceable()
                return
            except BaseException as error:
                self._deaths.notice_or_raise(error)
            self._become_replaceable()
        while True:
            try:
                self._repair(iteration)
                return
            except BaseException as error:
                self._deaths.notice_or_raise(error, Exception)

    def _become_replaceable(self) -> None:
        self.membership.become_replaceable()
        self._heart.start()

    def _iterate(self, iteration: int) -> None:
        """Run an iteration, and leave it when all have finished it."""
        self._pass("forward")
        self._kernel.sleep(ITERATION_S * self._kernel.random.random())
        told = self._ends.gather(f"backward:{iteration}", [self.rank, self.state], self._timeout_s)
        self._pass("in step")
        self.state = next_state(self.state, told)
        memory = self._memory
        memory[iteration + 1] = self.state
        memory.pop(iteration + 1 - KEPT, None)
        self.links.check()
        self._ends.gather(f"end:{iteration}", None, self._timeout_s)

    def _repair(self, iteration: int) -> None:
        """Run one round, in the order of round.py."""
        with product.ending_after(REPAIR_S, self.link):
            self.links.leave()
            self._pass("leave")
            members = self.membership.meet().members
            self.is_alone = False
            self._job.oracle.meets(self, members)
            self._pass("meet")
            self.membership.wait_until_ready()
            number = self.membership.round
            self.links.begin()
            self._timeout_s = 2 * TIMEOUT_S
            self._connect(number, CONNECT_S)
            most = min(each.facts["iteration"] for each in members if each.facts)
            first = self._recover(most)
        for each in range(first, iteration + 1):
            with self._watcher.inside():
                self._iterate(each)
        self._timeout_s = TIMEOUT_S
        self._pass("finish")
        self.membership.finish()
        self._job.oracle.finishes(self)

    def _recover(self, most: int) -> int:
        """Restore the newest state that all ranks have, of this iteration at most; return its iteration."""
        self._pass("recover")
        memory = self._memory
        told = self._ends.gather("recover:", sorted(memory), self._timeout_s)
        common = set.intersection(*map(set, told))
        found = max((each for each in common if each <= most), default=None)
        if found is None:
            if self.membership.round:
                raise RepairError("a repair found no state to continue from")
            found, memory[0] = 0, 0
        self._kernel.sleep(self._kernel.random.random())
        self._pass("restore")
        self.state = memory[found]
        return found


def next_state(state: int, told: list[Any]) -> int:
    return zlib.crc32(repr((state, told)).encode())


def final_states(size: int, iterations: int) -> list[int]:
    """Return the states of all ranks after a training that nothing disturbs."""
    states = [0] * size
    for _ in range(iterations):
        told = [[rank, state] for rank, state in enumerate(states)]
        states = [next_state(state, told) for state in states]
    return states
