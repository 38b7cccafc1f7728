"""Program of a job whose pipeline stages take a given time, and whose ranks note what the event log lacks.

    torchrun ... -m benchmarks.slow_stages --notes DIR --memory-dir DIR [--forward-s S] [--backward-s S] --
        FLAGS

It is pretrain_gpt_moe.py, with these changes in the process:

- `forward_step` and `backward_step` of Megatron's schedules, one micro-batch on one stage each, do their
  real work and then sleep until the given time has passed since they began. So a stage takes as long as on a
  device of its own, if what the ranks compute fits into the sleep of the others. Replays run the same
  functions.
- A rank that is about to inflict a fault on itself lets its engine finish first, so that the window that ends
  with the iteration is complete on all ranks.
- Each rank notes, once for each recovery: the boundary logs that the start before has left, when the recovery
  began, how long it read state, and how long each iteration took to run again. The event log counts reading
  as part of "restore", and has the iterations together.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from megatron.core.pipeline_parallel import schedules

import pretrain_gpt_moe
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.faults import FaultSpec
from moe_ft.loop import checkpoints
from moe_ft.loop.checkpoints import Checkpoints
from moe_ft.loop.faults import Faults
from moe_ft.loop.resumption import Replay
from moe_ft.recovery import start as starting
from tests.unit.moe_ft.engine.boundary.logs import open_log

_ENGINE_S = 0.3  # for commits of the other ranks, which take milliseconds

_patches = Patches()  # for as long as the process runs


def notes_path(folder: Path, rank: int) -> Path:
    """Return where a rank's notes are: a JSON object on each line, one for each recovery."""
    return folder / f"notes_{rank}.jsonl"


def lasting[**P, R](
    function: Callable[P, R],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[P, R]:
    """Return a function that does the same and takes at least so long."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        end = clock() + seconds
        result = function(*args, **kwargs)
        sleep(max(0.0, end - clock()))
        return result

    return call


def logs_left(memory_dir: Path, rank: int) -> Iterator[dict[str, int]]:
    """Yield what each boundary log holds that a rank has written before it died.

    Raises:
        AssertionError: if a log is damaged.
    """
    for directory in memory_dir.glob(f"*/*/rank_{rank:05d}"):
        found, problems = open_log(directory)
        assert not problems, problems
        for iteration, logged in sorted(found.items()):
            yield {
                "iteration": iteration,
                "tensors": len(logged.index.sent),
                "bytes": sum(sent.num_bytes for sent in logged.index.sent),
                "file_bytes": (directory / logged.index.file).stat().st_size,
            }


def _note_recovery(path: Path, logs: list[dict[str, int]]) -> None:
    """Write the notes of this start once it has recovered."""
    start_number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    notes: dict[str, Any] = {"start": start_number, "logs": logs, "fetch_s": 0.0, "replays_s": []}

    def noted_start(start: Callable[..., Any], *args: Any) -> Any:
        notes["begun"] = time.time()
        return start(*args)

    def timed_fetch(fetch: Callable[..., Any], *args: Any) -> Any:
        seconds, fetched = _timed(fetch, *args)
        notes["fetch_s"] += seconds
        return fetched

    def timed_replay(replay: Callable[..., Any], *args: Any) -> Any:
        seconds, has_stepped = _timed(replay, *args)
        notes["replays_s"].append(seconds)
        return has_stepped

    def write(original: Callable[..., Any], *args: Any) -> None:
        original(*args)
        with path.open("a") as file:
            file.write(json.dumps(notes) + "\n")

    _patches.wrap(checkpoints, "start", noted_start)
    _patches.wrap(starting, "fetch_together", timed_fetch)
    for owner, name, around in (
        (Replay, "_run_iteration", timed_replay),
        (Checkpoints, "_write_recovery", write),
    ):
        _wrap_method(owner, name, around)


def _timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    start_s = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start_s, result


def _wrap_method(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        return around(original, *args)

    _patches.set(owner, name, call)


def _wait_before_faults() -> None:
    def claim_and_wait(claim: Callable[..., bool], faults: Faults, fault: FaultSpec) -> bool:
        is_new = claim(faults, fault)
        if is_new:
            time.sleep(_ENGINE_S)
        return is_new

    _wrap_method(Faults, "_claim", claim_and_wait)


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--notes", type=Path, required=True, metavar="DIR")
    parser.add_argument("--memory-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--forward-s", type=float, default=0.0)
    parser.add_argument("--backward-s", type=float, default=0.0)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    logs = list(logs_left(options.memory_dir, rank))
    _note_recovery(notes_path(options.notes, rank), logs)
    _wait_before_faults()
    for name, seconds in (
        ("forward_step", options.forward_s),
        ("backward_step", options.backward_s),
    ):
        _patches.set(schedules, name, lasting(getattr(schedules, name), seconds))
    pretrain_gpt_moe.main([*options.flags, "--moe-ft-memory-dir", str(options.memory_dir)])


if __name__ == "__main__":
    main()
