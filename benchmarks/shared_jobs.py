"""Seconds per iteration of real jobs that have lost a node without a spare: shared, and crowded.

    python -m benchmarks.shared_jobs [--layouts NAME ...] [--answers NAME ...] [--iterations N]
        [--forward-s S] [--quick] [--output FILE.md]

Nodes of one rank run Megatron's loop under `moe_ft launch`, each with a device of its own (slow_devices.py):
a pass of a micro-batch does its work and holds the device for a given time. A node is killed, another one
takes its rank, and training goes on. Seconds are medians of iterations before and after, and their range. The
counts are those of `plan`.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.jobs import data_folder, job_folder
from benchmarks.output import conditions, markdown_table, read_options, show, spread
from benchmarks.slow_devices import FOLDER, FORWARD_S
from moe_ft.planning.lost_ranks import Layout
from moe_ft.planning.schedules import SHARED, Role, Way, plan_schedule
from tests.kept_nodes import KeptNodes

_PROGRAM = Path(__file__).with_name("slow_devices.py")
_ENDLESS = 100_000
_WAYS = {"share": SHARED, "crowd": (Way.CROWD,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Job of nodes with one rank.

    Attributes:
        num_micro_batches: of each pipeline.
    """

    layout: Layout
    num_micro_batches: int

    @property
    def num_ranks(self) -> int:
        """Of the job."""
        return self.layout.num_stages * self.layout.dp


CASES = {
    "PP2 x DP2, 6 micro-batches": Case(
        layout=Layout(num_stages=2, tp=1, cp=1, dp=2), num_micro_batches=6
    ),
    "PP2 x DP4, 6 micro-batches": Case(
        layout=Layout(num_stages=2, tp=1, cp=1, dp=4), num_micro_batches=6
    ),
}


def row(
    name: str, answer: str, folder: Path, data: list[str], options: argparse.Namespace
) -> list[str]:
    """Run a job that loses its last node; return its row."""
    case = CASES[name]
    size, lost = case.num_ranks, case.num_ranks - 1
    with job_folder(folder) as place:
        changes = {
            "train_iters": _ENDLESS,
            "log_interval": _ENDLESS,  # those of experts need collectives between iterations
            "global_batch_size": 2 * case.num_micro_batches * case.layout.dp,
            "micro_batch_size": 2,
            "attention_dropout": 0.0,
        }
        repair = ("--moe-ft-repair", "auto", "--moe-ft-without-spare", answer)
        flags = ("--moe-ft-strategy", "dense", *repair)
        words = place.words(data, {"pp": case.layout.num_stages}, flags, changes)
        with KeptNodes(
            place.log, [str(_PROGRAM), *words], num_nodes=size, ranks_per_node=1, lost_after_s=5
        ) as nodes:
            nodes.start(*(f"node{number}" for number in range(size)))
            place.wait_for_iterations(size, 0.0, options.iterations + 2)
            nodes.kill(f"node{lost}")
            before = len(place.logged(0, "iteration"))
            place.wait_for_iterations(size - 1, 0.0, before + options.iterations + 3)
            (repaired,) = place.logged(0, "repair")
            assert repaired["shared"] == ([lost] if answer == "share" else []), repaired
            (host,) = {int(each.removeprefix("node")) for each in repaired["taken_over"].values()}
            iterations = place.logged(0, "iteration")
    times = {each["iteration"]: each["iteration_s"] for each in iterations}
    broken = repaired["broken_iteration"] + 1
    # The first ones are slow, and the broken one is that of the repair.
    healthy = [each for number, each in times.items() if 2 < number < broken]
    degraded = [each for number, each in times.items() if number > broken + 1]
    hosts: dict[Role, Role] = {case.layout.role_of(lost): case.layout.role_of(host)}
    pipelines = case.layout.pipelines(case.num_micro_batches)
    more = case.layout.num_stages
    planned = plan_schedule(pipelines, hosts, ways=_WAYS[answer], most_more_held=more).duration
    planned /= 3 * (case.num_micro_batches + more - 1)
    ratio = median(degraded) / median(healthy)
    where = "same" if lost // case.layout.dp == host // case.layout.dp else "another"
    return [
        name,
        answer,
        where,
        spread(healthy),
        spread(degraded),
        f"{ratio:.2f}",
        f"{planned:.2f}",
    ]


def main() -> None:
    """Print the table."""
    options = read_options(
        layouts=(list(CASES), list(CASES)[:1]),
        answers=(list(_WAYS), ["share"]),
        iterations=(8, 3, "before and after the loss"),
        forward_s=(0.2, 0.05, "of a pass of a micro-batch on a stage"),
    )
    with data_folder() as (folder, data):
        # Ranks are forks of a process that has begun with these.
        os.environ |= {FOLDER: str(folder), FORWARD_S: str(options.forward_s)}
        rows = [
            row(name, answer, folder, data, options)
            for name in options.layouts
            for answer in options.answers
        ]
    headers = (
        "job",
        "answer",
        "stage of the host",
        "healthy, s",
        "after the loss, s",
        "ratio",
        "planned",
    )
    about = conditions(f"Medians of iterations, a forward pass {options.forward_s} s.")
    show([about, markdown_table(rows, headers)], options.output)


if __name__ == "__main__":
    main()
