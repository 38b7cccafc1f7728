"""Schedules of pipelines some of whose ranks are dead: data-parallel peers run their micro-batches.

A *role* is a place (pipeline, stage) of the healthy job. After a death, peers of the stage play the dead
role: they run its micro-batches, and one of them, the *deputy*, holds its shard. With expert parallelism a
pipeline counts for a whole expert-parallel group, whose ranks run everything together. lost_ranks.py says
which deaths can be played.

A schedule is made by listing operations greedily on a simulated clock. It is the same on all ranks.
Source: ReCycle (adaptive pipelining, decoupled backward passes), without its staggered optimizer and solver.
"""

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, product
from typing import NamedTuple

from moe_ft.errors import PlanError

Role = tuple[int, int]  # pipeline, stage


class OpKind(StrEnum):
    """Kind of an operation; a backward pass that is not split also has the gradients of the weights."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


class Cell(NamedTuple):
    """A micro-batch of a pipeline, in one iteration."""

    micro_batch: int
    pipeline: int


class Operation(NamedTuple):
    """An operation on a cell, at one stage."""

    kind: OpKind
    cell: Cell


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipelines:
    """Numbers of the healthy job; micro-batches are those of each pipeline."""

    num_stages: int
    num_pipelines: int
    num_micro_batches: int

    def live(self, stage: int, dead: Set[Role]) -> list[int]:
        """Return the pipelines whose rank of a stage lives.

        Raises:
            PlanError: if none does.
        """
        found = [each for each in range(self.num_pipelines) if (each, stage) not in dead]
        if not found:
            raise PlanError(f"stage {stage} has no live rank: nobody can play its roles")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Operations of each live rank, in order.

    Attributes:
        operations: by role of a live rank, which plays others too.
        runners: ``[cell, stage]`` the pipeline whose rank of the stage runs it.
        duration: of an iteration, without the optimizer step: a forward pass, or either half of a
            backward pass, takes 1 at a stage, and a message nothing.
        most_held: by role of a live rank, micro-batches whose activations it holds at once, at most.
    """

    pipelines: Pipelines
    operations: Mapping[Role, tuple[Operation, ...]]
    runners: Mapping[tuple[Cell, int], int]
    duration: float
    most_held: Mapping[Role, int]

    @property
    def more_held(self) -> int:
        """Micro-batches whose activations a rank holds beyond those that it has in 1F1B, at most."""
        size = self.pipelines
        return max(
            held - min(size.num_stages - stage, size.num_micro_batches)
            for (_, stage), held in self.most_held.items()
        )

    def messages(self) -> dict[tuple[Role, Role], list[Operation]]:
        """Return, by sender and receiver, the operations whose results are sent, in order.

        Messages have no tags: a receiver takes those of a sender in this order, which is the one in which the
        sender makes them.
        """
        found: dict[tuple[Role, Role], list[Operation]] = {}
        for sender, operations in self.operations.items():
            for operation in operations:
                step = {OpKind.FORWARD: 1, OpKind.BACKWARD: -1}.get(operation.kind)
                if step is None or not 0 <= (to := sender[1] + step) < self.pipelines.num_stages:
                    continue
                receiver = (self.runners[operation.cell, to], to)
                found.setdefault((sender, receiver), []).append(operation)
        return found


def choose_deputies(pipelines: Pipelines, dead: Set[Role]) -> dict[Role, int]:
    """Choose the pipeline whose rank of the stage holds a dead role's shard: the next with the fewest.

    Raises:
        PlanError: if all ranks of a stage are dead.
    """
    taken: Counter[Role] = Counter()
    chosen = {}
    for pipeline, stage in sorted(dead):
        peer = min(
            pipelines.live(stage, dead),
            key=lambda each: (taken[each, stage], (each - pipeline) % pipelines.num_pipelines),
        )
        taken[peer, stage] += 1
        chosen[pipeline, stage] = peer
    return chosen


