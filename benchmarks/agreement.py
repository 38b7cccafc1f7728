"""Cost of an agreement of all ranks to the training thread, and its messages at up to 16,384 ranks.

    python -m benchmarks.agreement [--iterations N] [--quick] [--output FILE.md]

The training threads of all ranks of real jobs are timed. A pause stands for the optimizer step, in which
another thread of each leader passes values on. Experts' tokens are added up over a stage in the same way, and
counted in. The last table has connections of a rank, and messages one after the other.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.output import conditions, markdown_table, read_options, show
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.decisions import Decisions, EndVote, Votes
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.planning.levels import most_connections, plan_levels
from tests.harness import run_ranks

_SIZES = (64, 512, 4096, 16384)
_STEP_S = 0.05  # an optimizer step
_NUM_STAGES, _TOKENS = 16, (4, 256)  # layers of a stage, experts of a layer
_TIMEOUT_S = 120.0
_NOT_COUNTED = 5  # first iterations
_VOTES = Votes(
    state=SnapshotState.COMPLETE,
    turn=EndVote.TRY,
    is_ready=True,
    is_idle=True,
    can_persist=True,
    is_protected=True,
    can_grow=True,
    strategy=(1, 1),
    interval=(1,),
)
Spent = tuple[list[float], list[float]]  # by iteration, seconds on a core and seconds that it waits


def _iterate(decisions: Decisions, num_iterations: int, meet: Callable[[], None]) -> Spent:
    """Vote and hear the result in some iterations; return what the calling thread pays for each."""
    tokens, used, waited = torch.ones(_TOKENS, dtype=torch.int64), [], []
    for number in range(num_iterations):
        meet()  # as the norm of the gradients does
        begin = time.thread_time(), time.perf_counter()
        decisions.begin_count(tokens, number)
        decisions.begin(lambda: _VOTES, number)
        begun = time.perf_counter()
        time.sleep(_STEP_S)
        read = time.perf_counter()
        if decisions.read(number) is None:
            raise RuntimeError("the ranks could not agree")
        end = time.perf_counter()
        used.append(time.thread_time() - begin[0])
        waited.append(begun - begin[1] + end - read)
    return used[_NOT_COUNTED:], waited[_NOT_COUNTED:]


# Real jobs


def agree(folder: str, num_iterations: int) -> None:
    """Agree in some iterations; write what the training thread paid for each. Runs on every rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    agreement, load = Agreement(_TIMEOUT_S), StageSum(_TIMEOUT_S)
    agreement.start()
    load.start([each * min(_NUM_STAGES, num_ranks) // num_ranks for each in range(num_ranks)], rank)
    spent = _iterate(
        Decisions(agreement, load, EventQueue(), Clock()), num_iterations, dist.barrier
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(spent))
    dist.barrier()


def _pay(num_ranks: int, num_iterations: int) -> list[object]:
    """Return what the training threads of real ranks pay for an agreement, in milliseconds."""
    folder = Path(tempfile.mkdtemp(prefix="agreement_"))
    run_ranks(agree, num_ranks, str(folder), num_iterations, log_dir=folder / "log").check()
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    shutil.rmtree(folder)
    cells: list[object] = [num_ranks, len(plan_levels(range(num_ranks)))]
    for kind in range(2):
        most = max(found, key=lambda each: median(each[kind]))
        each = [1000 * seconds for rank in found for seconds in rank[kind]]
        cells += [f"{median(each):.2f}", f"{1000 * median(most[kind]):.2f}"]
    return cells


# Counts


def _count(num_ranks: int) -> list[object]:
    """Return the connections and messages of an agreement in levels, next to those of one group."""
    levels = plan_levels(range(num_ranks))
    up = sum(2 * (len(level[0]) - 1) for level in levels)
    down = sum((len(level[0]) - 1).bit_length() for level in levels[:-1])
    others = f"{num_ranks - 1:,}", most_connections(num_ranks), f"{2 * (num_ranks - 1):,}"
    return [f"{num_ranks:,}", len(levels), *others, up + down]


def main() -> None:
    """Measure and count, and show both."""
    options = read_options(iterations=(200, 10, "of each job"))
    jobs = [
        _pay(size, options.iterations + _NOT_COUNTED)
        for size in ((8,) if options.quick else (8, 16, 32))
    ]
    parts = [
        conditions(f"Medians of {options.iterations} iterations."),
        "Real ranks: what the training thread pays, in ms. Time on a core, and time that it waits, of all "
        "ranks and of the rank that pays most",
        markdown_table(jobs, ("ranks", "levels", "on a core", "at most", "waits", "at most ")),
        "Connections of the rank that has most, and messages one after the other",
        markdown_table(
            map(_count, _SIZES),
            (
                *("ranks", "levels", "connections, one group", "in levels"),
                *("messages, one group", "in levels "),
            ),
        ),
    ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
