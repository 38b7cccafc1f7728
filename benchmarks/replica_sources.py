"""Cost of 1, 2 and 4 ranks that send replicas to one rank: its processor's time, and its training.

    python -m benchmarks.replica_sources [--factor N] [--seconds N] [--rounds N] [--quick] [--output FILE.md]

Each source is a process that makes a snapshot once per second and sends it over a loopback connection, as
state or as gradients, while one thread of the receiving process multiplies matrices in the place of training.
"core" is the processor's time of the receiving threads, by GB (10^9 bytes) of their state. "step" is one of
these multiplications; "apart" the same while these sources send to processes of their own: then the machine
has as much to do, and the training process nothing. The two take turns. Median (range) of rounds' medians.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.output import conditions, markdown_table, read_options, show, spread
from moe_ft.engine.links.messages import Put
from moe_ft.engine.links.server import ReplicaKeeper
from moe_ft.topology import RankInfo
from tests.unit.moe_ft.followed import SIZES, Owner
from tests.unit.moe_ft.peer import Peer

_KINDS = {
    "state": torch.float32,
    "gradients in fp32": torch.float32,
    "gradients in bf16": torch.bfloat16,
}
_PERIOD_S = 1.0
_DEADLINE_S = 120.0
_WIDTH = 512  # of the matrices


def run_source(folder: Path, kind: str, factor: int, peer: RankInfo | None, signals: Any) -> None:
    """Make and send snapshots until told to end; to an own peer if no other is given."""
    is_ready, should_end = signals
    torch.set_num_threads(1)
    with closing(Owner(folder, _KINDS[kind], factor=factor, peer=peer)) as owner:
        due_s = time.monotonic()
        while not should_end.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + _PERIOD_S, time.monotonic())
            owner.train()
            if kind == "state":
                owner.complete = None  # nothing to follow from
            owner.save()
            assert owner.sent()["bytes"]
            if owner.iteration == 3:  # it has a base, and follows
                is_ready.release()


def step_ms(seconds: float) -> float:
    """Multiply matrices for a while; return how long one multiplication takes, the median."""
    one, other = torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    taken: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or not taken:
        begin_s = time.perf_counter()
        for _ in range(20):
            one @ other
        taken.append(1000 * (time.perf_counter() - begin_s) / 20)
    return median(taken)


def with_sources(
    kind: str, num_sources: int, factor: int, seconds: float, *, are_apart: bool
) -> float:
    """Return the milliseconds of a step while so many sources send, here or elsewhere."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.moe_ft.followed"])
    signals = context.Semaphore(0), context.Event()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as stack:
        with closing(Owner(Path(name) / "size", _KINDS[kind], factor=factor)) as owner:
            size = owner.layout.num_bytes
        sources = []
        for number in range(num_sources):
            folder, info = Path(name) / str(number), None
            if not are_apart:
                peer = Peer(folder / "peer", size)
                info = stack.enter_context(closing(peer)).info
            given = (folder, kind, factor, info, signals)
            sources.append(context.Process(target=run_source, args=given, daemon=True))
            sources[-1].start()
        try:
            for _ in sources:
                if not signals[0].acquire(timeout=_DEADLINE_S):
                    raise TimeoutError("a source does not send")
            return step_ms(seconds)
        finally:
            signals[1].set()
            for source in sources:
                source.join(_DEADLINE_S)


def measure(options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return a row for each kind and number of sources."""
    taken: list[float] = []
    original = ReplicaKeeper.receive

    def receive(self: ReplicaKeeper, connection: Any, request: Put) -> Any:
        begin_s = time.thread_time()
        reply = original(self, connection, request)
        taken.append(time.thread_time() - begin_s)
        return reply

    state_gb = 12 * options.factor * sum(SIZES.values()) / 1e9
    rows: list[tuple[str, ...]] = []
    ReplicaKeeper.receive = receive  # type: ignore[method-assign]
    try:
        for kind in _KINDS:
            for num_sources in options.sources:
                core, here, apart = [], [], []
                for _ in range(options.rounds):
                    given = (kind, num_sources, options.factor, options.seconds)
                    apart.append(with_sources(*given, are_apart=True))
                    taken.clear()
                    here.append(with_sources(*given, are_apart=False))
                    core.append(median(taken[2 * num_sources :]) / state_gb)
                numbers = (spread(core, ".2f"), spread(here, ".2f"), spread(apart, ".2f"))
                rows.append((kind, str(num_sources), *numbers))
    finally:
        ReplicaKeeper.receive = original  # type: ignore[method-assign]
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Run everything and print it."""
    options = read_options(
        words,
        factor=(5_000, 50, "size of a source's state"),
        seconds=(5.0, 2.5, "of each measurement"),
        rounds=(3, 1),
        sources=([1, 2, 4], [1]),
    )
    torch.set_num_threads(1)
    size_mb = 12 * options.factor * sum(SIZES.values()) / 1e6
    say = conditions(f"A source has {size_mb:,.1f} MB of state, and sends once per second.")
    headers = ["sent", "sources", "core, s per GB", "step, ms", "step, ms, apart"]
    show([say, markdown_table(measure(options), headers)], options.output)


if __name__ == "__main__":
    main()
