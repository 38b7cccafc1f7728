"""Rates of a machine that bound what checkpoints can cost. Each has the GPU alone.

    python -m tools.gpu_day.rates hostmem|overlap|kernels NAME

hostmem   memory on tmpfs: touched, pinned, copied to, hashed; seconds from kill -9 until the parent knows
overlap   a copy by another thread, as the engine makes it, beside matrix products and small kernels
kernels   benchmarks/kernels.py
"""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from tools.gpu_day.results import IS_REHEARSAL, Watch, note, rate

_GIB = 1 << 30
_BYTES = _GIB // 8 if IS_REHEARSAL else 4 * _GIB
_POPULATE = 23  # MADV_POPULATE_WRITE
# Memory as a rank has it: a mapped file on tmpfs, touched and pinned.
_VICTIM = """
import mmap, sys, tempfile, time, torch
on_gpu, size = torch.cuda.is_available(), int(sys.argv[1])
if on_gpu: torch.zeros(1 << 28, device="cuda")
if size:
    file = tempfile.TemporaryFile(dir="/dev/shm")
    file.truncate(size)
    memory = mmap.mmap(file.fileno(), size)
    memory.madvise(23)
    value = torch.frombuffer(memoryview(memory), dtype=torch.uint8)
    if on_gpu: torch.cuda.cudart().cudaHostRegister(value.data_ptr(), size, 0)
if on_gpu: torch.cuda.synchronize()
print("ready", flush=True)
time.sleep(600)
"""


def measure_host_memory(name: str) -> None:
    """Measure memory on tmpfs."""
    found: dict[str, Any] = {}
    path = Path(f"/dev/shm/gpu_day_{os.getuid()}_hostmem")
    try:
        with path.open("w+b") as file:
            with Watch() as watch:
                os.posix_fallocate(file.fileno(), 0, _BYTES)
            found["allocate GB/s"] = rate(_BYTES, watch.s)
            mapping = mmap.mmap(file.fileno(), _BYTES)
            for which in ("first touch GB/s", "second touch GB/s"):
                with Watch() as watch:
                    mapping.madvise(_POPULATE)
                found[which] = rate(_BYTES, watch.s)
            if not IS_REHEARSAL:
                found |= device_rates(torch.frombuffer(memoryview(mapping), dtype=torch.uint8))
            found |= hash_rates(memoryview(mapping))
    finally:
        path.unlink(missing_ok=True)
    for size in (0, _BYTES):
        found[f"s until a death is known, {size / _GIB:.1f} GiB pinned"] = time_death(size)
    note(name, ", ".join(f"{key} {value}" for key, value in found.items()), found=found)


def device_rates(target: torch.Tensor) -> dict[str, Any]:
    """Pin memory and copy to it from the GPU."""
    cudart, found = torch.cuda.cudart(), dict[str, Any]()
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)

    def pin(key: str) -> bool:
        with Watch() as watch:
            error = int(cudart.cudaHostRegister(target.data_ptr(), _BYTES, 0))
        found[key] = f"FAILED {error}" if error else rate(_BYTES, watch.s)
        return not error

    def unpin(key: str) -> None:
        with Watch() as watch:
            cudart.cudaHostUnregister(target.data_ptr())
        found[key] = rate(_BYTES, watch.s)

    if pin("pin GB/s"):
        found["copy to pinned GB/s"] = copy_rate(source, target)
        targets, sources = target.split(2 << 20), source.split(2 << 20)
        with Watch() as watch:
            torch._foreach_copy_(targets, sources, non_blocking=True)
            queued_s = time.perf_counter() - watch.start_s
            torch.cuda.synchronize()
        found["copies of 2 MiB GB/s"] = rate(_BYTES, watch.s)
        found["us to queue one"] = round(1e6 * queued_s / len(targets), 2)
        unpin("unpin GB/s")
        if pin("pin again GB/s"):
            unpin("unpin again GB/s")
    found["copy to unpinned GB/s"] = copy_rate(source, target)
    allocated = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    found["copy to memory of CUDA GB/s"] = copy_rate(source, allocated)
    return found


def copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return GB/s of the best of three copies."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        with Watch() as watch:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        times.append(watch.s)
    return rate(source.numel(), min(times))


def hash_rates(content: memoryview) -> dict[str, Any]:
    """Hash memory in 1, 2, 4 and 8 threads."""
    found = {}
    for number in (1, 2, 4, 8):
        if number <= (os.cpu_count() or 1):
            edges = [i * _BYTES // number for i in range(number + 1)]
            parts = [content[a:b] for a, b in zip(edges, edges[1:], strict=False)]
            with ThreadPoolExecutor(number) as pool, Watch() as watch:
                list(pool.map(xxhash.xxh3_64_hexdigest, parts))
            found[f"hash in {number} threads GB/s"] = rate(_BYTES, watch.s)
    return found


def time_death(size: int) -> float:
    """Return seconds from kill -9 of a process that has pinned memory until its parent knows."""
    command = (sys.executable, "-c", _VICTIM, str(size))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline().strip() == "ready"
        with Watch() as watch:
            victim.send_signal(signal.SIGKILL)
            victim.wait()
    return round(watch.s, 3)


def measure_overlap(name: str) -> None:
    """Copy to the host beside computation, with CUDA_DEVICE_MAX_CONNECTIONS of this process."""
    if IS_REHEARSAL:
        note(name, "nothing to overlap without a GPU")
        return
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream()
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product, small = torch.empty_like(factor), torch.zeros(4096, device="cuda")

    def time_both(work: Callable[[], object], *, with_copy: bool) -> tuple[float, float]:
        """Return seconds of the work on the GPU, and of the copy."""
        copied_s, ready = [0.0], torch.cuda.Event()
        ready.record()

        def copy() -> None:
            with Watch() as watch, torch.cuda.stream(side):
                side.wait_event(ready)
                pieces = zip(target.split(16 << 20), source.split(16 << 20), strict=True)
                for into, each in pieces:
                    into.copy_(each, non_blocking=True)
                side.synchronize()
            copied_s[0] = watch.s

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        thread = threading.Thread(target=copy if with_copy else lambda: None)
        thread.start()
        begin.record()
        work()
        end.record()
        end.synchronize()
        thread.join()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3, copied_s[0]

    kinds: dict[str, Callable[[], object]] = {
        "matrix products": lambda: [torch.mm(factor, factor, out=product) for _ in range(150)],
        "small kernels": lambda: [small.add_(1.0) for _ in range(40_000)],
    }
    parts = []
    for kind, work in kinds.items():
        work()
        alone_s = min(time_both(work, with_copy=False)[0] for _ in range(2))
        both_s, copy_s = min(time_both(work, with_copy=True) for _ in range(3))
        parts.append(
            f"{kind}: {1e3 * alone_s:.0f} ms alone, {100 * (both_s / alone_s - 1):+.1f} % with a copy of "
            f"{rate(_BYTES, copy_s)} GB/s"
        )
    note(name, "; ".join(parts))


def measure_kernels(name: str) -> None:
    """Run the benchmark of kernels, whose tables are in the log."""
    size = ("--quick",) if IS_REHEARSAL else ("--mib", "1024", "--repeats", "5")
    command = (sys.executable, "-m", "benchmarks.kernels", *size)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    note(name, " ".join(rows).replace("|", "/")[:1500], is_good=done.returncode == 0 and bool(rows))


if __name__ == "__main__":
    kind, own_name = sys.argv[1:]
    {"hostmem": measure_host_memory, "overlap": measure_overlap, "kernels": measure_kernels}[kind](
        own_name
    )
