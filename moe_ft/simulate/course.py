"""One course of a long run: training, failures, recoveries, and waits for machines, event by event.

It knows a strategy by its costs alone. failures.py has the failures, repetitions.py the mean of many courses.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from moe_ft.planning.costs import Costs, RecoveryKind
from moe_ft.planning.time_shares import Spent, TimeShares
from moe_ft.simulate.failures import Change, Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePool:
    """Machines that a job may have.

    Attributes:
        num_nodes: that it trains on; it waits until it has all of them, or `least_nodes`.
        num_spares: idle ones, ready to take the place of a lost one.
        replace_s: until a spare has taken a place.
        return_s: until a lost machine is mended and a spare; infinite for never.
        are_there: whether all are there at the start. With a trace they come as it says.
        least_nodes: with which it trains while others are missing; None if it needs all. An assumption: with
            n of N nodes it has n / N of its speed, and a node that comes stops it for as long as a recovery
            takes until state is back.
    """

    num_nodes: int
    num_spares: int = 0
    replace_s: float = 0.0
    return_s: float = math.inf
    are_there: bool = True
    least_nodes: int | None = None


@dataclass(kw_only=True, slots=True)
class RunCourse:
    """A run up to an instant. Positions and states are iterations, and parts of one.

    Attributes:
        seconds: by use; all of the time.
        spans: ``(start, end, use)`` in order.
        num_failures: instants at which the job lost processes or machines.
        num_recoveries: that were finished. Failures during a recovery begin it again.
        num_fallbacks: failures after which no copy in memory was left, so that the state came from storage,
            or training began at the start.
        lost_iterations: of tokens whose training was lost.
        position: where training is.
        reached: the farthest that it was. An iteration is productive until then, and redone from then on.
        state: the iteration of the first snapshot of the newest state that a recovery can begin with.
        stored: that of the newest one on storage.
        next_state: the earliest first snapshot of a state after the last recovery.
        lost: places whose memory is gone since copies of all states were complete.
        getting_ready_s, replaying_s: that are left of the recovery.
        places: machines that the job has, None for one that it lacks.
        num_missing, missing: places without a machine, and those of them that nobody is on the way to.
        joining: machines on the way to a place.
        events: what happens to machines without a failure: time, number, machine, and the place that it
            takes or None for one that is mended.
    """

    costs: Costs
    kind: RecoveryKind
    pool: MachinePool
    now_s: float = 0.0
    position: float = 0.0
    reached: float = 0.0
    state: float = 0.0
    stored: float = 0.0
    recovered: float = -1.0
    next_state: float = 0.0
    lost: set[int] = field(default_factory=set)
    getting_ready_s: float = 0.0
    replaying_s: float = 0.0
    is_recovering: bool = False
    places: list[Machine | None] = field(default_factory=list)
    num_missing: int = 0
    missing: deque[int] = field(default_factory=deque)
    spares: deque[Machine] = field(default_factory=deque)
    joining: dict[Machine, int] = field(default_factory=dict)
    events: list[tuple[float, int, Machine, int | None]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count, compare=False)
    seconds: dict[Spent, float] = field(default_factory=lambda: dict.fromkeys(Spent, 0.0))
    spans: list[tuple[float, float, Spent]] = field(default_factory=list)
    num_failures: int = 0
    num_recoveries: int = 0
    num_fallbacks: int = 0
    lost_iterations: float = 0.0

    @property
    def shares(self) -> TimeShares:
        """Shares of the time; the productive one is ETTR."""
        return TimeShares.of(self.seconds)

    def begin(self) -> None:
        """Put machines into their places, if they are there."""
        num_nodes, pool = self.pool.num_nodes, self.pool
        if pool.are_there:
            self.places = [*range(num_nodes)]
            self.spares.extend(range(num_nodes, num_nodes + pool.num_spares))
        else:
            self.places = [None] * num_nodes
            self.num_missing = num_nodes
            self.missing.extend(range(num_nodes))

    def advance(self, until_s: float) -> None:
        """Let time go on until an instant, or until what the job does ends, or a machine comes."""
        while self.events and self.events[0][0] <= self.now_s:
            self._machine_comes()
        costs, step_s = self.costs, self.costs.iteration_s + self.costs.blocked_s
        redo_s = costs.recoveries[self.kind].redo_share * step_s
        if self.events:
            until_s = min(until_s, self.events[0][0])
        most_s = max(0.0, until_s - self.now_s)
        speed = 1 - self.num_missing / self.pool.num_nodes
        if self.is_short:
            self._spend(Spent.WAITING, most_s)
        elif self.getting_ready_s > 0:
            self.getting_ready_s -= self._spend(Spent.RECOVERING, min(most_s, self.getting_ready_s))
        elif self.replaying_s > 0:
            self.replaying_s -= speed * self._spend(
                Spent.REDONE, min(most_s, self.replaying_s / speed), speed
            )
        elif self.is_recovering:
            self._recover()
        elif self.position < self.reached:
            left_s = (self.reached - self.position) * redo_s / speed
            spent_s = self._spend(Spent.REDONE, min(most_s, left_s), speed)
            done = spent_s * speed / redo_s
            self.position = self.reached if spent_s == left_s else self.position + done
        else:
            num_iterations = most_s * speed / step_s
            self._spend(Spent.PRODUCTIVE, most_s, speed)
            self.seconds[Spent.PRODUCTIVE] -= num_iterations * costs.blocked_s
            self.seconds[Spent.BLOCKED] += num_iterations * costs.blocked_s
            self.position = self.reached = self.position + num_iterations

    @property
    def is_short(self) -> bool:
        """True if training waits for machines."""
        least, num_nodes = self.pool.least_nodes, self.pool.num_nodes
        return num_nodes - self.num_missing < (num_nodes if least is None else least)

    def _spend(self, use: Spent, seconds: float, speed: float = 1.0) -> float:
        """Let time go by. What missing machines would have done counts as waiting."""
        if seconds > 0:
            start_s = self.now_s
            if self.spans and self.spans[-1][2] is use:
                start_s = self.spans.pop()[0]
            self.now_s += seconds
            self.seconds[use] += seconds * speed
            if speed < 1:
                self.seconds[Spent.WAITING] += seconds * (1 - speed)
            self.spans.append((start_s, self.now_s, use))
        return seconds

    def _recover(self) -> None:
        """End a recovery: the state is there, and has all its copies again."""
        self.position = self.state + self.costs.window - 1 if self.state else 0.0
        if self.kind is RecoveryKind.LOCAL:  # no snapshots are taken while a stage computes alone
            self.next_state = math.floor(self.reached) + 1.0
        self.is_recovering = False
        self.lost.clear()
        self.num_recoveries += 1
        if self.state != self.recovered:  # else these tokens are lost already
            self.lost_iterations += self.costs.lost_iterations
        self.recovered = self.state

    def change(self, change: Change) -> None:
        """Let something happen to machines."""
        gone = {*change.removed}
        struck = [place for place in change.struck if self.places[place] is not None]
        if gone:
            self.spares = deque(each for each in self.spares if each not in gone)
            for gone_one in gone & self.joining.keys():
                self.missing.append(self.joining.pop(gone_one))
            struck += [place for place, each in enumerate(self.places) if each in gone]
        if not change.keeps_machines:
            for place in struck:
                machine = self.places[place]
                self.places[place] = None
                self.num_missing += 1
                self.missing.append(place)
                if place in change.struck and machine is not None:
                    self._expect(self.pool.return_s, machine, None)
        self.spares += change.added
        if struck:
            self._fail(() if change.keeps_machines else struck)
        self._fill()

    def _fail(self, lost: Iterable[int]) -> None:
        """Begin a recovery from what is left, also where one is under way."""
        costs, recovery = self.costs, self.costs.recoveries[self.kind]
        self.num_failures += 1
        if not self.is_recovering:
            # The first window begins with the first iteration.
            first = 1.0 if costs.window > 1 else costs.interval
            self.state = self._newest(self.state, first, costs.interval, costs.lag)
            if (on := costs.stored) is not None:
                self.stored = self._newest(self.stored, on.interval, on.interval, on.lag)
        was_lost = self._no_copy_is_left()
        self.lost.update(lost)
        self.is_recovering = True
        self.getting_ready_s = recovery.ready_s
        if self._no_copy_is_left():
            self.num_fallbacks += not was_lost
            self.state = self.stored
            if costs.stored is not None:
                self.getting_ready_s += costs.stored.state_s - recovery.state_s
        self.replaying_s = recovery.replay_s if self.state else 0.0

    def _newest(self, state: float, first: float, interval: float, lag: float) -> float:
        """Return the newest state that is complete, given the last one that was, 0 for none."""
        following = max(state + interval if state else first, self.next_state)
        complete = following + self.costs.window - 1 + lag
        if self.position < complete or not math.isfinite(interval):
            return state
        return following + interval * math.floor((self.position - complete) / interval)

    def _no_copy_is_left(self) -> bool:
        """Return whether the memory of a node and of all that keep its replicas is lost.

        They are the next nodes on a ring: so planning/placement.py places them where a stage has enough.
        """
        tolerated, num_nodes = self.costs.nodes_lost, len(self.places)
        if tolerated is None or len(self.lost) <= tolerated:
            return False
        run = range(tolerated + 1)
        return any(all((place + i) % num_nodes in self.lost for i in run) for place in self.lost)

    def _expect(self, after_s: float, machine: Machine, place: int | None) -> None:
        if after_s < math.inf:
            event = (self.now_s + after_s, next(self.numbers), machine, place)
            heappush(self.events, event)

    def _fill(self) -> None:
        """Send spares to places that nobody is on the way to."""
        while self.missing and self.spares:
            place, spare = self.missing.popleft(), self.spares.popleft()
            self.joining[spare] = place
            self._expect(self.pool.replace_s, spare, place)

    def _machine_comes(self) -> None:
        _, _, machine, place = heappop(self.events)
        if place is None:
            self.spares.append(machine)
            self._fill()
        elif self.joining.get(machine) == place:
            del self.joining[machine]
            self.places[place] = machine
            if self.reached and not (self.is_short or self.is_recovering):  # trains without it
                self.getting_ready_s = self.costs.recoveries[self.kind].ready_s
            self.num_missing -= 1


def run_course(
    costs: Costs, kind: RecoveryKind, pool: MachinePool, changes: Iterable[Change], horizon_s: float
) -> RunCourse:
    """Run a job for some time.

    Args:
        kind: of its recoveries, one of those that the costs have.
        changes: of its machines, by ascending time.
    """
    run = RunCourse(costs=costs, kind=kind, pool=pool)
    run.begin()
    upcoming: Iterator[Change] = iter(changes)
    change = next(upcoming, None)
    while run.now_s < horizon_s:
        change_s = math.inf if change is None else change.time_s
        run.advance(min(change_s, horizon_s))
        if change is not None and run.now_s >= change_s:
            run.change(change)
            change = next(upcoming, None)
    return run
