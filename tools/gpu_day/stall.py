"""Cost of one way to save state that lies on the GPU, as training pays it, in a process of its own.

    python -m tools.gpu_day.stall NAME CANDIDATE [--parameters N]

The engine and torch DCP are those of benchmarks/stall.py. State: 6 GiB of fp32 masters and moments, and BF16
weights. An iteration is 0.4 s of matrix products, a wait for the GPU, as clipping waits in Megatron, the
candidate's fence, and a step over all state. A checkpoint is due in each; none is taken until the last is
complete. The engine's last one is loaded and compared with its iteration, computed again.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, override

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import benchmarks.ours
import benchmarks.peers
from benchmarks.candidate import Candidate, Site, State
from tools.gpu_day.results import IS_REHEARSAL, Watch, note, rate

_DEVICE = "cpu" if IS_REHEARSAL else "cuda"
_BYTES = 96 << 20 if IS_REHEARSAL else 6 << 30
_WORK_S = 0.05 if IS_REHEARSAL else 0.4
_NUM_ITERATIONS, _WARM = 14, 4  # the first ones allocate
_COMPLETION_S = 60.0


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if _DEVICE == "cuda":
        torch.cuda.synchronize()


def new_state(num_parameters: int) -> State:
    """Return the state at iteration 0."""
    generator = torch.Generator(device=_DEVICE).manual_seed(7)
    size, state = _BYTES // 12 // num_parameters, State()
    for index in range(num_parameters):
        master = torch.randn(size, generator=generator, device=_DEVICE)
        state[f"{index}.weight"] = master.bfloat16()
        state[f"{index}.master"] = master
        state[f"{index}.exp_avg"] = torch.zeros(size, device=_DEVICE)
        state[f"{index}.exp_avg_sq"] = torch.zeros(size, device=_DEVICE)
    return state


def step(state: State, iteration: int) -> None:
    """Change every element, in few launches; same input, same bits."""
    weights, masters, averages, squares = (
        [tensor for name, tensor in state.items() if name.endswith(kind)]
        for kind in (".weight", ".master", ".exp_avg", ".exp_avg_sq")
    )
    torch._foreach_mul_(averages, 0.9)
    torch._foreach_add_(averages, 0.1 * iteration)
    torch._foreach_mul_(squares, 0.99)
    torch._foreach_add_(squares, 0.01 * iteration**2)
    torch._foreach_add_(masters, averages, alpha=-0.02)
    torch._foreach_copy_(weights, masters)


def new_work() -> Callable[[], None]:
    """Return what takes the GPU as long as forward and backward."""
    if _DEVICE == "cpu":
        return lambda: time.sleep(_WORK_S)
    factor = torch.randn(8192, 8192, device=_DEVICE, dtype=torch.bfloat16)
    product = torch.empty_like(factor)

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(factor, factor, out=product)

    for _ in range(2):  # the first one warms up
        with Watch() as watch:
            run(50)
            synchronize()
    count = max(1, round(50 * _WORK_S / watch.s))
    return lambda: run(count)


class Nothing(Candidate):
    """No checkpoints."""

    @override
    def is_complete(self) -> bool:
        return False


class Raw(Candidate):
    """One asynchronous copy per tensor to pinned memory: the least that anybody pays."""

    @override
    def start(self) -> None:
        self._sources = [each for name, each in self.state.items() if "weight" not in name]
        on_gpu = _DEVICE == "cuda"
        self._targets = [
            torch.empty_like(t, device="cpu", pin_memory=on_gpu) for t in self._sources
        ]
        self._stream = torch.cuda.Stream() if on_gpu else None

    @override
    def save(self, iteration: int) -> None:
        if self._stream is None:
            torch._foreach_copy_(self._targets, self._sources)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)

    @override
    def before_step(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self.complete()


class DcpProcess(benchmarks.peers.DcpThread):
    """torch DCP as on a GPU: a thread copies to pinned shared memory that is kept, a process writes it."""

    kind = AsyncCheckpointerType.PROCESS
    staging = StagingOptions(
        use_pinned_memory=_DEVICE == "cuda",
        use_shared_memory=True,
        use_async_staging=True,
        use_non_blocking_copy=_DEVICE == "cuda",
    )

    @override
    def _named(self, tensors: State) -> State:
        return {name: each for name, each in tensors.items() if "weight" not in name}


_CANDIDATES: dict[str, type[Candidate]] = {
    "none": Nothing,
    "raw": Raw,
    "moe_ft": benchmarks.ours.MoeFtMemory,
    "moe_ft-storage": benchmarks.ours.MoeFtStorage,
    "dcp-process": DcpProcess,
}


def complete(candidate: Candidate) -> None:
    """Wait until the last checkpoint is complete, in iterations in which nothing is computed."""
    end_s = time.monotonic() + _COMPLETION_S
    while not candidate.is_complete():
        if time.monotonic() > end_s:
            raise TimeoutError(f"a checkpoint was not complete in {_COMPLETION_S:.0f} s")
        time.sleep(0.01)
        candidate.before_step()  # it may take more than one until all is agreed
        candidate.poll()


def train(state: State, candidate: Candidate) -> tuple[dict[str, list[float]], int]:
    """Run all iterations; return seconds of each part, and the iteration of the last checkpoint."""
    work, times = new_work(), {key: list[float]() for key in ("all", "fence", "call", "complete")}
    saved, began_s = 0, 0.0
    candidate.start()
    candidate.complete()  # none is on its way
    has_saved = not isinstance(candidate, Nothing)
    for iteration in range(1, _NUM_ITERATIONS + 1):
        with Watch() as whole:
            work()
            synchronize()
            with Watch() as fence:
                candidate.before_step()
            step(state, iteration)
            with Watch() as call:
                candidate.poll()
                if has_saved and candidate.is_complete():
                    if saved and candidate.completed_s is not None:
                        times["complete"].append(candidate.completed_s - began_s)
                    candidate.completed_s = None
                    saved, began_s = iteration, time.perf_counter()
                    candidate.save(iteration)
        for key, watch in (("all", whole), ("fence", fence), ("call", call)):
            times[key].append(watch.s)
    synchronize()
    if has_saved:
        complete(candidate)
        if candidate.completed_s is not None:
            times["complete"].append(candidate.completed_s - began_s)
    return times, saved


def check(candidate: Candidate, num_parameters: int, iteration: int) -> str:
    """Compare a loaded checkpoint with its iteration."""
    loaded = candidate.load(iteration)
    state = new_state(num_parameters)
    for past in range(1, iteration + 1):
        step(state, past)
    wrong = [name for name, each in loaded.items() if not torch.equal(each, state[name].cpu())]
    return f"WRONG in {len(wrong)} tensors" if wrong or not loaded else "as it was"


def main() -> None:
    """Measure one candidate and leave the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("candidate", choices=_CANDIDATES)
    parser.add_argument("--parameters", type=int, default=40)
    options = parser.parse_args()
    if _DEVICE == "cuda":
        real: Any = lambda: None  # noqa: E731
        benchmarks.peers._answer_cuda_calls = real  # there is a GPU that answers
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # of DCP's process
    with (
        tempfile.TemporaryDirectory(prefix="gpu_day_") as disk,
        tempfile.TemporaryDirectory(prefix="gpu_day_", dir="/dev/shm") as memory,
    ):
        store = dist.FileStore(f"{disk}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        state = new_state(options.parameters)
        site = Site(rank=0, num_ranks=1, disk=Path(disk), tmpfs=Path(memory))
        candidate = _CANDIDATES[options.candidate](state, site)
        before = torch.cuda.memory_allocated() if _DEVICE == "cuda" else 0
        times, saved = train(state, candidate)
        peak = torch.cuda.max_memory_allocated() - before if _DEVICE == "cuda" else 0
        is_loaded = isinstance(candidate, benchmarks.ours.MoeFtMemory)
        content = check(candidate, options.parameters, saved) if is_loaded else "not compared"
        candidate.close()
        line = ", ".join(
            f"{key} {1e3 * median(times[key][_WARM:]):.1f} ms" for key in ("all", "fence", "call")
        )
        if times["complete"]:
            whole_s = median(times["complete"])
            line += f", {len(times['complete'])} checkpoints, complete in {whole_s:.2f} s "
            line += f"({rate(_BYTES, whole_s)} GB/s), content {content}"
        line += f", {peak >> 20} MiB more on the device at most"
        note(options.name, line, is_good="WRONG" not in content, times=times)
    os._exit(0)  # writers of DCP are processes that would be waited for


if __name__ == "__main__":
    main()