def choose_runners(
    pipelines: Pipelines, dead: Set[Role], *, is_whole: bool
) -> dict[tuple[Cell, int], int]:
    """Choose who runs each cell at each stage: its own rank, or a live peer with the least to do.

    Args:
        dead: roles whose ranks are dead.
        is_whole: whether the deputy runs all cells of a role, whose sums then have their usual order.

    Raises:
        PlanError: if all ranks of a stage are dead.
    """
    deputies = choose_deputies(pipelines, dead)
    runners = {}
    for stage in range(pipelines.num_stages):
        live = pipelines.live(stage, dead)
        load = dict.fromkeys(live, pipelines.num_micro_batches)
        # Micro-batch by micro-batch: all dead roles of the stage take turns.
        for cell in map(Cell._make, product(*map(range, _cells(pipelines)))):
            own = cell.pipeline
            if own in load:
                runner = own
            elif is_whole:
                runner = deputies[own, stage]
            else:
                size = pipelines.num_pipelines
                runner = min(live, key=lambda each: (load[each], (each - own) % size))  # noqa: B023
                load[runner] += 1
            runners[cell, stage] = runner
    return runners


def plan_schedule(
    pipelines: Pipelines,
    dead: Set[Role] = frozenset(),
    *,
    is_split: bool = False,
    is_whole: bool = False,
    most_more_held: int = 0,
) -> Schedule:
    """Return the shortest of some greedy schedules.

    Without deaths, splitting and more memory it is 1F1B.

    Args:
        dead: roles whose ranks are dead.
        is_split: whether gradients of weights may come later than those of inputs.
        is_whole: as for `choose_runners`.
        most_more_held: micro-batches that a rank can hold beyond those of 1F1B, one for each stage from its
            own to the last.

    Raises:
        PlanError: if all ranks of a stage are dead.
    """
    runners = choose_runners(pipelines, dead, is_whole=is_whole)
    is_large = len(runners) > _MOST_TRIED
    found = [
        _Simulation(pipelines, runners, is_split, rule, more).run()
        # Of equal ones the one that needs less memory is the first.
        for more in ([most_more_held] if is_large else sorted({0, most_more_held}))
        for rule in (_RULES[:1] if is_split or is_large else _RULES)
    ]
    return min(found, key=lambda each: each.duration)


# Cells, at all stages, of a schedule that is made several times: a larger one takes seconds.
_MOST_TRIED = 10_000


class _Rule(NamedTuple):
    """Choice of a rank between operations: the kinds in order, and whether it sees all that arrives in time.

    Without the latter, a rank that becomes free goes on with what was there before others ended.
    """

    order: tuple[OpKind, ...]
    is_eager: bool


_BACKWARD_FIRST = (OpKind.BACKWARD, OpKind.FORWARD, OpKind.WEIGHTS)
_FORWARD_FIRST = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.WEIGHTS)
# The first alone makes 1F1B, and was never worse than the others where gradients are put off.
_RULES = (
    _Rule(_BACKWARD_FIRST, is_eager=True),
    _Rule(_BACKWARD_FIRST, is_eager=False),
    _Rule(_FORWARD_FIRST, is_eager=True),
    _Rule(_FORWARD_FIRST, is_eager=False),
)


def _cells(pipelines: Pipelines) -> tuple[int, int]:
    return pipelines.num_micro_batches, pipelines.num_pipelines


