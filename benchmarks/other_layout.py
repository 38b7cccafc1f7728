"""Seconds to resume a state in another layout, next to the same layout and to stock Megatron.

    python -m benchmarks.other_layout [--gb N] [--repeats N] [--quick] [--output FILE.md]

A job of 4 ranks with two stages writes a state of --gb: masters and moments. It is then resumed --repeats
times in the same layout and as often in another one (four ranks that divide the experts), in turns; each
start is killed in its first iteration, so that the next one finds the same state. Tiers:

memory    of the only node
peers     a node for each rank, without replicas; they change places: nothing is where it is needed
storage   after the memory was lost; files are in the page cache
--load    stock Megatron loads the same state, converted to torch_dist, from the same file system

Seconds are those of a recovery, from the inventory until the state is live, of the slowest rank; of stock
Megatron those of its `load_checkpoint`. Bytes needed are those of the ranks' parts of the state, bytes read
those that came from their sources for it (`needed_bytes` and `read_bytes` of the event `recovery`). The
busiest source is the node that most was read from, as a multiple of the mean over all nodes.
"""

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from megatron.training import training

import pretrain_gpt_moe
from benchmarks.output import conditions, markdown_table, read_options, show, spread
from moe_ft.convert.conversion import ConversionRequest, convert
from tests import stock_program
from tests.demo_model import layout_flags, model_flags
from tests.harness import events, run_ranks

RANKS, ITERATION = 4, 2
SAME, OTHER = "same", "other"
LAYOUTS: Mapping[str, Mapping[str, int]] = {SAME: {"pp": 2, "ep": 2}, OTHER: {"ep": 4}}
TIERS = ("memory", "peers", "storage")
NODES = ("n0", "n1", "n2", "n3")
_LAYERS, _EXPERTS, _BYTES_PER_PARAMETER = 4, 4, 12
_DEADLINE_S = 1800.0
HEADERS = ("from", "layout", "s", "of same", "read, MB", "of needed", "busiest source")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """One start.

    Attributes:
        needed, read: bytes; those read by the node, or storage, that they came from.
    """

    seconds: float
    needed: int = 0
    read: Mapping[str, int] = field(default_factory=dict)


class Bench:
    """Jobs of one size, whose files are in two folders."""

    def __init__(self, folder: Path, memory: Path, gb: float) -> None:
        self._folder = folder
        self._memory = memory
        self._count = 0
        self._model = _model_of(gb)
        self.storage = folder / "storage"

    def write(self, tier: str) -> None:
        """Leave a state in a tier."""
        end = _kill(ITERATION)
        if tier == "storage":
            end = ["--moe-ft-persist-dir", str(self.storage), "--moe-ft-persist-interval", "1"]
            end += ["--exit-interval", str(ITERATION)]
        self._run(SAME, end, NODES if tier == "peers" else None)

    def resume(self, tier: str, layout: str) -> Resumed:
        """Resume the state of a tier, which stays."""
        flags = [*_kill(ITERATION, "forward"), "--moe-ft-layout", "any"]
        if tier == "storage":
            shutil.rmtree(self._memory, ignore_errors=True)
            flags += ["--moe-ft-persist-dir", str(self.storage)]
        folder = self._run(layout, flags, NODES[::-1] if tier == "peers" else None)
        found = [events(folder, rank, "recovery")[-1] for rank in range(RANKS)]
        assert {each["restored_iteration"] for each in found} <= {ITERATION, ITERATION - 1}
        return Resumed(
            seconds=max(sum(each["phases_s"].values()) for each in found),
            needed=sum(each["needed_bytes"] for each in found),
            read=sum((Counter(each["read_bytes"]) for each in found), Counter()),
        )

    def load(self, layout: str) -> Resumed:
        """Have stock Megatron load the state, which has been converted."""
        converted = self._folder / f"converted_{layout}"
        if not converted.exists():
            request = ConversionRequest(
                source=str(self.storage),
                destination=str(converted),
                to="torch_dist",
                for_ep=LAYOUTS[layout]["ep"],
            )
            convert(request)
        flags = [*self._flags(layout), "--load", str(converted), "--exit-interval", "1"]
        folder = self._next()
        run_ranks(load_and_time, RANKS, flags, str(folder), log_dir=folder).check()
        seconds = [
            json.loads((folder / f"loaded_{rank}.json").read_text()) for rank in range(RANKS)
        ]
        return Resumed(seconds=max(seconds))

    def forget(self) -> None:
        """Remove what is in memory."""
        shutil.rmtree(self._memory, ignore_errors=True)

    def _next(self) -> Path:
        self._count += 1
        return self._folder / f"start_{self._count}"

    def _flags(self, layout: str) -> list[str]:
        changes = {"train_iters": 10, "distributed_timeout_minutes": 20, **self._model}
        return [*model_flags(**changes), *layout_flags(LAYOUTS[layout]), "--mock-data"]

    def _run(self, layout: str, flags: Sequence[str], nodes: Sequence[str] | None) -> Path:
        folder = self._next()
        words = [
            *self._flags(layout),
            *("--moe-ft-strategy", "dense", "--moe-ft-interval", "1", "--moe-ft-job-id", "job"),
            *("--moe-ft-memory-dir", str(self._memory), "--moe-ft-event-log", str(folder)),
            *("--moe-ft-replication-factor", "0", "--moe-ft-fault-report-grace-s", "0.5"),
            *flags,
        ]
        result = run_ranks(
            pretrain_gpt_moe.main,
            RANKS,
            words,
            log_dir=folder,
            nodes=nodes,
            deadline_s=_DEADLINE_S,
        )
        if "--exit-interval" in flags:
            result.check()
        return folder


