"""Cost of an agreement of all ranks to the training thread, at up to 16,384 of them.

    python -m benchmarks.agreement [--iterations N] [--quick] [--output FILE.md]

Three views, since no machine here has that many ranks:

real jobs   of few ranks: the training threads of all of them are timed
one rank    of a large job: its `Decisions` and groups are those of the product, made from all ranks of the
            job, and each other member of its groups is a process. These stand for what is below and above
            them, which takes no time of this rank.
simulation  of the messages of all ranks, level by level, and when the last rank has the result

A pause stands for the optimizer step, in which another thread of each leader passes values on. For the one
rank it is long, as processes that stand for other nodes share its cores: what is timed there is the training
thread, and when messages come is simulated. Experts' tokens are added up over a stage in the same way, and
counted in. The last table has connections of a rank, and messages one after the other.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.conditions import ranks_on_cpu, versions
from benchmarks.output import markdown_table, parse_options, show
from moe_ft.engine import agreement as agreements
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import Reports
from moe_ft.engine.clock import Clock
from moe_ft.engine.decisions import Decisions, Turn, Votes
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.planning.levels import most_connections, plan_levels
from tests.harness import run_ranks

_SIZES = (64, 512, 4096, 16384)
_GOAL_MS = 2.0
_STEP_S = 0.05  # an optimizer step
_LONG_STEP_S = 0.25  # in which dozens of processes that share the cores have answered
_NUM_STAGES, _TOKENS = 16, (4, 256)  # layers of a stage, experts of a layer
_TIMEOUT_S = 120.0
_NICENESS = (
    10  # of processes that stand for ranks on other nodes, which share no core with this one
)
_FORK = multiprocessing.get_context("fork")
_NOT_COUNTED = 5  # first iterations
_VOTES = Votes(
    state=SnapshotState.COMPLETE,
    turn=Turn.TRY,
    is_ready=True,
    is_idle=True,
    can_persist=True,
    is_protected=True,
    can_grow=True,
    strategy=(1, 1),
    interval=(1,),
)
# Seconds of a message, as those of the simulated network of the tests: at least, and at most in addition.
_MESSAGE_S, _JITTER_S = 50e-6, 300e-6
_RARE, _LATE_S = 1e-4, 0.05  # share of messages that come late on a bad network, and by how much

Spent = tuple[list[float], list[float]]  # by iteration, seconds on a core and seconds that it waits


def _iterate(
    decisions: Decisions, num_iterations: int, meet: Callable[[], None], step_s: float = _STEP_S
) -> Spent:
    """Vote and hear the result in some iterations; return what the calling thread pays for each."""
    tokens, used, waited = torch.ones(_TOKENS, dtype=torch.int64), [], []
    for number in range(num_iterations):
        meet()  # as the norm of the gradients does
        begin = time.thread_time(), time.perf_counter()
        decisions.begin_count(tokens, number)
        decisions.begin(lambda: _VOTES, number)
        begun = time.perf_counter()
        time.sleep(step_s)
        read = time.perf_counter()
        if decisions.read(number) is None:
            raise RuntimeError("the ranks could not agree")
        end = time.perf_counter()
        used.append(time.thread_time() - begin[0])
        waited.append(begun - begin[1] + end - read)
    return used[_NOT_COUNTED:], waited[_NOT_COUNTED:]


def _decide(num_ranks: int, rank: int) -> tuple[Decisions, Callable[[], None]]:
    """Return the decisions of a rank of a job, and what closes them."""
    stages = [each * min(_NUM_STAGES, num_ranks) // num_ranks for each in range(num_ranks)]
    agreement, load = Agreement(_TIMEOUT_S), StageSum(_TIMEOUT_S)
    agreement.start()
    load.start(stages, rank)

    def close() -> None:
        agreement.close()
        load.close()

    return Decisions(agreement, load, Reports(), Clock()), close


# Real jobs


def agree(folder: str, num_iterations: int) -> None:
    """Agree in some iterations; write what the training thread paid for each. Runs on every rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    decisions, _ = _decide(dist.get_world_size(), rank)
    spent = _iterate(decisions, num_iterations, dist.barrier)
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


# One rank of a large job


