"""Time and memory of `moe_ft report --html` for logs as large as those of months of training.

    python -m benchmarks.report_speed

The logs are written here, with the fields and sizes of real ones: in each iteration a snapshot and a replica,
every 50 iterations a checkpoint on storage, twenty starts. One has the loads of all experts, one few ranks.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.output import markdown_table, read_options, show, versions
from moe_ft.events import event_path

_ITERATION_S, _NUM_RECOVERIES, _BLOCK = 2.5, 20, 500
_NUM_EXPERTS, _NUM_LAYERS, _RANKS_PER_NODE = 64, 4, 8
# By name: number of ranks, and whether the loads of experts are in the log.
_LOGS = {"8 ranks": (8, False), "256 ranks, with loads": (256, True)}


def _events(iteration: int, incarnation: int, *, has_loads: bool) -> Iterator[dict[str, Any]]:
    """Yield an iteration's events of rank 0."""
    now_s = 1.8e9 + _ITERATION_S * (iteration + 40 * incarnation) + 0.123456
    noise = (iteration * 7919 % 1000) / 1e3

    def event(kind: str, later_s: float, number: int = iteration, **fields: Any) -> dict[str, Any]:
        head = {"time": now_s + later_s, "rank": 0, "incarnation": incarnation, "event": kind}
        return {**head, "iteration": number, **fields}

    yield event(
        "iteration",
        0.0,
        iteration_s=_ITERATION_S - noise / 10,
        stall_s=noise / 1e3,
        idle_s=noise / 7,
        loss=2 + 9 / (1 + iteration / 500) + noise / 9,
        num_tokens=1 << 22,
        resident_bytes=(90 << 30) + iteration * 4096,
        device_bytes=(61 << 30) + iteration % 13,
    )
    if has_loads:
        tokens = [(each * 7919 + iteration * 31) % 977 for each in range(_NUM_EXPERTS)]
        loads = {f"layer.{layer}": tokens[layer:] + tokens[:layer] for layer in range(_NUM_LAYERS)}
        yield event("router_load", 1e-4, tokens=loads, is_skipped=False)
    sizes: dict[str, Any] = {"bytes": 3 << 30, "num_units": 37}
    yield event(
        "snapshot",
        0.9,
        seconds=0.9 + noise / 9,
        copy_s=0.4 + noise / 9,
        level={"full": 37},
        **sizes,
    )
    peers: dict[str, Any] = {
        "state_bytes": 3 << 30,
        "gradient_bytes": 0,
        "fallbacks": {},
        "peers": [_RANKS_PER_NODE],
    }
    yield event("replicate", 2.2, seconds=1.1 + noise / 9, **sizes, **peers)
    if iteration % 50 == 0:
        yield event("persist", 2.4, seconds=31 + noise, path="/storage/run", **sizes)


def _begin(iteration: int, incarnation: int) -> Iterator[dict[str, Any]]:
    """Yield the events with which an incarnation begins."""
    head: dict[str, Any] = {
        "time": 1.8e9 + _ITERATION_S * (iteration + 40 * incarnation),
        "rank": 0,
    }
    head |= {"incarnation": incarnation, "iteration": iteration}
    yield {**head, "event": "start", "pid": incarnation + 1, "host": "node00"}
    if incarnation:
        yield {
            **head,
            "event": "recovery",
            "target_iteration": iteration,
            "replayed_iterations": 0,
            "sources": {"memory": 37},
            "lost_tokens": 0,
            "plt": 0.0,
            "read_bytes": {"node00": 3 << 30},
        }


def write_log(folder: Path, num_ranks: int, num_bytes: int, *, has_loads: bool) -> int:
    """Write a log of about so many bytes; return the number of iterations."""
    sample = [*_events(100_001, 1, has_loads=has_loads)]
    per_iteration = sum(len(json.dumps(each)) + 1 for each in sample)
    num_iterations = max(_BLOCK, num_bytes // (num_ranks * per_iteration))
    per_start = num_iterations // _NUM_RECOVERIES + 1
    files = [event_path(folder, rank).open("wb") for rank in range(num_ranks)]
    for first in range(0, num_iterations, _BLOCK):
        lines: list[dict[str, Any]] = []
        for iteration in range(first, min(first + _BLOCK, num_iterations)):
            if iteration % per_start == 0:
                lines += _begin(iteration, iteration // per_start)
            lines += _events(iteration + 1, iteration // per_start, has_loads=has_loads)
        text = "".join(f"{json.dumps(each)}\n" for each in lines).encode()
        for rank, file in enumerate(files):
            host = f"node{rank // _RANKS_PER_NODE:02d}".encode()
            own = text.replace(b'"rank": 0,', b'"rank": %d,' % rank)
            file.write(own.replace(b'"host": "node00"', b'"host": "%s"' % host))
    for file in files:
        file.close()
    return num_iterations


def _measure(folder: Path) -> tuple[float, float, int, int]:
    """Return seconds, those of all cores, the most memory of all processes, and bytes of the page."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    page, most, begin_s = folder / "page.html", 0, time.perf_counter()
    command = [sys.executable, "-m", "moe_ft", "report", f"{folder}", "--html", f"{page}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                alive = [parent, *parent.children(recursive=True)]
                most = max(most, sum(each.memory_info().rss for each in alive))
            except psutil.NoSuchProcess:
                continue
            time.sleep(0.1)
        seconds = time.perf_counter() - begin_s
        assert process.stdout is not None
        text = process.stdout.read()
    assert process.returncode == 0 and re.search(r"^starts +20$", text, re.MULTILINE), text
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu_s, most, page.stat().st_size


def main() -> None:
    """Write logs, read them, and show how long that took."""
    options = read_options(gigabytes=(5.0, 0.05, "of each log"))
    rows, load = [], f"load at the start {os.getloadavg()[0]:.1f}"
    for name, (num_ranks, has_loads) in _LOGS.items():
        with tempfile.TemporaryDirectory() as folder:
            num_bytes = int(options.gigabytes * 1e9)
            num = write_log(Path(folder), num_ranks, num_bytes, has_loads=has_loads)
            seconds, cpu_s, most, page_bytes = _measure(Path(folder))
        memory = f"{most / 2**20:,.0f}", f"{page_bytes / 2**10:,.0f}"
        times = f"{options.gigabytes:g}", f"{seconds:.1f}", f"{cpu_s:.1f}"
        rows.append((name, f"{num:,}", *times, *memory))
    headers = ("log", "iterations", "GB", "s", "CPU s", "MiB of memory at most", "KiB of the page")
    cores = f"{psutil.cpu_count()} cores, as many processes that read; {load}"
    show((f"{cores}. {versions()}.", markdown_table(rows, headers)), options.output)


if __name__ == "__main__":
    main()
