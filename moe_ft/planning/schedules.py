"""Schedules of pipelines some of whose ranks have no device of their own: peers run their micro-batches.

A *role* is a place (pipeline, stage) of the job: a rank, or the ranks that divide its tensors and sequences.
After the loss of a node the processes of its roles are *guests* on devices of others, their hosts. The
micro-batches of guests are shared among peers, which are the other roles of the stage.

Roles of a stage that divide the experts are a *group*: they meet in each pass, and run *turns* together, each
a micro-batch, or an empty one. A role without micro-batches whose group runs computes its experts so.

There are several ways to share (`Way`), and a schedule is made for each, by listing operations greedily on a
simulated clock. The shortest one is the same on all ranks.
Source: ReCycle (adaptive pipelining, decoupled backward passes), without its staggered optimizer and solver.
Turns, empty micro-batches and guests are not from there.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import count, product
from typing import NamedTuple

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


class Turn(NamedTuple):
    """Passes that the roles of a group run together at one stage."""

    number: int
    group: int


class Operation(NamedTuple):
    """An operation of one role, in a turn of its group; without a cell it is on an empty micro-batch."""

    kind: OpKind
    turn: Turn
    cell: Cell | None


class Way(StrEnum):
    """Way in which the micro-batches of guests are run."""

    PEERS = "other groups run those of the whole group"
    EXPERTS = "peers run them, and guests compute their experts"
    GUESTS = "guests run some of them, and hosts fewer of their own"
    CROWD = "guests run them all"


SHARED = (Way.PEERS, Way.EXPERTS, Way.GUESTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipelines:
    """Numbers of the healthy job; micro-batches are those of each pipeline.

    Attributes:
        group_size: roles of a stage that divide the experts; 1 without experts.
    """

    num_stages: int
    num_pipelines: int
    num_micro_batches: int
    group_size: int = 1

    def cells(self) -> Iterator[Cell]:
        """Yield the cells of an iteration: all first micro-batches, then all second ones."""
        sizes = map(range, (self.num_micro_batches, self.num_pipelines))
        return map(Cell._make, product(*sizes))

    def group_of(self, role: Role) -> Role:
        """Return the group of a role, and its stage."""
        return role[0] // self.group_size, role[1]

    def roles_of(self, group: Role) -> list[Role]:
        """Return the roles of a group of a stage."""
        first = group[0] * self.group_size
        return [(first + place, group[1]) for place in range(self.group_size)]


Turns = Mapping[Turn, tuple[Cell | None, ...]]  # [place in the group] its cell


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Cells of each role.

    Attributes:
        way: in which guests' cells are run; a stage where that is impossible takes the next one.
        turns: ``[stage]`` of its groups.
        pace: by group and stage, how long a turn takes, where it is longer than that of a healthy job.
    """

    way: Way
    turns: Sequence[Turns]
    pace: Mapping[Role, float]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Operations of each role, in order.

    Attributes:
        operations: by role; those of a group that runs nothing are not there.
        runners: ``[cell, stage]`` the pipeline whose rank of the stage runs it.
        duration: of an iteration, without the optimizer step: a forward pass, or either half of a
            backward pass, takes 1 at a stage, and a message nothing.
        most_held: by role, turns whose activations it holds at once, at most.
    """

    pipelines: Pipelines
    shares: Shares
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

    @cached_property
    def messages(self) -> dict[tuple[Role, Role], list[Operation]]:
        """By sender and receiver, the operations whose results are sent, in order.

        Messages have no tags: a receiver takes those of a sender in this order, which is the one in which the
        sender makes them.
        """
        found: dict[tuple[Role, Role], list[Operation]] = {}
        for sender, operations in self.operations.items():
            for operation in operations:
                step = {OpKind.FORWARD: 1, OpKind.BACKWARD: -1}.get(operation.kind)
                if operation.cell is None or step is None:
                    continue
                if 0 <= (to := sender[1] + step) < self.pipelines.num_stages:
                    receiver = (self.runners[operation.cell, to], to)
                    found.setdefault((sender, receiver), []).append(operation)
        return found


# Shares


def share_cells(
    pipelines: Pipelines, hosts: Mapping[Role, Role], way: Way, expert_part: float = 0.5
) -> Shares:
    """Return who runs each cell in one way, such that the stage that takes longest is as short as can be.

    Args:
        hosts: by guest, the role whose device it shares, which is no guest.
        expert_part: of the time of a stage, that of its experts.
    """
    weak = _without_cells(pipelines, hosts, way)
    pace = _pace(pipelines, hosts, weak, expert_part)
    of_cells = {} if way is Way.CROWD else pace  # there each role keeps its own
    turns = [_turns_of(stage, pipelines, weak, of_cells) for stage in range(pipelines.num_stages)]
    return Shares(way=way, turns=turns, pace=pace)


def _without_cells(pipelines: Pipelines, hosts: Mapping[Role, Role], way: Way) -> Set[Role]:
    """Return the roles that get no cells; none in a way that leaves a stage without others."""
    if way is Way.PEERS:
        groups = {pipelines.group_of(each) for each in hosts}
        hit = Counter(stage for _, stage in groups)
        num_groups = pipelines.num_pipelines // pipelines.group_size
        broken = [each for each in groups if hit[each[1]] < num_groups]
        return {role for each in broken for role in pipelines.roles_of(each)}
    if way is not Way.EXPERTS or pipelines.group_size == 1:
        return set()
    of_stages = Counter(stage for _, stage in hosts)
    most = max(of_stages.values(), default=0)
    return {*hosts} if most < pipelines.num_pipelines else set()


def _pace(
    pipelines: Pipelines, hosts: Mapping[Role, Role], weak: Set[Role], expert_part: float
) -> dict[Role, float]:
    """Return how long a turn of a group takes whose devices do the work of several roles."""
    work = dict.fromkeys(hosts.values(), 0.0)  # by host, that of its device in each turn

    def work_of(role: Role) -> float:
        of_group = pipelines.roles_of(pipelines.group_of(role))
        # Experts get so many of the tokens that they have in a turn of which no cell is empty.
        filled = sum(each not in weak for each in of_group) / len(of_group)
        return expert_part * filled if role in weak else 1 - expert_part * (1 - filled)

    for role in [*work, *hosts]:
        work[hosts.get(role, role)] += work_of(role)
    pace = dict[Role, float]()
    for role in [*work, *hosts]:
        group = pipelines.group_of(role)
        if work_of(role):
            pace[group] = max(pace.get(group, 1.0), work[hosts.get(role, role)])
    return pace


def _turns_of(
    stage: int, pipelines: Pipelines, weak: Set[Role], pace: Mapping[Role, float]
) -> Turns:
    """Return the turns of the groups of a stage, whose roles that are not weak have all cells."""
    strong = [each for each in range(pipelines.num_pipelines) if (each, stage) not in weak]
    paces = {each: pace.get(pipelines.group_of((each, stage)), 1.0) for each in strong}
    quota = _quotas(paces, pipelines.num_pipelines * pipelines.num_micro_batches)
    most = pipelines.num_micro_batches
    kept = {each: min(most, number) for each, number in quota.items()}
    more = dict.fromkeys(strong, 0)
    given: dict[int, list[Cell]] = {each: [] for each in strong}
    # Micro-batch by micro-batch: all roles without cells take turns, and so do those who get them.
    for cell in pipelines.cells():
        own = runner = cell.pipeline
        of_own = kept.get(own, 0)
        if (cell.micro_batch + 1) * of_own // most == cell.micro_batch * of_own // most:
            able = (each for each in strong if more[each] < quota[each] - kept[each])
            runner = min(
                able, key=lambda each: (more[each], (each - own) % pipelines.num_pipelines)
            )  # noqa: B023
            more[runner] += 1
        given[runner].append(cell)
    turns: dict[Turn, tuple[Cell | None, ...]] = {}
    for group in range(pipelines.num_pipelines // pipelines.group_size):
        cells = [given.get(each, ()) for each, _ in pipelines.roles_of((group, stage))]
        for number in range(max(map(len, cells))):
            turns[Turn(number, group)] = tuple(
                each[number] if number < len(each) else None for each in cells
            )
    return turns


def _quotas(paces: Mapping[int, float], num_cells: int) -> dict[int, int]:
    """Return how many cells each pipeline gets, such that the one that takes longest ends early."""
    quota = dict.fromkeys(paces, num_cells // (len(paces) * 2))  # nobody gets less than half
    ends = [((number + 1) * paces[each], each) for each, number in quota.items()]
    heapq.heapify(ends)
    for _ in range(num_cells - sum(quota.values())):
        end, each = ends[0]
        quota[each] += 1
        heapq.heapreplace(ends, (end + paces[each], each))
    return quota


# Schedules


def plan_schedule(
    pipelines: Pipelines,
    hosts: Mapping[Role, Role] | None = None,
    *,
    ways: Sequence[Way] = SHARED,
    expert_part: float = 0.5,
    is_split: bool = False,
    most_more_held: int = 0,
) -> Schedule:
    """Return the shortest of some greedy schedules.

    Without guests, splitting and more memory it is 1F1B.

    Args:
        hosts, expert_part: as for `share_cells`; None: there are no guests.
        ways: that are tried; of equal ones the first is taken.
        is_split: whether gradients of weights may come later than those of inputs.
        most_more_held: micro-batches that a rank can hold beyond those of 1F1B, one for each stage from its
            own to the last. If no order of shared cells fits into that, a rank holds as many as it takes.
    """
    if not hosts or pipelines.group_size == 1:
        # Others are then the same as the last of them.
        ways = [way for way in ways if way is not Way.EXPERTS] or [Way.GUESTS]
    shares = [
        share_cells(pipelines, hosts or {}, way, expert_part)
        for way in (ways if hosts else ways[:1])
    ]
    is_large = sum(map(len, shares[0].turns)) > _MOST_TRIED
    found: list[Schedule] = []
    while not found:
        # Of equal ones the one that needs less memory is the first.
        for more in [most_more_held] if is_large else sorted({0, most_more_held}):
            for rule, of_way in product(_RULES[:1] if is_split or is_large else _RULES, shares):
                if schedule := _Simulation(pipelines, of_way, is_split, rule, more).run():
                    found.append(schedule)
        most_more_held += 1
    return min(found, key=lambda each: each.duration)


# Turns, at all stages, of a schedule that is made several times: a larger one takes seconds.
_MOST_TRIED = 2_000


class _Rule(NamedTuple):
    """Choice of a group between operations: the kinds in order, and whether it sees all that arrives in time.

    Without the latter, a group that becomes free goes on with what was there before others ended.
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
_Step = tuple[OpKind, Turn]