def _kill(iteration: int, phase: str = "backward") -> list[str]:
    return ["--moe-ft-inject-fault", f"kill:{RANKS - 1}@{iteration}:{phase}"]


def _model_of(gb: float) -> dict[str, Any]:
    """Return the flags of a model whose masters and moments have about so many GB.

    An expert has 3 matrices with SwiGLU, attention 4, all of the hidden size.
    """
    per_square = _LAYERS * (3 * _EXPERTS + 4)
    hidden = int((gb * 1e9 / _BYTES_PER_PARAMETER / per_square) ** 0.5) // 64 * 64 or 64
    return {
        "num_layers": _LAYERS,
        "num_experts": _EXPERTS,
        "hidden_size": hidden,
        "ffn_hidden_size": hidden,
        "moe_ffn_hidden_size": hidden,
        "global_batch_size": 4,
        "micro_batch_size": 1,
    }


# On a rank


def load_and_time(flags: list[str], folder: str) -> None:
    """Load and train an iteration with stock Megatron on this rank; write the seconds of loading."""
    original = training.load_checkpoint

    def load_and_write(*args: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        loaded = original(*args, **named)
        path = Path(folder) / f"loaded_{training.get_args().rank}.json"
        path.write_text(json.dumps(time.perf_counter() - begin))
        return loaded

    with patch.object(training, "load_checkpoint", load_and_write):
        stock_program.train(flags)


# All of it


def measure(bench: Bench, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each tier and layout."""
    for tier in (*TIERS, "--load"):
        if tier != "--load":
            bench.forget()
            bench.write(tier)
        found: dict[str, list[Resumed]] = {SAME: [], OTHER: []}
        for turn in range(repeats):
            for layout in (SAME, OTHER)[:: 1 if turn % 2 else -1]:
                print(f"{tier}, {layout} layout", file=sys.stderr, flush=True)
                one = bench.load(layout) if tier == "--load" else bench.resume(tier, layout)
                found[layout].append(one)
        base = median(each.seconds for each in found[SAME])
        for layout, resumed in found.items():
            yield (tier, layout, *row(resumed, base))


def row(resumed: Sequence[Resumed], base_s: float) -> tuple[str, ...]:
    """Return the cells of one kind of start."""
    seconds, last = [each.seconds for each in resumed], resumed[-1]
    times = spread(seconds, ".2f"), f"{median(seconds) / base_s:.2f}"
    total = sum(last.read.values())
    if not total:
        return (*times, "-", "-", "-")
    has_nodes = len(last.read) > 1
    busiest = f"{max(last.read.values()) * len(last.read) / total:.2f}" if has_nodes else "-"
    return (*times, f"{total / 1e6:,.0f}", f"{total / last.needed:.2f}", busiest)


def main() -> None:
    """Run all jobs and print the table."""
    options = read_options(gb=(4.0, 0.01, "of masters and moments"), repeats=(5, 1))
    about = conditions(f"State of about {options.gb:g} GB; median (range) of {options.repeats}.")
    with (
        tempfile.TemporaryDirectory(prefix="other_layout_") as folder,
        tempfile.TemporaryDirectory(prefix="other_layout_", dir="/dev/shm") as memory,
    ):
        bench = Bench(Path(folder), Path(memory) / "memory", options.gb)
        table = markdown_table(measure(bench, options.repeats), HEADERS)
    show([about, table], options.output)


if __name__ == "__main__":
    main()
