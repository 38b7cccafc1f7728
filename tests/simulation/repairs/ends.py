"""Links of a simulated rank to the others of its round, and what they do together over them.

They stand for process groups: a transport of the product's `Links`, which ends them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.kernel import Process
from tests.simulation.repairs import product


@dataclass(eq=False, slots=True)
class Operation:
    """One collective operation, by the ranks that have come to it."""

    values: dict[int, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Group:
    """All ranks of a round of a start.

    Attributes:
        size: number of ranks.
        layout: of an elastic start, in which the round is.
        ends: ``[rank]`` the process and its links.
    """

    number: int
    size: int
    layout: int = 0
    ends: dict[int, tuple[Process, "Ends"]] = field(default_factory=dict)
    operations: dict[int, Operation] = field(default_factory=dict)


class Ends:
    """Links of one rank: a transport of the product's `Links`, and its collectives. One group at a time."""

    name = "simulated"

    def __init__(self, job: Any, start: Any, rank: int) -> None:
        self._job, self._start, self._rank = job, start, rank
        self._kernel, self._process = job.world.kernel, job.world.process
        self._group: Group | None = None
        self._place, self._has_ended = 0, False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the training thread waits for others, as its stack shows."""
        local = self._process.local
        local[product.WAITS] = local.get(product.WAITS, 0) + 1
        try:
            yield
        finally:
            local[product.WAITS] -= 1

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
        own = Group(number, self._start.size, self._start.layout)
        group = self._start.groups.setdefault(number, own)
        self._job.oracle.connects(group, self._rank, self._process)
        group.ends[self._rank] = self._process, self
        self._job.machine.changed()
        with self.waiting():
            is_whole = self._job.machine.wait_for(
                lambda: len(group.ends) == group.size and not self._is_cut_off(), timeout_s
            )
        if not is_whole:
            raise RuntimeError(f"timed out after {timeout_s:g} s waiting for ranks to connect")
        self._group, self._place = group, 0

    def gather(self, name: str, value: Any, timeout_s: float) -> list[Any]:
        """Return what all ranks bring to a named operation, in their order. Called by all ranks."""
        kernel, group = self._kernel, self._group
        kernel.event(name.partition(":")[0])
        assert group is not None
        operation = group.operations.setdefault(self._place, Operation())
        self._place += 1
        with self.waiting():
            self._job.machine.wait_for(
                lambda: not self._is_cut_off() or self._is_broken(group), timeout_s
            )
        if self._is_broken(group):
            raise RuntimeError("[gloo] Connection closed by peer")
        if self._is_cut_off():
            raise RuntimeError(f"Timed out waiting {timeout_s:g} s for send operation to complete")
        operation.values[self._rank] = value
        operation.names.add(name)
        size = group.size
        if len(operation.values) == size:
            self._job.oracle.completes(group, operation)
            self._job.machine.changed()
        with self.waiting():
            self._job.machine.wait_for(
                lambda: (
                    (len(operation.values) == size and not self._is_cut_off())
                    or self._is_broken(group)
                ),
                timeout_s,
            )
        if len(operation.values) == size and not self._is_cut_off():
            return [value for _, value in sorted(operation.values.items())]
        if self._is_broken(group):
            raise RuntimeError("[gloo] Connection closed by peer")
        raise RuntimeError(f"Timed out waiting {timeout_s:g} s for recv operation to complete")

    def _is_cut_off(self) -> bool:
        """Return whether this rank reaches nobody, or one of the others has lost its power."""
        ends = () if self._group is None else self._group.ends.values()
        is_out = any(not process.is_alive and self._is_powerless(process) for process, _ in ends)
        return is_out or bool(self._job.machine.is_cut_off(self._process.node))

    def _is_powerless(self, process: Process) -> bool:
        return process.node in self._job.machine.powerless

    def _is_broken(self, group: Group) -> bool:
        return any(
            links._has_ended or not (process.is_alive or self._is_powerless(process))
            for process, links in group.ends.values()
        )
