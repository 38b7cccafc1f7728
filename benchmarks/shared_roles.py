"""Iterations of a job that has lost ranks without a spare: peers share their micro-batches, and others.

    python -m benchmarks.shared_roles [--layouts NAME ...] [--iterations N] [--forward-s S] [--counts]
        [--quick] [--output FILE.md]

Each rank is a process without a model: the executor of megatron/fault_tolerance/degraded runs its operations,
and small tensors go from stage to stage over gloo. A pass sleeps for its time while it holds its device, in
slices of a quarter of a forward pass: processes on one device take turns, so that a crowded one is slow of
itself. A forward pass takes as long as the gradients of the inputs, and as those of the weights. Ranks that
divide experts wait for each other before and after them, half of each pass.

Answers, each measured next to a healthy iteration, with the plan's count in brackets:

share     Peers run the micro-batches of lost ranks, whose processes are on devices of hosts.
put off   The same, and gradients of weights wait until nothing else can run.
crowd     The processes of lost ranks run their own micro-batches, on devices of hosts.
dropped   Pipelines that lack a rank are idle, and the others have their samples.
shrink    As many whole pipelines as fit on the ranks that are left.

The second table is counted alone: "unequal pipelines" has all live ranks in pipelines of P and fewer of 32
layers, as Oobleck does, micro-batches given to the one that ends first.
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from multiprocessing.connection import wait
from statistics import median
from typing import Any, override

import torch
import torch.distributed as dist

from benchmarks.output import conditions, markdown_table, read_options, show
from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.degraded.executor import Executor, Mail
from megatron.fault_tolerance.degraded.roles import RolePlace
from moe_ft.arithmetic import ceil_div
from moe_ft.planning.lost_ranks import Degraded, Layout
from moe_ft.planning.schedules import (
    Operation,
    OpKind,
    Role,
    Schedule,
    Turn,
    Way,
    plan_schedule,
)
from tests.ports import free_port

LAYOUTS = {
    **{
        f"PP{stages} x DP{dp}": Layout(num_stages=stages, tp=1, cp=1, dp=dp)
        for stages in (2, 4)
        for dp in (2, 4, 8)
    },
    **{
        f"PP{stages} x DP{dp}, EP{ep}": Layout(num_stages=stages, tp=1, cp=1, dp=dp, ep=ep)
        for stages, dp, ep in ((2, 4, 4), (2, 8, 4), (2, 8, 8))
    },
}
ANSWERS = ("share", "put off", "crowd", "dropped", "shrink")
# Of the second table: stages, pipelines, micro-batches of each, lost ranks.
COUNTED = (
    *((4, 3, 6, 1), (2, 2, 8, 1), (4, 8, 8, 1), (4, 8, 8, 3), (8, 4, 16, 1), (8, 4, 16, 3)),
    *((8, 8, 16, 6), (4, 8, 32, 1), (16, 4, 16, 6)),
)
_MICRO_BATCHES = 8  # of a pipeline
_EXPERT_PART = 0.5
_SHAPE = (8, 1, 8)
_NUM_LAYERS = 32
_AHEAD_S = 0.02  # from an agreement on the start of an iteration until then
_DEADLINE_S = 600.0
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Lost ranks, and those whose devices have their processes.

    Attributes:
        lost, where: both in words.
    """

    lost: str
    where: str
    hosts: Mapping[Role, Role]


def losses_of(layout: Layout) -> Iterator[Loss]:
    """Yield losses of one and two ranks, as far as a stage has that many and others."""
    stage, other = layout.num_stages // 2, layout.num_stages // 2 - 1
    yield Loss(lost="1", where="same", hosts={(0, stage): (1, stage)})
    yield Loss(lost="1", where="another", hosts={(0, stage): (1, other)})
    if layout.dp > 2:
        two = {(0, stage): (2, stage), (1, stage): (3, stage)}
        yield Loss(lost="2 of a stage", where="same", hosts=two)
        away = {guest: (lane, other) for guest, (lane, _) in two.items()}
        yield Loss(lost="2 of a stage", where="another", hosts=away)
    near = {(0, stage): (1, stage), (1, other): (0, other)}
    yield Loss(lost="2 of two stages", where="same", hosts=near)
    if layout.dp > 2:
        far = {(0, stage): (2, other), (1, other): (3, stage)}
        yield Loss(lost="2 of two stages", where="another", hosts=far)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """Iterations of one answer to a loss, or of a healthy job.

    Attributes:
        layout: of the ranks that train, the first ones of the job.
        hosts: as in the loss, if lost ranks have processes.
    """

    layout: Layout
    schedule: Schedule
    hosts: Mapping[Role, Role]


