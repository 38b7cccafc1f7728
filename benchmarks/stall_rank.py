"""A rank of benchmarks/stall.py: trains with and without checkpoints of one candidate, and takes the time."""

import contextlib
import enum
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.candidate import Candidate, Site, State
from benchmarks.ours import OURS
from benchmarks.peers import PEERS, TORCH_CHECKPOINTING

# A new candidate: subclass `Candidate` and add it here under the name that the table shows.
CANDIDATES: dict[str, type[Candidate]] = {**OURS, **PEERS, **TORCH_CHECKPOINTING}

NUM_RANKS = 2
BYTES_PER_ELEMENT = 2 + 4 + 4 + 4  # weight, master weight, two moments
CHECKPOINT_INTERVAL = 5
_COMPLETION_DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings of one run of two ranks."""

    candidate: str
    work: str
    mib: int
    iteration_s: float
    num_checkpoints: int
    num_parameters: int

    def deadline_s(self) -> float:
        """Return the time after which a run is given up: ten times the expected time, and time to start."""
        num_iterations = CHECKPOINT_INTERVAL * (2 * self.num_checkpoints + 6)
        return 180.0 + 10 * num_iterations * self.iteration_s


class Phase(enum.IntEnum):
    """Purpose of sampling host memory now. Timed checkpoints are not sampled."""

    OFF = 0
    BEFORE = 1
    PEAK = 2


def new_parameter(rank: int, index: int, num_elements: int) -> State:
    """Return the tensors of one parameter at iteration 0."""
    generator = torch.Generator().manual_seed((index << 8) + rank)
    master = torch.randn(num_elements, generator=generator)
    return {
        f"{index}.weight": master.bfloat16(),
        f"{index}.master": master,
        f"{index}.exp_avg": torch.zeros(num_elements),
        f"{index}.exp_avg_sq": torch.zeros(num_elements),
    }


def step_parameter(state: State, index: int, iteration: int) -> None:
    """Change every element of a parameter, by enough to show in bfloat16; same input, same bits."""
    exp_avg = state[f"{index}.exp_avg"].mul_(0.9).add_(0.1 * iteration)
    state[f"{index}.exp_avg_sq"].mul_(0.99).add_(0.01 * iteration**2)
    master = state[f"{index}.master"].add_(exp_avg, alpha=-0.02)
    state[f"{index}.weight"].copy_(master)


class Loop:
    """The state, the work and the iteration count of one rank."""

    def __init__(self, rank: int, mib: int, num_parameters: int) -> None:
        self.rank = rank
        self.iteration = 0
        self._num_parameters = num_parameters
        self.num_elements = mib * 2**20 // (num_parameters * BYTES_PER_ELEMENT)
        self.state: State = {}
        for index in range(num_parameters):
            self.state |= new_parameter(rank, index, self.num_elements)
        self._forward_backward: Callable[[], None] = lambda: None
        self._gradient = torch.zeros(1)

    def set_work(self, kind: str, iteration_s: float) -> None:
        """Make an iteration take about `iteration_s`. All ranks, which compute at the same time."""
        idle_s = median(self.iterate() for _ in range(5))
        work_s = max(iteration_s - idle_s, 0.0)
        factor = torch.rand(512, 512)
        product = torch.empty_like(factor)
        each_s = median(_seconds(lambda: torch.mm(factor, factor, out=product)) for _ in range(100))
        count = torch.tensor(work_s / each_s)
        dist.all_reduce(count)

        def compute() -> None:
            for _ in range(round(count.item() / NUM_RANKS)):
                torch.mm(factor, factor, out=product)

        self._forward_backward = compute if kind == "busy" else lambda: time.sleep(work_s)

    def iterate(
        self, candidate: Candidate | None = None, blocked_s: list[float] | None = None
    ) -> float:
        """Run one iteration and return its seconds; append what the candidate blocked."""
        begin = time.perf_counter()
        blocked = _seconds(candidate.poll) if candidate else 0.0
        self._forward_backward()
        dist.all_reduce(self._gradient)  # the ranks of a job wait for each other
        blocked += _seconds(candidate.before_step) if candidate else 0.0
        self.iteration += 1
        for index in range(self._num_parameters):
            step_parameter(self.state, index, self.iteration)
        if blocked_s is not None:
            blocked_s.append(blocked)
        return time.perf_counter() - begin

    def plain_window(self) -> float:
        """Return the seconds of as many iterations as a checkpoint has, without one."""
        dist.barrier()
        return _seconds(lambda: [self.iterate() for _ in range(CHECKPOINT_INTERVAL)])

    def is_intact(self, loaded: Any, iteration: int, iteration_of: Mapping[str, int]) -> bool:
        """Return whether a loaded state has the bits of an iteration, which is computed again.

        Args:
            iteration_of: that of tensors that are of another one.
        """
        for index in range(self._num_parameters):
            expected = new_parameter(self.rank, index, self.num_elements)
            last = iteration_of.get(f"{index}.master", iteration)
            for past in range(1, last + 1):
                step_parameter(expected, index, past)
            if not all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()):
                return False
        return True


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def is_complete(candidate: Candidate) -> bool:
    """Return whether the latest checkpoint is complete on all ranks. All ranks."""
    complete = torch.tensor(int(candidate.is_complete()))
    dist.all_reduce(complete, op=dist.ReduceOp.MIN)
    return bool(complete)


def checkpoint(loop: Loop, candidate: Candidate) -> list[float]:
    """Take a checkpoint; return seconds blocked, until complete, in total, and the number of iterations."""
    dist.barrier()
    candidate.completed_s = None
    began = time.perf_counter()
    candidate.save(loop.iteration)
    blocked = [time.perf_counter() - began]
    count = 0
    while count < CHECKPOINT_INTERVAL or not is_complete(candidate):
        loop.iterate(candidate, blocked)
        count += 1
        if time.perf_counter() - began > _COMPLETION_DEADLINE_S:
            raise TimeoutError(f"a checkpoint was not complete in {_COMPLETION_DEADLINE_S:.0f} s")
    total = time.perf_counter() - began
    return [sum(blocked), (candidate.completed_s or math.nan) - began, total, count]


def measure(loop: Loop, make: Callable[[], Candidate], job: Job, phase: Any) -> dict[str, Any]:
    """Return what rank 0 reports. All ranks."""

    @contextlib.contextmanager
    def sampling(kind: Phase) -> Iterator[None]:
        dist.barrier()
        phase.value = kind
        yield
        dist.barrier()
        phase.value = Phase.OFF

    loop.plain_window()
    candidate = make()
    with sampling(Phase.BEFORE):
        loop.plain_window()
    with sampling(Phase.PEAK):
        candidate.start()
        checkpoint(loop, candidate)
        checkpoint(loop, candidate)
    plain, rows = [loop.plain_window()], []
    for _ in range(job.num_checkpoints):
        saved_iteration = loop.iteration
        rows.append(checkpoint(loop, candidate))
        plain.append(loop.plain_window())
    loaded = candidate.load(saved_iteration)
    intact = torch.tensor(int(loop.is_intact(loaded, saved_iteration, candidate.iteration_of)))
    candidate.close()
    times, plain_s = torch.tensor(rows), torch.tensor(plain)
    for slowest in (times, plain_s):
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(intact, op=dist.ReduceOp.MIN)
    return {"times": times.tolist(), "plain": plain_s.tolist(), "intact": bool(intact)}


def run_rank(rank: int, job: Job, disk: Path, tmpfs: Path, phase: Any) -> None:
    """Measure one candidate and leave the report, or the error, as a file."""
    torch.set_num_threads(1)
    report: dict[str, Any]
    try:
        store = dist.FileStore(str(disk / "store"), NUM_RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
        loop = Loop(rank, job.mib, job.num_parameters)
        loop.set_work(job.work, job.iteration_s)
        site = Site(rank=rank, num_ranks=NUM_RANKS, disk=disk, tmpfs=tmpfs)
        report = measure(loop, lambda: CANDIDATES[job.candidate](loop.state, site), job, phase)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        (disk / f"error_{rank}.json").write_text(json.dumps([time.monotonic(), text]))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # whatever the candidate has left running is ended by the parent
    if rank == 0:
        (disk / "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()