@dataclass(slots=True)
class _Rank:
    """A live rank, and what it can run: forwards and backwards by cell, weights in the order of backwards."""

    limit: int
    operations: list[Operation] = field(default_factory=list)
    forwards: list[Cell] = field(default_factory=list)
    backwards: list[Cell] = field(default_factory=list)
    weights: deque[Cell] = field(default_factory=deque)
    is_busy: bool = False
    held: int = 0
    most_held: int = 0

    def add(self, operation: Operation) -> None:
        """Take an operation whose input is there."""
        if operation.kind is OpKind.WEIGHTS:
            self.weights.append(operation.cell)
        else:
            is_forward = operation.kind is OpKind.FORWARD
            heapq.heappush(self.forwards if is_forward else self.backwards, operation.cell)

    def take(self, order: tuple[OpKind, ...]) -> Operation | None:
        """Begin the first operation that can run, if one can."""
        for kind in order:
            if kind is OpKind.WEIGHTS and self.weights:
                cell = self.weights.popleft()
            elif kind is OpKind.BACKWARD and self.backwards:
                cell = heapq.heappop(self.backwards)
            elif kind is OpKind.FORWARD and self.forwards and self.held < self.limit:
                cell = heapq.heappop(self.forwards)
                self.held += 1
                self.most_held = max(self.most_held, self.held)
            else:
                continue
            self.operations.append(Operation(kind, cell))
            self.is_busy = True
            return self.operations[-1]
        return None


class _Simulation:
    """A greedy list schedule on a simulated clock.

    A rank holds at most as many micro-batches as 1F1B does, and `more`, or it waits with forwards. That never
    stops it for good: the last stage can always run, so that backwards come back to every stage in turn.
    """

    def __init__(
        self,
        pipelines: Pipelines,
        runners: Mapping[tuple[Cell, int], int],
        is_split: bool,
        rule: _Rule,
        more: int,
    ) -> None:
        self._pipelines = pipelines
        self._runners = runners
        self._rule = rule
        self._is_split = is_split
        self._duration = {
            OpKind.FORWARD: 1.0,
            OpKind.BACKWARD: 1.0 if is_split else 2.0,
            OpKind.WEIGHTS: 1.0,
        }
        live = sorted({(runner, stage) for (_, stage), runner in runners.items()})
        self._ranks = {role: _Rank(pipelines.num_stages - role[1] + more) for role in live}
        self._number = count()
        # Time, a number that orders what is equal, stage, operation, and whether it ends or can begin.
        self._events: list[tuple[float, int, int, Operation, bool]] = []

    def run(self) -> Schedule:
        """Return the schedule of an iteration."""
        for cell in map(Cell._make, product(*map(range, _cells(self._pipelines)))):
            self._note(0.0, 0, Operation(OpKind.FORWARD, cell))
        clock = 0.0
        while self._events:
            clock = self._events[0][0]
            last = next(self._number)  # what follows from these events has higher numbers
            woken = set()
            while self._events and (self._events[0][:2] < (clock, last) or self._is_now(clock)):
                _, _, stage, operation, ends = heapq.heappop(self._events)
                role = (self._runners[operation.cell, stage], stage)
                woken.add(role)
                if ends:
                    self._end(clock, role, operation)
                else:
                    self._ranks[role].add(operation)
            for role in sorted(woken):
                rank = self._ranks[role]
                if not rank.is_busy and (begun := rank.take(self._rule.order)):
                    self._note(clock + self._duration[begun.kind], role[1], begun, ends=True)
        return Schedule(
            pipelines=self._pipelines,
            operations={role: tuple(rank.operations) for role, rank in self._ranks.items()},
            runners=self._runners,
            duration=clock,
            most_held={role: rank.most_held for role, rank in self._ranks.items()},
        )

    def _end(self, clock: float, role: Role, operation: Operation) -> None:
        (kind, cell), stage, rank = operation, role[1], self._ranks[role]
        rank.is_busy = False
        if kind is OpKind.FORWARD:
            if stage + 1 < self._pipelines.num_stages:
                self._note(clock, stage + 1, operation)
            else:
                rank.add(Operation(OpKind.BACKWARD, cell))
            return
        if kind is OpKind.BACKWARD and stage:
            self._note(clock, stage - 1, operation)
        if kind is OpKind.BACKWARD and self._is_split:
            rank.add(Operation(OpKind.WEIGHTS, cell))
        else:
            rank.held -= 1

    def _is_now(self, clock: float) -> bool:
        return self._rule.is_eager and self._events[0][0] == clock

    def _note(self, at: float, stage: int, operation: Operation, *, ends: bool = False) -> None:
        heapq.heappush(self._events, (at, next(self._number), stage, operation, ends))
