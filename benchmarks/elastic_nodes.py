"""Seconds that a job stands still when it loses a node and goes on with three, and when the node is back.

    python -m benchmarks.elastic_nodes [--kinds NAME ...] [--repeats N] [--back-after SECONDS] [--quick]
        [--output FILE.md]

Four nodes with one rank each train the demo model of the tests, data parallel. All processes of the last one
are killed, and their connections end. Kinds:

keep      `keep --nodes 3:4` and --moe-ft-elastic: all ranks begin again on three nodes. The node is started
          again after some iterations, and all begin again on four.
wait      `keep --nodes 4` and --moe-ft-without-spare wait: the ranks wait until the node is back. It is
          started --back-after after its loss, and needs its imports then.
torchrun  `torchrun --nnodes 3:4`, with --moe-ft-elastic and ranks that `keep` forks, so that no start needs
          imports. It is given 8 s to notice a loss and waits 5 s for others, instead of its own 15 and 30 s.

Seconds are from the end of the last iteration before to the end of the first one after, on rank 0.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.jobs import SCRIPT, JobFolder, data_folder, job_folder
from benchmarks.output import conditions, markdown_table, read_options, show, spread
from benchmarks.recoveries import check_not_degraded
from tests.harness import events
from tests.kept_nodes import KeptNodes
from tests.nodes import Nodes
from tests.relayouts import ANY

KINDS = ("keep", "wait", "torchrun")
_NUM_NODES, _FEWEST = 4, 3
_NAMES = [f"node{number}" for number in range(_NUM_NODES)]
_WARM_ITERATIONS = 8  # between a change and the next
_ENDLESS = 100_000  # iterations: the job ends with its last loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Seconds without an iteration when a node was lost, and when it was back; None if both are one."""

    lost_s: float
    back_s: float | None


def run(
    kind: str, data: Sequence[str], folder: Path, options: argparse.Namespace
) -> Iterator[Change]:
    """Run a job of a kind, and yield what each loss has taken."""
    with job_folder(folder) as place:
        nodes, start = _job(kind, place, data)
        last = _NUM_NODES - 1
        with nodes:
            for number in range(_NUM_NODES):
                start(number)
            place.wait_for_iterations(_NUM_NODES, 0.0, _WARM_ITERATIONS)
            for _ in range(options.repeats):
                lost_s = time.time()
                nodes.kill(_NAMES[last])
                if kind == "wait":
                    time.sleep(options.back_after)
                    start(last)
                    place.wait_for_iterations(_NUM_NODES, lost_s + 1, _WARM_ITERATIONS)
                    yield Change(lost_s=_longest(place, lost_s), back_s=None)
                else:
                    place.wait_for_iterations(_FEWEST, lost_s + 1, _WARM_ITERATIONS)
                    pause_s, back_s = _longest(place, lost_s), time.time()
                    start(last)
                    place.wait_for_iterations(_NUM_NODES, back_s, _WARM_ITERATIONS)
                    yield Change(lost_s=pause_s, back_s=_longest(place, back_s))
        _check(kind, place, options.repeats)


def _job(
    kind: str, place: JobFolder, data: Sequence[str]
) -> tuple["KeptNodes | Nodes", Callable[[int], None]]:
    """Return the nodes of a job, and what starts one of them by its number."""
    answer = ("--moe-ft-without-spare", "wait") if kind == "wait" else ("--moe-ft-elastic", *ANY)
    changes = {"train_iters": _ENDLESS, "calculate_per_token_loss": True}
    words = [SCRIPT, *place.words(data, {}, ("--moe-ft-strategy", "dense", *answer), changes)]
    fewest = None if kind == "wait" else _FEWEST
    if kind == "torchrun":
        agents = Nodes(
            place.log,
            words,
            num_nodes=_NUM_NODES,
            num_ranks=_NUM_NODES,
            max_restarts=100,
            fewest=fewest,
            keeps=True,
            env={"OMP_NUM_THREADS": "1"},
        )
        return agents, lambda number: agents.start(_NAMES[number])
    kept = KeptNodes(
        place.log,
        [*words, "--moe-ft-repair", "auto"],
        num_nodes=_NUM_NODES,
        ranks_per_node=1,
        fewest=fewest,
        imports=True,
    )
    return kept, lambda number: kept.start(_NAMES[number], first=number)


def _longest(place: JobFolder, since_s: float) -> float:
    """Return the longest time from the end of an iteration to that of the next, the first before a time."""
    ends: list[float] = [each["time"] for each in place.logged(0, "iteration")]
    return max(after - before for before, after in pairwise(ends) if after > since_s)


def _check(kind: str, place: JobFolder, repeats: int) -> None:
    """Check that the job went on as its kind says, as often as a node was lost."""
    check_not_degraded([events(place.events, rank) for rank in range(_NUM_NODES)])
    sizes = [each["world_size"] for each in events(place.events, 0, "start")]
    dead = [each["dead_ranks"] for each in events(place.events, 0, "repair")]
    if kind == "wait":
        assert (sizes, dead) == ([_NUM_NODES], [[_NUM_NODES - 1]] * repeats), (sizes, dead)
    else:
        # On a busy machine torchrun may have begun without the last agents.
        assert sizes[-2 * repeats :] == [_FEWEST, _NUM_NODES] * repeats, sizes
        assert not dead, dead


def rows(found: dict[str, list[Change]]) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each kind."""
    for kind, changes in found.items():
        back_s = [each.back_s for each in changes if each.back_s is not None]
        lost = spread([each.lost_s for each in changes], ".1f")
        yield kind, lost, spread(back_s, ".1f") if back_s else "-"


def main() -> None:
    """Lose a node again and again, and print the table."""
    options = read_options(
        kinds=(list(KINDS), ["keep"]),
        repeats=(3, 1, "losses of a kind"),
        back_after=(30, 30, "seconds; of `wait`"),
    )
    found = {}
    with data_folder() as (folder, data):
        for kind in options.kinds:
            print(kind, file=sys.stderr, flush=True)
            found[kind] = list(run(kind, data, folder, options))
    text = f"Median (range) of {options.repeats}; --back-after {options.back_after}."
    headers = ("kind", "a node is lost, s", "it is back, s")
    show([conditions(text), markdown_table(rows(found), headers)], options.output)


if __name__ == "__main__":
    main()
