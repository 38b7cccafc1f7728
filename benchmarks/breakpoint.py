"""Seconds per GiB of a breakpoint, into memory that was touched before, and into memory that was not.

    python -m benchmarks.breakpoint [--gib 1] [--repeats 5] [--memory-dir /dev/shm]

One rank's state: BF16 weights, fp32 masters and moments of a few large parameters. What is timed is what
a rank does on its way out: header, copy, checksums, index. On a shared machine CPU seconds say more than the
clock. Prints one line of JSON for each attempt.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch

from moe_ft.engine.breakpoints import Breakpoints, Moment
from moe_ft.engine.memory.regions import breakpoint_region, own_directory
from moe_ft.engine.memory.unit_layouts import UnitLayouts
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.index import SnapshotIndexer
from moe_ft.engine.snapshots.record_log import RecordLog
from moe_ft.recovery.assembly import lay_out_breakpoint
from moe_ft.strategies.dense.strategy import DenseStrategy
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_identity
from tests.unit.moe_ft.engine.engine_job import capture
from tests.unit.moe_ft.small_rank import SmallRank

_BYTES_PER_ELEMENT = 12  # master and moments


def main() -> None:
    """Write breakpoints, and print how long each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-dir", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    num_elements = int(options.gib * 2**30 / _BYTES_PER_ELEMENT / len(WINDOW_UNITS))
    rank = SmallRank(num_elements=num_elements)
    rank.step(1)
    for kind in ("fresh", "touched"):
        for _ in range(options.repeats):
            folder = Path(tempfile.mkdtemp(prefix="moe_ft_benchmark_", dir=options.memory_dir))
            try:
                _measure(rank, folder, kind)
            finally:
                shutil.rmtree(folder)


def _measure(rank: SmallRank, folder: Path, kind: str) -> None:
    """Write one breakpoint of the rank's state."""
    strategy = DenseStrategy(WINDOW_UNITS)
    layout = lay_out_breakpoint(strategy, UnitLayouts(rank.catalog(), 0))
    region = breakpoint_region(own_directory(folder, 0), layout.num_bytes)
    if kind == "touched":
        region.open()
    records = RecordLog(lambda record: None)
    breakpoints = Breakpoints(
        region,
        layout,
        StateCopier(rank.parameters, None, 0),
        SnapshotIndexer(make_identity(), 0, "node", rank.parameters, records),
        records,
        lambda: None,
    )
    breakpoints.start(is_in_use=False)
    plan = strategy.plan_breakpoint()
    breakpoints.note(Moment(record=capture(1), plan=plan, tokens=lambda: None))
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    if kind == "fresh":
        region.open()
    written = breakpoints.write()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert not written.problem, written.problem
    region.close()
    gib = written.num_bytes / 2**30
    line = {
        "memory": kind,
        "gib": gib,
        "wall_s_per_gib": wall_s / gib,
        "cpu_s_per_gib": cpu_s / gib,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