@dataclass(slots=True)
class _Group:
    """A group of a stage, and what it can run: forwards and backwards by turn, weights as backwards were."""

    limit: int
    steps: list[_Step] = field(default_factory=list)
    forwards: list[Turn] = field(default_factory=list)
    backwards: list[Turn] = field(default_factory=list)
    weights: deque[Turn] = field(default_factory=deque)
    is_busy: bool = False
    held: int = 0
    most_held: int = 0

    def add(self, kind: OpKind, turn: Turn) -> None:
        """Take a step whose input is there."""
        if kind is OpKind.WEIGHTS:
            self.weights.append(turn)
        else:
            heapq.heappush(self.forwards if kind is OpKind.FORWARD else self.backwards, turn)

    def take(self, order: tuple[OpKind, ...]) -> _Step | None:
        """Begin the first step that can run, if one can."""
        for kind in order:
            if kind is OpKind.WEIGHTS and self.weights:
                turn = self.weights.popleft()
            elif kind is OpKind.BACKWARD and self.backwards:
                turn = heapq.heappop(self.backwards)
            elif kind is OpKind.FORWARD and self.forwards and self.held < self.limit:
                turn = heapq.heappop(self.forwards)
                self.held += 1
                self.most_held = max(self.most_held, self.held)
            else:
                continue
            self.steps.append((kind, turn))
            self.is_busy = True
            return kind, turn
        return None


