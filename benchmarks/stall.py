"""Cost of a checkpoint to training: seconds blocked, until complete and lost, and host memory.

    python -m benchmarks.stall [--candidates TEXT ...] [--work busy|sleep|both] [--quick] [--output FILE.md]

Two ranks on gloo train a state of which every byte changes in every iteration, and save it every fifth
iteration. A row is the median and range over the checkpoints, of the slower rank:

blocked   what the training thread spends in the candidate's calls: waiting for the previous checkpoint,
          save, polls, and the wait before the optimizer
complete  from the call of save until the checkpoint is what "complete means" says, on both ranks; of
          candidates that notice it in a poll, until that poll, once per iteration
cost      the five iterations from a checkpoint on, minus the median of five without checkpoints
memory    see `host_memory_bytes`, both ranks, peak minus before

Between checkpoints the ranks compute matrix products ("busy", a core each) or sleep ("sleep", as the
host does while a GPU works). The last checkpoint is loaded and compared, bit by bit, with its iteration.
Files go to the folder for temporary files (TMPDIR), which has to be a disk for fsync to mean anything,
and stay until the candidate ends. The adapters are in benchmarks/ours.py and, of other
libraries, in benchmarks/peers.py. The exit code is 1 if a candidate that is installed
fails, or loads something else.
"""

import argparse
import contextlib
import enum
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.candidate import Candidate, Site, State
from benchmarks.host_memory import host_memory_bytes
from benchmarks.ours import OURS
from benchmarks.output import markdown_table, parse_options, show
from benchmarks.peers import PEERS

# A new candidate: subclass `Candidate` and add it here under the name that the table shows.
CANDIDATES: dict[str, type[Candidate]] = {**OURS, **PEERS}