def runs_of(layout: Layout, loss: Loss) -> dict[str, Run]:
    """Return the answers to a loss that there are, by name."""
    more = layout.num_stages
    plan = partial(
        plan_schedule, layout.pipelines(_MICRO_BATCHES), loss.hosts, expert_part=_EXPERT_PART
    )
    schedules = {
        "share": plan(most_more_held=more),
        "put off": plan(most_more_held=more, is_split=True),
        "crowd": plan(ways=(Way.CROWD,)),
    }
    runs = {
        name: Run(layout=layout, schedule=each, hosts=loss.hosts)
        for name, each in schedules.items()
    }
    size = layout.group_size
    hit = {lane // size for lane, _ in loss.hosts}
    num_left = layout.num_stages * layout.dp - len(loss.hosts)
    for name, num_groups in (
        ("dropped", layout.num_groups - len(hit)),
        ("shrink", num_left // (layout.num_stages * size)),
    ):
        if num_groups:
            runs[name] = whole_pipelines(layout, num_groups * size)
    return runs


@cache
def whole_pipelines(layout: Layout, dp: int) -> Run:
    """Return iterations of as many whole pipelines, with the samples of all."""
    left = replace(layout, dp=dp)
    schedule = plan_schedule(left.pipelines(ceil_div(layout.dp * _MICRO_BATCHES, dp)))
    return Run(layout=left, schedule=schedule, hosts={})


class Device:
    """A device that processes hold in turn: who asks first has it first. Made before they are forked."""

    def __init__(self) -> None:
        self._changed = _FORK.Condition()
        self._numbers = _FORK.Array("l", 2, lock=False)  # asked, and served

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait until this process has the device, and let it go after that."""
        with self._changed:
            own = self._numbers[0]
            self._numbers[0] += 1
            self._changed.wait_for(lambda: self._numbers[1] == own)
        try:
            yield
        finally:
            with self._changed:
                self._numbers[1] += 1
                self._changed.notify_all()


class SleptRole(Executor):
    """The operations of one rank, whose passes take their time and compute nothing."""

    def __init__(self, run: Run, place: RolePlace, device: Device, group: Any, forward_s: float):
        """Take the device, and the ranks that divide the experts; None without."""
        own: Any = self  # reads no batches, and runs what is put off
        super().__init__(place, run.schedule, own, (None, None), late=own)
        self._device = device
        self._group = group
        self._forward_s = forward_s
        operations = run.schedule.operations.get(place.role, ())
        turns = run.schedule.shares.turns[place.role[1]]
        self._experts = {  # by turn, their part of it: they get tokens of the cells that there are
            each.turn: _EXPERT_PART * (1 - turns[each.turn].count(None) / len(turns[each.turn]))
            for each in operations
        }
        self._empty = {each.turn for each in operations if each.cell is None}
        is_split = any(each.kind is OpKind.WEIGHTS for each in operations)
        self._length = {OpKind.FORWARD: 1, OpKind.BACKWARD: 1 if is_split else 2}

    def mail(self) -> Mail:
        """Return what an iteration expects of other ranks."""
        return Mail(self._schedule, self._place, (_SHAPE, _SHAPE), torch.float32, (None, None))

    def iterate(self, mail: Mail) -> None:
        """Run an iteration."""
        passes: Any = _Passes()
        self._run(passes, mail, 1, 1)

    @override
    def _pass(self, iteration: Any, operation: Operation, received: Any, num_samples: int) -> Any:
        seconds = self._forward_s * self._length[operation.kind]
        if self._group is None:
            self._compute(seconds)
            return torch.zeros(_SHAPE)
        if operation.cell is not None:
            self._compute(seconds * (1 - _EXPERT_PART))
        self._group.wait()  # tokens go to their experts
        self._compute(seconds * self._experts[operation.turn])
        self._group.wait()
        return torch.zeros(_SHAPE)

    def run(self, turn: Turn) -> None:
        """Compute gradients of weights, which were put off."""
        rest = 0.0 if turn in self._empty else 1 - _EXPERT_PART
        self._compute(self._forward_s * (rest + self._experts[turn]))

    def _compute(self, seconds: float) -> None:
        while seconds > 0:
            with self._device.held():
                begin_s = time.monotonic()
                time.sleep(min(seconds, self._forward_s / 4))
                seconds -= time.monotonic() - begin_s


class _Passes:
    """Iteration without a model."""

    def without_samples(self, num_tokens: int) -> AbstractContextManager[None]:
        return nullcontext()

    def let_go(self, output: Any) -> None:
        pass


def agreed(value: float) -> float:
    """Return the largest value of all ranks. Called by all ranks."""
    told = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def wait_for_start() -> float:
    """Wait for a time that all ranks agree on, and return it. Called by all ranks."""
    start_s = agreed(time.monotonic() + _AHEAD_S)
    time.sleep(max(0.0, start_s - time.monotonic()))
    return start_s


class World:
    """Processes of all ranks of a layout, in which runs take turns."""

    def __init__(self, layout: Layout, runs: Sequence[Run], options: argparse.Namespace) -> None:
        self._layout = layout
        self._runs = runs
        self._forward_s = options.forward_s
        self._iterations = options.iterations
        self._num_ranks = layout.num_stages * layout.dp
        self._devices = [Device() for _ in range(self._num_ranks)]
        size = layout.group_size
        self._groups = [_FORK.Barrier(size) for _ in range(self._num_ranks // size)]

    def measure(self) -> list[list[float]]:
        """Return the seconds of the iterations of each run."""
        told, tells = _FORK.Pipe(duplex=False)
        port = free_port()
        ranks = [
            _FORK.Process(target=self._run_rank, args=(rank, port, tells), daemon=True)
            for rank in range(self._num_ranks)
        ]
        for each in ranks:
            each.start()
        wait([told, *(each.sentinel for each in ranks)], _DEADLINE_S)
        assert told.poll(), "a rank has ended, or none in time"
        found: list[list[float]] = json.loads(told.recv_bytes())
        for each in ranks:
            each.join()
        return found

    def _run_rank(self, rank: int, port: int, tells: Any) -> None:
        url = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", url, rank=rank, world_size=self._num_ranks)
        size = self._layout.group_size
        group = self._groups[rank // size] if size > 1 else None
        found = []
        for run in self._runs:
            device, role = self._devices[rank], self._layout.role_of(rank)
            if role in run.hosts:
                device = self._devices[self._layout.ranks_of(run.hosts[role])[0]]
            trains = rank < run.layout.num_stages * run.layout.dp
            place = RolePlace(run.layout, rank)
            slept = SleptRole(run, place, device, group, self._forward_s) if trains else None
            found.append([self._iterate(slept) for _ in range(self._iterations)])
        if rank == 0:
            tells.send_bytes(json.dumps(found).encode())
        dist.barrier()
        dist.destroy_process_group()

    def _iterate(self, slept: SleptRole | None) -> float:
        """Return the seconds of an iteration, until the last rank has ended."""
        iterate = partial(slept.iterate, slept.mail()) if slept else None
        start_s = wait_for_start()
        if iterate:
            iterate()
        return agreed(time.monotonic()) - start_s


def layout_rows(name: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """Measure the answers of a layout; yield a row for each loss."""
    layout = LAYOUTS[name]
    losses = [*losses_of(layout)][: 1 if options.quick else None]
    answers = [runs_of(layout, loss) for loss in losses]
    healthy = whole_pipelines(layout, layout.dp)
    runs = [*dict.fromkeys([healthy, *(run for each in answers for run in each.values())])]
    # The first iterations of a process are slower.
    _, *measured = World(layout, [healthy, *runs], options).measure()
    seconds = dict(zip(runs, map(median, measured), strict=True))
    planned_s = healthy.schedule.duration * options.forward_s
    print(f"{name}: healthy {seconds[healthy] / planned_s - 1:+.1%}", file=sys.stderr, flush=True)

    def ratio(run: Run | None) -> str:
        if run is None:
            return "-"
        counted = run.schedule.duration / healthy.schedule.duration
        return f"{seconds[run] / seconds[healthy]:.2f} ({counted:.2f})"

    for loss, of_loss in zip(losses, answers, strict=True):
        cells = [ratio(of_loss.get(each)) for each in ANSWERS]
        gains = [seconds[of_loss["crowd"]] / seconds[of_loss[each]] - 1 for each in ANSWERS[:2]]
        way = of_loss["share"].schedule.shares.way.name.lower()
        yield [name, loss.lost, loss.where, *cells, *(f"{each:+.0%}" for each in gains), way]


def unequal_pipelines(stages: int, pipelines: int, micro_batches: int, failures: int) -> float:
    """Return an iteration of pipelines of unequal length, in forward passes of a healthy stage."""
    live, best = stages * pipelines - failures, math.inf
    for count in range(max(1, pipelines - 2), pipelines + 1):
        sizes = [live // count + (each < live % count) for each in range(count)]
        if max(sizes) > _NUM_LAYERS:
            continue
        units = [3 * ceil_div(_NUM_LAYERS, size) / (_NUM_LAYERS / stages) for size in sizes]
        given = [0] * count
        for _ in range(micro_batches * pipelines):
            ends = [(given[i] + sizes[i]) * units[i] for i in range(count)]
            given[ends.index(min(ends))] += 1
        times = [(m + size - 1) * unit for m, size, unit in zip(given, sizes, units, strict=True)]
        best = min(best, max(times))
    return best


def count_rows() -> Iterator[list[str]]:
    """Yield the row of each layout: iterations, a healthy one being 1, and two ratios.

    Lost ranks lie in different pipelines and stages, and their hosts in the next ranks that are left.
    """
    for stages, pipelines, micro_batches, failures in COUNTED:
        layout = Layout(num_stages=stages, tp=1, cp=1, dp=pipelines)
        lost = [(pipelines - 1 - i % pipelines, i % stages) for i in range(failures)]
        left = [role for role in product(range(pipelines), range(stages)) if role not in lost]
        found = Degraded(
            layout, dict(zip(lost, left, strict=False)), (pipelines * micro_batches, 1)
        )
        schedules = found.shared(), found.shared(is_split=True), found.crowded
        ways = [found.ratio(each) for each in schedules]
        healthy = (micro_batches + stages - 1) * 3
        unequal = unequal_pipelines(stages, pipelines, micro_batches, failures) / healthy
        fitting = ceil_div(micro_batches * pipelines, len(left) // stages)
        others = [(fitting + stages - 1) * 3 / healthy, unequal]
        ratios = [each / ways[1] for each in others]
        name = f"{stages} x {pipelines}, {micro_batches}, {failures}"
        yield [name, *(f"{each:.2f}" for each in (*ways, *others, *ratios))]


def main() -> None:
    """Print tables of measured and of counted iterations."""
    options = read_options(
        layouts=(list(LAYOUTS), list(LAYOUTS)[:1]),
        iterations=(3, 1),
        forward_s=(0.03, 0.02, "of a stage"),
        counts=(False, False, "measure nothing"),
    )
    cpu_device.install()
    note = f"Medians of {options.iterations} iterations, a forward pass {options.forward_s} s."
    parts = [conditions(f"{note} {_MICRO_BATCHES} micro-batches a pipeline.")]
    if not options.counts:
        rows = [row for name in options.layouts for row in layout_rows(name, options)]
        gains = ("share over crowd", "put off over crowd", "way")
        headers = ("layout", "lost", "stage of hosts", *ANSWERS, *gains)
        parts.append(markdown_table(rows, headers))
    counted = (
        *("P x D, micro-batches, lost", *ANSWERS[:3], "shrink", "unequal pipelines"),
        *("shrink / put off", "unequal / put off"),
    )
    parts.append(markdown_table(count_rows(), counted))
    show(parts, options.output)


if __name__ == "__main__":
    main()