class _Simulation:
    """A greedy list schedule on a simulated clock.

    A group holds at most as many turns as 1F1B does, and `more`, or it waits with forwards. Where all cells
    are their own roles' that never stops it for good: the last stage can always run, so that backwards come
    back to every stage in turn.
    """

    def __init__(
        self, pipelines: Pipelines, shares: Shares, is_split: bool, rule: _Rule, more: int
    ) -> None:
        self._pipelines = pipelines
        self._shares = shares
        self._rule = rule
        self._is_split = is_split
        self._duration = {
            OpKind.FORWARD: 1.0,
            OpKind.BACKWARD: 1.0 if is_split else 2.0,
            OpKind.WEIGHTS: 1.0,
        }
        self._turn_of: list[dict[Cell, Turn]] = []  # [stage]
        self._missing: dict[tuple[OpKind, int, Turn], int] = {}  # inputs of a step at a stage
        self._groups: dict[Role, _Group] = {}
        for stage, turns in enumerate(shares.turns):
            self._turn_of.append({})
            for turn, cells in turns.items():
                of_turn = [each for each in cells if each is not None]
                self._turn_of[stage] |= dict.fromkeys(of_turn, turn)
                for kind in (OpKind.FORWARD, OpKind.BACKWARD):
                    self._missing[kind, stage, turn] = len(of_turn)
                self._groups.setdefault(
                    (turn.group, stage), _Group(pipelines.num_stages - stage + more)
                )
        self._number = count()
        # Time, a number that orders what is equal, stage, step, and whether it ends or can begin.
        self._events: list[tuple[float, int, int, _Step, bool]] = []

    def run(self) -> Schedule | None:
        """Return the schedule of an iteration; None if groups wait for each other with what they hold."""
        for cell in self._pipelines.cells():
            self._arrive(0.0, OpKind.FORWARD, 0, cell)
        clock = 0.0
        while self._events:
            clock = self._events[0][0]
            last = next(self._number)  # what follows from these events has higher numbers
            woken = set()
            while self._events and (self._events[0][:2] < (clock, last) or self._is_now(clock)):
                _, _, stage, (kind, turn), ends = heapq.heappop(self._events)
                woken.add((turn.group, stage))
                if ends:
                    self._end(clock, stage, kind, turn)
                else:
                    self._groups[turn.group, stage].add(kind, turn)
            for role in sorted(woken):
                group = self._groups[role]
                if not group.is_busy and (begun := group.take(self._rule.order)):
                    pace = self._shares.pace.get(role, 1.0)
                    self._note(clock + pace * self._duration[begun[0]], role[1], begun, ends=True)
        return None if any(self._missing.values()) else self._schedule(clock)

    def _schedule(self, clock: float) -> Schedule:
        operations: dict[Role, tuple[Operation, ...]] = {}
        held: dict[Role, int] = {}
        runners: dict[tuple[Cell, int], int] = {}
        for (number, stage), group in self._groups.items():
            turns = self._shares.turns[stage]
            for place, role in enumerate(self._pipelines.roles_of((number, stage))):
                operations[role] = tuple(
                    Operation(kind, turn, turns[turn][place]) for kind, turn in group.steps
                )
                held[role] = group.most_held
        for role, of_role in operations.items():
            runners |= {(each.cell, role[1]): role[0] for each in of_role if each.cell is not None}
        return Schedule(
            pipelines=self._pipelines,
            shares=self._shares,
            operations=operations,
            runners=runners,
            duration=clock,
            most_held=held,
        )

    def _arrive(self, clock: float, kind: OpKind, stage: int, cell: Cell) -> None:
        """Note the input of a cell; with that of the last one of its turn the turn can begin."""
        turn = self._turn_of[stage][cell]
        self._missing[kind, stage, turn] -= 1
        if not self._missing[kind, stage, turn]:
            self._note(clock, stage, (kind, turn))

    def _end(self, clock: float, stage: int, kind: OpKind, turn: Turn) -> None:
        group = self._groups[turn.group, stage]
        group.is_busy = False
        cells = [each for each in self._shares.turns[stage][turn] if each is not None]
        if kind is OpKind.FORWARD:
            if stage + 1 < self._pipelines.num_stages:
                for each in cells:
                    self._arrive(clock, kind, stage + 1, each)
            else:
                self._missing[OpKind.BACKWARD, stage, turn] = 0
                group.add(OpKind.BACKWARD, turn)
            return
        if kind is OpKind.BACKWARD and stage:
            for each in cells:
                self._arrive(clock, kind, stage - 1, each)
        if kind is OpKind.BACKWARD and self._is_split:
            group.add(OpKind.WEIGHTS, turn)
        else:
            group.held -= 1

    def _is_now(self, clock: float) -> bool:
        return self._rule.is_eager and self._events[0][0] == clock

    def _note(self, at: float, stage: int, step: _Step, *, ends: bool = False) -> None:
        heapq.heappush(self._events, (at, next(self._number), stage, step, ends))