NUM_RANKS = 2
NUM_PARAMETERS = 40
BYTES_PER_ELEMENT = 2 + 4 + 4 + 4  # weight, master weight, two moments
CHECKPOINT_INTERVAL = 5
TORN = "TORN"  # content of a checkpoint that is not as it was saved
_SAMPLE_S = 0.02
_COMPLETION_DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings of one run of two ranks."""

    candidate: str
    work: str
    mib: int
    iteration_s: float
    num_checkpoints: int

    def deadline_s(self) -> float:
        """Return the time after which a run is given up: ten times the expected time, and time to start."""
        num_iterations = CHECKPOINT_INTERVAL * (2 * self.num_checkpoints + 6)
        return 180.0 + 10 * num_iterations * self.iteration_s


class Phase(enum.IntEnum):
    """Purpose of sampling host memory now. Timed checkpoints are not sampled."""

    OFF = 0
    BEFORE = 1
    PEAK = 2


# --- the training loop of one rank


def new_parameter(rank: int, index: int, num_elements: int) -> State:
    """Return the tensors of one parameter at iteration 0."""
    generator = torch.Generator().manual_seed(rank * NUM_PARAMETERS + index)
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

    def __init__(self, rank: int, mib: int) -> None:
        self.rank, self.iteration = rank, 0
        self.num_elements = mib * 2**20 // (NUM_PARAMETERS * BYTES_PER_ELEMENT)
        self.state: State = {}
        for index in range(NUM_PARAMETERS):
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
        for index in range(NUM_PARAMETERS):
            step_parameter(self.state, index, self.iteration)
        if blocked_s is not None:
            blocked_s.append(blocked)
        return time.perf_counter() - begin

    def plain_window(self) -> float:
        """Return the seconds of as many iterations as a checkpoint has, without one."""
        dist.barrier()
        return _seconds(lambda: [self.iterate() for _ in range(CHECKPOINT_INTERVAL)])

    def is_intact(self, loaded: Any, iteration: int) -> bool:
        """Return whether a loaded state has the bits of an iteration, which is computed again."""
        for index in range(NUM_PARAMETERS):
            expected = new_parameter(self.rank, index, self.num_elements)
            for past in range(1, iteration + 1):
                step_parameter(expected, index, past)
            if not all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()):
                return False
        return True


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


# --- measuring, on each rank


def await_completion(candidate: Candidate) -> None:
    """Poll until the latest checkpoint is complete. All ranks."""
    deadline = time.perf_counter() + _COMPLETION_DEADLINE_S
    while not candidate.is_complete():
        candidate.poll()
        if time.perf_counter() > deadline:
            raise TimeoutError(f"a checkpoint was not complete in {_COMPLETION_DEADLINE_S:.0f} s")
        time.sleep(0.002)


def checkpoints(loop: Loop, candidate: Candidate, count: int) -> torch.Tensor:
    """Take checkpoints in a row; return [count, 3]: seconds blocked, until complete, in total."""
    rows: list[list[float]] = []
    began = 0.0
    for _ in range(count):
        dist.barrier()
        window_began = time.perf_counter()
        if rows:
            await_completion(candidate)
            rows[-1][1] = (candidate.completed_s or math.nan) - began
        candidate.completed_s = None
        began = time.perf_counter()
        candidate.save(loop.iteration)
        blocked = [time.perf_counter() - window_began]
        for _ in range(CHECKPOINT_INTERVAL):
            loop.iterate(candidate, blocked)
        rows.append([sum(blocked), math.nan, time.perf_counter() - window_began])
    await_completion(candidate)
    rows[-1][1] = (candidate.completed_s or math.nan) - began
    return torch.tensor(rows)


def measure(loop: Loop, make: Callable[[], Candidate], job: Job, phase: Any) -> dict[str, Any]:
    """Return what rank 0 reports. All ranks."""

    @contextlib.contextmanager
    def sampling(kind: Phase) -> Iterator[None]:
        dist.barrier()
        phase.value = kind
        yield
        dist.barrier()
        phase.value = Phase.OFF

    num_plain = math.ceil(job.num_checkpoints / 2)
    plain = [loop.plain_window() for _ in range(num_plain)]
    candidate = make()
    with sampling(Phase.BEFORE):
        loop.plain_window()
    with sampling(Phase.PEAK):
        candidate.start()
        checkpoints(loop, candidate, 1)
    times = checkpoints(loop, candidate, job.num_checkpoints)
    saved_iteration = loop.iteration
    with sampling(Phase.PEAK):
        checkpoints(loop, candidate, 1)
    intact = torch.tensor(int(loop.is_intact(candidate.load(saved_iteration), saved_iteration)))
    candidate.close()
    plain += [loop.plain_window() for _ in range(num_plain)]
    plain_s = torch.tensor(plain)
    for slowest in (times, plain_s):
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(intact, op=dist.ReduceOp.MIN)
    return {"times": times.tolist(), "plain": plain_s.tolist(), "intact": bool(intact)}


def run_rank(rank: int, job: Job, disk: Path, tmpfs: Path, phase: Any) -> None:
    """Measure one candidate and leave the report, or the error, as a file."""
    torch.set_num_threads(1)
    report: dict[str, Any]
    try:
        store = dist.FileStore(  # type: ignore[attr-defined]  # public, but in no __all__
            str(disk / "store"), NUM_RANKS
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
        loop = Loop(rank, job.mib)
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


# --- host memory, in the parent


def supervise(context: Any, job: Job, tmpfs: Path, phase: Any) -> int:
    """Wait for the ranks, sampling memory when asked to; return its growth in bytes."""
    most = dict.fromkeys(Phase, 0)
    deadline = time.monotonic() + job.deadline_s()
    known: set[psutil.Process] = set()
    try:
        while not context.join(timeout=_SAMPLE_S):
            for pid in context.pids():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank = psutil.Process(pid)
                    known |= {rank, *rank.children(recursive=True)}
            current = Phase(phase.value)
            if current is not Phase.OFF:
                size = host_memory_bytes([p for p in known if p.is_running()], tmpfs)
                if phase.value == current:  # else the sample may show what came later
                    most[current] = max(most[current], size)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {job.deadline_s():.0f} s")
    finally:
        for process in known:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return most[Phase.PEAK] - most[Phase.BEFORE]


# --- the table


HEADERS = (
    "candidate",
    "blocked s",
    "complete s",
    "cost s",
    f"extra MiB ({NUM_RANKS} ranks)",
    "complete means",
    "content",
    f"{CHECKPOINT_INTERVAL} iterations without, s",
)


def spread(values: Sequence[float]) -> str:
    """Return the median and, in brackets, the range."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def row(job: Job) -> tuple[str, ...] | str:
    """Measure a candidate and return its row, or why it did not run."""
    candidate = CANDIDATES[job.candidate]
    for module in candidate.requires:
        if not _is_installed(module):
            return f"{module} is not installed"
    shared = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="stall_", ignore_cleanup_errors=True) as disk,
        tempfile.TemporaryDirectory(
            prefix="stall_", dir=shared, ignore_cleanup_errors=True
        ) as tmpfs,
    ):
        phase = mp.get_context("spawn").Value("i", Phase.OFF)
        arguments = (job, Path(disk), Path(tmpfs), phase)
        try:
            context = mp.start_processes(run_rank, arguments, NUM_RANKS, join=False)
            memory = supervise(context, job, Path(tmpfs), phase)
            report = json.loads((Path(disk) / "report.json").read_text())
        except (mp.ProcessExitedException, mp.ProcessRaisedException, TimeoutError) as error:
            # The other rank fails too, a little later, for want of this one.
            errors = sorted(json.loads(p.read_text()) for p in Path(disk).glob("error_*.json"))
            return str(errors[0][1] if errors else error)[:200]
    blocked, complete, total = zip(*report["times"], strict=True)
    cost = [seconds - median(report["plain"]) for seconds in total]
    return (
        job.candidate,
        *(spread(values) for values in (blocked, complete, cost)),
        f"{memory / 2**20:.0f}",
        candidate.complete_means,
        "as saved" if report["intact"] else TORN,
        spread(report["plain"]),
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def conditions(options: argparse.Namespace) -> str:
    """Return the conditions of the measurements."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "megatron-core", "nvidia-resiliency-ext", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return (
        f"{os.cpu_count()} cores, {NUM_RANKS} ranks, one thread each, gloo; {options.mib} MiB of state "
        f"per rank; iterations of {options.iteration_s} s, {CHECKPOINT_INTERVAL} per checkpoint; "
        f"median (range) of {options.checkpoints} checkpoints. {', '.join(versions)}."
    )


def parse() -> argparse.Namespace:
    """Return the options, with the names of the candidates filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="state per rank")
    parser.add_argument("--iteration-s", type=float, default=0.7)
    parser.add_argument("--checkpoints", type=int, default=5, help="measured ones, after one more")
    parser.add_argument("--candidates", nargs="+", metavar="TEXT", default=[""])
    parser.add_argument("--work", choices=("busy", "sleep", "both"), default="both")
    options = parse_options(
        parser,
        mib=8,
        iteration_s=0.05,
        checkpoints=1,
        work="sleep",
        candidates=["moe_ft", "torch.save"],
    )
    texts = [text.lower() for text in options.candidates]
    options.candidates = [
        name for name in CANDIDATES if any(text in name.lower() for text in texts)
    ]
    if not options.candidates or options.checkpoints < 1:
        parser.error(f"--checkpoints must be 1 or more, --candidates parts of: {list(CANDIDATES)}")
    return options


def main() -> None:
    """Measure every candidate and print a table for each kind of work."""
    options = parse()
    has_failed = False
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost"}  # for helper processes too
    parts = [conditions(options)]
    for work in ("busy", "sleep") if options.work == "both" else (options.work,):
        rows, not_run = [], []
        for name in options.candidates:
            print(f"{work}: {name}", file=sys.stderr, flush=True)
            job = Job(
                candidate=name,
                work=work,
                mib=options.mib,
                iteration_s=options.iteration_s,
                num_checkpoints=options.checkpoints,
            )
            result = row(job)
            if isinstance(result, str):
                not_run.append(f"- {name}: not run: {result}")
                has_failed |= not result.endswith("is not installed")
            else:
                rows.append(result)
                has_failed |= TORN in result
        parts += [f"Work: {work}", markdown_table(rows, HEADERS)]
        parts += ["\n".join(not_run)] if not_run else []
    show(parts, options.output)
    sys.exit(int(has_failed))


if __name__ == "__main__":
    main()