class _LargeJob:
    """In the place of `torch.distributed`: one rank of a job, of which only its own groups are made.

    Attributes:
        made: members of its groups.
    """

    def __init__(self, folder: Path, num_ranks: int, rank: int) -> None:
        self._folder, self._num_ranks, self._rank = folder, num_ranks, rank
        self.made: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self._num_ranks

    def get_rank(self) -> int:
        return self._rank

    def new_group(self, members: Sequence[int], **_: Any) -> Any:
        if self._rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        self.made.append(tuple(members))
        return _group(self._folder, len(self.made), members, self._rank)


def _group(folder: Path, number: int, members: Sequence[int], rank: int) -> Any:
    store = dist.FileStore(str(folder / f"group_{number}"), len(members))
    timeout = timedelta(seconds=_TIMEOUT_S)
    return dist.ProcessGroupGloo(store, members.index(rank), len(members), timeout)


def _other_members(
    num_ranks: int, rank: int
) -> Iterator[tuple[int, Sequence[int], int, str, bool]]:
    """Yield all other members of a rank's groups: the first arguments of `_take_part`."""
    stages, number = min(_NUM_STAGES, num_ranks), 0
    of_stage = [each for each in range(num_ranks) if each * stages // num_ranks == 0]
    for ranks, op in ((range(num_ranks), "MIN"), (of_stage, "SUM")):
        levels = plan_levels(ranks)
        for level in levels:
            members = next((each for each in level if rank in each), ())
            number += bool(members)
            for member in members:
                if member != rank:
                    yield number, members, member, op, level is levels[-1]


def _take_part(
    folder: Path,
    number: int,
    members: Sequence[int],
    member: int,
    op: str,
    is_top: bool,
    num_iterations: int,
) -> None:
    """Reduce as a member of a group, and send or receive the result of the levels above."""
    os.nice(_NICENESS)
    size = _TOKENS if op == "SUM" else (len(_VOTES.as_numbers()),)
    values = torch.ones(size, dtype=torch.int64)
    group = _group(folder, number, members, member)
    reducing, sending = dist.AllreduceOptions(), dist.BroadcastOptions()
    reducing.reduceOp = getattr(dist.ReduceOp, op)
    reducing.timeout = sending.timeout = timedelta(seconds=_TIMEOUT_S)
    for _ in range(num_iterations):
        group.allreduce([values], reducing).wait()
        if not is_top:
            group.broadcast([values], sending).wait()
        values.fill_(1)


def _pay_as(rank: int, num_ranks: int, num_iterations: int, told: Any) -> None:
    """Tell what the training thread of a rank of a large job pays. Runs in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="agreement_"))
    others = [
        _FORK.Process(target=_take_part, args=(folder, *each, num_iterations))
        for each in _other_members(num_ranks, rank)
    ]
    for each in others:
        each.start()
    with suppress(PermissionError):  # a core is this process's when it wants one, as on a node
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    agreements.dist = _LargeJob(folder, num_ranks, rank)  # type: ignore[attr-defined, assignment]
    decisions, close = _decide(num_ranks, rank)
    told.put(_iterate(decisions, num_iterations, lambda: None, _LONG_STEP_S))
    close()
    for each in others:
        each.join()
    shutil.rmtree(folder)


def _pay_in_large_job(num_ranks: int, num_iterations: int) -> list[object]:
    """Return what the rank that leads all levels pays, and one that leads none, in milliseconds."""
    cells: list[object] = [f"{num_ranks:,}"]
    sums = []
    for rank in (0, 1):
        told = _FORK.SimpleQueue()
        process = _FORK.Process(target=_pay_as, args=(rank, num_ranks, num_iterations, told))
        process.start()
        used, waited = told.get()
        process.join()
        cells += [f"{1000 * median(used):.2f}", f"{1000 * median(waited):.2f}"]
        sums.append(1000 * max(median(used), median(waited)))
    return [*cells, "yes" if max(sums) < _GOAL_MS else "no"]


# Simulation


def _arrival_s(num_ranks: int, draw: Callable[[tuple[int, ...]], Any]) -> float:
    """Return when the last of all ranks has the result, after all have voted.

    gloo's all-reduce sends around a ring twice, each time to the next rank, its broadcast along a tree.

    Args:
        draw: returns seconds of messages, in an array of this shape.
    """
    levels = plan_levels(range(num_ranks))
    ready = np.zeros(num_ranks)
    for level in levels:
        members = np.array(level)
        rounds = draw((len(level), 2 * (members.shape[1] - 1), members.shape[1]))
        ready[members] = (ready[members].max(1) + rounds.max(2).sum(1))[:, None]
    for level in reversed(levels[:-1]):
        members = np.array(level)
        depth = (members.shape[1] - 1).bit_length()
        passed = draw((len(level), members.shape[1], depth)).sum(2)
        ready[members[:, 1:]] = (ready[members[:, :1]] + passed)[:, 1:]
    return float(ready.max())


def _simulate(num_ranks: int, num_times: int) -> list[object]:
    """Return when all ranks know, on a network as that of the tests and on a bad one, in milliseconds."""
    generator = np.random.default_rng(num_ranks)

    def usual(shape: tuple[int, ...]) -> Any:
        return _MESSAGE_S + _JITTER_S * generator.random(shape)

    def bad(shape: tuple[int, ...]) -> Any:
        return usual(shape) + _LATE_S * (generator.random(shape) < _RARE)

    cells: list[object] = [f"{num_ranks:,}"]
    for draw in (usual, bad):
        found = np.array([_arrival_s(num_ranks, draw) for _ in range(num_times)])
        waits = np.maximum(0, found - _STEP_S)
        cells += [f"{1000 * np.median(found):.1f}", f"{1000 * np.quantile(found, 0.99):.1f}"]
        cells.append(f"{1000 * np.median(waits):.1f}")
    return cells


# Counts


def _count(num_ranks: int) -> list[object]:
    """Return the connections and messages of an agreement in levels, next to those of one group."""
    levels = plan_levels(range(num_ranks))
    up = sum(2 * (len(level[0]) - 1) for level in levels)
    down = sum((len(level[0]) - 1).bit_length() for level in levels[:-1])
    others = [
        f"{num_ranks - 1:,}",
        most_connections(num_ranks),
        f"{2 * (num_ranks - 1):,}",
        up + down,
    ]
    return [f"{num_ranks:,}", len(levels), *others]


def _parts(options: SimpleNamespace) -> Iterator[str]:
    count = options.iterations + _NOT_COUNTED
    sizes = _SIZES[:2] if options.quick else _SIZES
    of_medians = f"medians of {options.iterations} iterations"
    yield f"{ranks_on_cpu()}. {versions()}."
    yield (
        "Real ranks: what the training thread pays, in ms. Time on a core, and time that it waits, of all "
        f"ranks and of the rank that pays most; {of_medians}"
    )
    yield markdown_table(
        [_pay(size, count) for size in ((8,) if options.quick else (8, 16, 32))],
        ("ranks", "levels", "on a core", "at most", "waits", "at most "),
    )
    yield (
        "One rank of a large job, in ms: the one that leads a group on each level, and one that leads none; "
        f"{of_medians}"
    )
    yield markdown_table(
        [_pay_in_large_job(size, count) for size in sizes],
        ("ranks", "leader: on a core", "waits", "other: on a core", "waits ", f"< {_GOAL_MS:g} ms"),
    )
    yield (
        f"Simulated messages of all ranks, in ms: when the last rank has the result. A message takes "
        f"{1e6 * _MESSAGE_S:.0f} to {1e6 * (_MESSAGE_S + _JITTER_S):.0f} us; on a bad network one in "
        f"{1 / _RARE:,.0f} takes {1000 * _LATE_S:.0f} ms more. A rank waits for what comes after the step of "
        f"{1000 * _STEP_S:.0f} ms; {options.times} agreements"
    )
    yield markdown_table(
        [_simulate(size, options.times) for size in _SIZES],
        ("ranks", "median", "99 %", "waits", "bad: median", "99 % ", "waits "),
    )
    yield "Connections of the rank that has most, and messages one after the other"
    headers = ("ranks", "levels", "connections, one group", "in levels")
    yield markdown_table(map(_count, _SIZES), (*headers, "messages, one group", "in levels "))


def main() -> None:
    """Measure, simulate and count, and show all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200, help="of each job (default 200)")
    parser.add_argument("--times", type=int, default=200, help="of each simulated agreement")
    options: Any = parse_options(parser, iterations=10, times=10)
    show(list(_parts(options)), options.output)


if __name__ == "__main__":
    main()
