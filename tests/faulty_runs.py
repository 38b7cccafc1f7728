"""Runs with faults and all three tiers: restarted until one ends by itself, each recovery checked.

Ranks take turns on two nodes, so that each node holds ranks of every stage.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.demo_model import event_flags
from tests.harness import events, run_with_restarts
from tests.recoveries import Expected, RecoveryWatch
from tests.references import Place

JOB_ID = "test"


def run_until_it_ends(
    flags: Sequence[str],
    world_size: int,
    place: Place,
    *,
    max_restarts: int,
    between: Callable[[int], None] | None = None,
    has_breakpoints: bool = False,
) -> list[Expected | None]:
    """Run a job and restart it as torchrun does; return what each restart had to recover, and did.

    Args:
        place: its folder gets events, storage and output.
        between: called after a start that failed, with its number, before its remains are read.
        has_breakpoints: whether ranks may leave newer states than their windows.

    Raises:
        AssertionError: if the job does not end by itself, or a rank has not recovered the newest state that
            was left from the nearest tier.
    """
    folder, memory_dir = place.folder, place.memory_dir
    log, storage = folder / "events", folder / "storage"
    nodes = [f"node{rank % 2}" for rank in range(world_size)]
    watch = RecoveryWatch(log, world_size, memory_dir / JOB_ID, storage, lambda start: nodes)

    def look(start: int) -> None:
        if between is not None:
            between(start)
        watch.look(start)

    results = run_with_restarts(
        [
            *flags,
            *event_flags(log),
            *("--moe-ft-job-id", JOB_ID, "--moe-ft-memory-dir", str(memory_dir)),
            *("--moe-ft-persist-dir", str(storage), "--moe-ft-fault-report-grace-s", "0.5"),
        ],
        world_size,
        log_dir=folder,
        max_restarts=max_restarts,
        nodes=lambda start: nodes,
        between=look,
    )
    results[-1].check()
    return watch.check(len(results), has_breakpoints=has_breakpoints)


def fault_flags(faults: Sequence[str]) -> list[str]:
    return [word for fault in faults for word in ("--moe-ft-inject-fault", fault)]


def faults_fired(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Return the events of all ranks that say which faults fired in a run of `run_until_it_ends`."""
    log = folder / "events"
    return [line for rank in range(world_size) for line in events(log, rank, "fault_injected")]
