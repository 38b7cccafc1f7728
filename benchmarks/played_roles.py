"""Iterations in which peers play the role of a lost rank: counts of schedules, and jobs on slept stages.

    python -m benchmarks.played_roles [--layouts NAME ...] [--iterations N] [--forward-s S] [--counts]
        [--quick] [--output FILE.md]

Counts are those of the schedules of moe_ft/planning/schedules.py, without communication, a forward pass being
as long as each part of a backward pass. Failures lie in different pipelines and stages. "unequal pipelines"
has all live ranks in pipelines of P and fewer of 32 layers, as Oobleck does, micro-batches given to the one
that ends first.

In jobs, forward and backward passes of a micro-batch on a stage do their work and then sleep until their time
has passed, so that ranks that share cores take as long as on devices of their own. One rank ends in the
middle of the job, and peers go on. Seconds are medians of iterations before and after, and their range.
Memory is that of the tensors that a peer has for the role, next to what `plan` says.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args

from benchmarks.jobs import data_folder, job_folder
from benchmarks.output import conditions, markdown_table, read_options, show, spread
from benchmarks.slow_stages import lasting
from megatron.fault_tolerance.degraded.rules import memory_of_role
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.arithmetic import ceil_div
from moe_ft.planning.lost_ranks import Degraded, Layout
from moe_ft.state.tensors import inner_optimizers
from tests.distributed.test_played_roles import LOSSES, run_without
from tests.harness import events, run_training
from tests.played_roles import LOST, NODES

# Stages, pipelines, micro-batches of each, failures.
COUNTED = (
    *((4, 3, 6, 1), (2, 2, 8, 1), (4, 8, 8, 1), (4, 8, 8, 3), (8, 4, 16, 1), (8, 4, 16, 3)),
    *((8, 8, 16, 6), (4, 8, 32, 1), (16, 4, 16, 6)),
)
LAYOUTS = {
    "PP2 x DP2, 4 micro-batches": ("rank of the last stage", 4, 16),
    "PP2 x DP3, 4 micro-batches": ("one of three ranks of a stage", 6, 24),
}
_MEMORY = "memory.json"
FORWARD, LOST_AT = "BENCHMARK_FORWARD_S", "BENCHMARK_LOST_AT"
_NUM_LAYERS, _DEADLINE_S = 32, 380.0


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
    """Yield the row of each layout: iterations, a healthy one being 1, and two ratios."""
    for stages, pipelines, micro_batches, failures in COUNTED:
        dead = frozenset((pipelines - 1 - i % pipelines, i % stages) for i in range(failures))
        layout = Layout(num_stages=stages, tp=1, cp=1, dp=pipelines)
        found = Degraded(layout, dead, pipelines * micro_batches, 1)
        ways = [
            found.ratio(found.rerouted(is_split=is_split, more=more, is_whole=is_whole))
            for is_split, more, is_whole in (
                (False, 0, True),
                (False, stages, False),
                (True, stages, False),
            )
        ]
        healthy = (micro_batches + stages - 1) * 3
        unequal = unequal_pipelines(stages, pipelines, micro_batches, failures) / healthy
        others = [found.dropped, unequal]
        ratios = [each / ways[-1] for each in others]
        name = f"{stages} x {pipelines}, {micro_batches}, {failures}"
        yield [name, *(f"{each:.2f}" for each in (*ways, *others, *ratios))]


def train_slept(flags: list[str]) -> None:
    """Train on stages that take a given time until a rank ends, and then without it. Runs on every rank."""
    forward_s = float(os.environ[FORWARD])
    with Patches() as patches:
        for name, seconds in (("forward_step", forward_s), ("backward_step", 2 * forward_s)):
            patches.set(schedules, name, lasting(getattr(schedules, name), seconds))
        last = run_without(flags, int(os.environ[LOST_AT]))
    (model, *_), degradation = last.built, last.degradation
    for shard in degradation.deputies.shards.values():
        states = [each.optimizer.state.items() for each in inner_optimizers(shard)]
        tensors = [
            each for state in states for master, of in state for each in (master, *of.values())
        ]
        executor = degradation._executor
        assert executor is not None
        sums = [each for of_role in executor._gradients._sums.values() for each in of_role]
        planned = memory_of_role(model)
        note = {
            "gradients": [sum(each.nbytes for each in sums), planned.gradients],
            # Without counters of steps.
            "shard": [
                sum(each.nbytes for each in tensors if getattr(each, "ndim", 0)),
                planned.shard,
            ],
        }
        (Path(get_args().moe_ft_event_log) / _MEMORY).write_text(json.dumps(note))


def job_row(name: str, folder: Path, data: list[str], options: argparse.Namespace) -> list[str]:
    """Run a job; return its row."""
    case, num_ranks, batch = LAYOUTS[name]
    loss, lost_at = LOSSES[case], options.iterations // 2
    with job_folder(folder) as job:
        changes = {"train_iters": options.iterations, "global_batch_size": batch, "clip_grad": 0.0}
        dense = ("--num-workers", "0", "--moe-ft-strategy", "dense")
        flags = job.words(data, loss.layout, dense, changes)
        env = {LOST: json.dumps(loss.dead), LOST_AT: str(lost_at)}
        env[FORWARD] = str(options.forward_s)
        run_training(
            flags,
            num_ranks,
            log_dir=job.log / "logs",
            deadline_s=_DEADLINE_S,
            train=train_slept,
            env=env,
            nodes=NODES[:num_ranks],
        ).check()
        times = [line["iteration_s"] for line in events(job.events, 0, "iteration")]
        memory = json.loads((job.events / _MEMORY).read_text())
    healthy, degraded = times[1:lost_at], times[lost_at + 1 :]
    layout = Layout(num_stages=2, tp=1, cp=1, dp=num_ranks // 2)
    counted = Degraded(layout, layout.roles_of(loss.dead), batch, 2)
    planned = counted.ratio(counted.rerouted(is_split=False, more=0, is_whole=True))
    ratio = sorted(degraded)[len(degraded) // 2] / sorted(healthy)[len(healthy) // 2]
    found, planned_bytes = (
        f"{memory['gradients'][each] / 1e6:.3f} + {memory['shard'][each] / 1e6:.3f}"
        for each in (0, 1)
    )
    cells = [spread(healthy), spread(degraded), f"{ratio:.2f}", f"{planned:.2f}"]
    return [name, *cells, found, planned_bytes]


def main() -> None:
    """Print tables of counts and of jobs."""
    options = read_options(
        layouts=(list(LAYOUTS), list(LAYOUTS)[:1]),
        iterations=(12, 6),
        forward_s=(0.2, 0.05, "of a stage"),
        counts=(False, False, "no jobs"),
    )
    parts = [
        conditions(f"Medians of iterations, a forward pass {options.forward_s} s."),
        markdown_table(
            count_rows(),
            (
                *("P x D, micro-batches, failures", "one peer a role", "shared", "shared, put off"),
                *(
                    "pipelines dropped",
                    "unequal pipelines",
                    "dropped / put off",
                    "unequal / put off",
                ),
            ),
        ),
    ]
    if not options.counts:
        with data_folder() as (folder, data):
            rows = [job_row(name, folder, data, options) for name in options.layouts]
        headers = ("job", "healthy, s", "a role played, s", "ratio", "planned")
        memory = ("gradients + shard of a role, MB", "planned, MB")
        parts.append(markdown_table(rows, (*headers, *memory)))
    show(parts, options.output)


if __name__ == "__main__":
    main()
