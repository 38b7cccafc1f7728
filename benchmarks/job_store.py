"""Time of ranks in the job's store, next to torch's TCPStore, by the number of ranks.

    python -m benchmarks.job_store [--ranks N ...] [--torch-ranks N] [--repetitions N] [--output FILE.md]

One process keeps a store. The connections of all ranks are spread over eight processes of this machine, which
connect at the same moment, and then write a value and read that of another rank over each connection, as gloo
does when it makes a group. The last figure is one rank that reads a value while no other one asks. The job's
store has each connection prove the token of the start, and each message carry a code; torch's has neither.
"""

import argparse
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from statistics import median

import torch.distributed as dist

from benchmarks.conditions import ranks_on_cpu, versions
from benchmarks.output import markdown_table, parse_options, show, spread
from megatron.fault_tolerance.repair.store import TorchStore
from moe_ft.cluster import job_store
from moe_ft.cluster.store_client import JobStore
from moe_ft.processes import raise_descriptors

NUM_PROCESSES = 8
NUM_CALLS = 500  # of the rank that is alone
WAIT_S = 600
TOKEN = "0" * 32

Connect = Callable[[], dist.Store]


def _serve(kind: str, listener: socket.socket, num_ranks: int) -> None:
    """Keep a store until this process is killed."""
    port = listener.getsockname()[1]
    if kind == "the job's store":
        job_store.serve(listener, "", TOKEN, num_ranks)
    _kept = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )
    signal.pause()


@contextmanager
def served(kind: str, num_ranks: int) -> Iterator[Connect]:
    """Keep a store in a process of its own; yield what connects to it."""
    listener = job_store.listen_at(("127.0.0.1", 0), is_alone=True)
    port = listener.getsockname()[1]
    if (server := os.fork()) == 0:
        _serve(kind, listener, num_ranks)
    listener.close()
    if kind == "the job's store":
        connect: Connect = lambda: TorchStore(JobStore(("127.0.0.1", port), "", TOKEN))  # noqa: E731
    else:
        timeout = timedelta(seconds=WAIT_S)
        connect = lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)  # noqa: E731
    try:
        yield connect
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _be_ranks(connect: Connect, ranks: range, num_ranks: int, together: Barrier) -> None:
    """Be some of the ranks, in a process of their own."""
    together.wait()
    stores = [connect() for _ in ranks]
    together.wait()
    for rank, store in zip(ranks, stores, strict=True):
        store.set(f"{rank}", "an address of a hundred bytes".ljust(100))
    for rank, store in zip(ranks, stores, strict=True):
        store.get(f"{(rank + num_ranks // 2) % num_ranks}")
    together.wait()


def measure(kind: str, num_ranks: int) -> tuple[float, float, float]:
    """Return seconds until all ranks are in, seconds of their calls, and those of a call of one alone."""
    with served(kind, num_ranks) as connect:
        together = multiprocessing.Barrier(NUM_PROCESSES + 1, timeout=WAIT_S)
        size = num_ranks // NUM_PROCESSES
        processes = [
            multiprocessing.Process(
                target=_be_ranks, args=(connect, range(low, low + size), num_ranks, together)
            )
            for low in range(0, num_ranks, size)
        ]
        for each in processes:
            each.start()
        marks = []
        for _ in range(3):
            together.wait()
            marks.append(time.perf_counter())
        for each in processes:
            each.join()
        alone, begin_s = connect(), time.perf_counter()
        for _ in range(NUM_CALLS):
            alone.get("0")
        return marks[1] - marks[0], marks[2] - marks[1], (time.perf_counter() - begin_s) / NUM_CALLS


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--torch-ranks", type=int, default=16384, help="the most, with TCPStore")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parse_options(parser, ranks=[64], repetitions=1)
    multiprocessing.set_start_method("fork")
    raise_descriptors(max(options.ranks) // NUM_PROCESSES + 512)
    rows = []
    for num_ranks in options.ranks:
        kinds = ("the job's store", "TCPStore")[: 1 + (num_ranks <= options.torch_ranks)]
        found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for _ in range(options.repetitions):
            for kind, each in found.items():
                each.append(measure(kind, num_ranks))
        for kind, each in found.items():
            connected, called, alone = zip(*each, strict=True)
            per_call_us = 1e6 * median(called) / (2 * num_ranks)
            rows.append(
                (
                    num_ranks,
                    kind,
                    spread(connected, ".2f"),
                    spread(called, ".2f"),
                    f"{per_call_us:.0f}",
                    spread([1e6 * value for value in alone], ".0f"),
                )
            )
    headings = ("ranks", "store", "all are in, s", "their calls, s", "a call, µs", "alone, µs")
    about = f"{ranks_on_cpu()}. Median (range) of {options.repetitions}. {versions()}."
    show([about, markdown_table(rows, headings)], options.output)


if __name__ == "__main__":
    main()
