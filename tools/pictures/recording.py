"""Recordings of real runs for the pictures: small JSON files, committed, which say how they were made.

    torchrun ... -m tools.pictures.recording phases ARGUMENTS_OF_PRETRAIN_GPT_MOE
    python -m tools.pictures.recording repair EVENTS FILE.json COMMAND EVENTS_WITHOUT_FAILURE
    python -m tools.pictures.recording iteration EVENTS FILE.json COMMAND

The first line trains with `pretrain_gpt_moe.py` and keeps the time of every phase of an iteration, which
the event log leaves out. The others choose what a picture shows. tools/pictures/runs.py draws it.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from moe_ft.events import EventLog, read_events
from moe_ft.faults import Phase

_TRAINING = ("forward", "backward", "before-step", "step", "after-step", "between")
_AROUND_S = 3.0  # of training before the death and after the repair
Times = dict[str, Any]


def record_phases(command_line: list[str]) -> None:
    """Train with the pretraining program, each rank as its own node; write its phases as events."""
    os.environ["MOE_FT_NODE_ID"] = f"node{os.environ['LOCAL_RANK']}"
    import pretrain_gpt_moe  # Megatron is not needed to read recordings
    from moe_ft.engine.background import EventQueue
    from moe_ft.engine.engine import CheckpointEngine
    from moe_ft.engine.persist.client import PersistClient

    note, wait = EventLog.progress, CheckpointEngine.before_step
    report, ask = EventQueue.add, PersistClient.submit
    last: list[tuple[EventLog, int]] = []

    def log(phase: str, iteration: int | None = None, **fields: Any) -> None:
        for events, running in last:
            events.write(
                "phase", running if iteration is None else iteration, phase=phase, **fields
            )

    def progress(events: EventLog, iteration: int, phase: Phase) -> None:
        note(events, iteration, phase)
        last[:] = [(events, iteration)]
        log(str(phase))

    def before_step(engine: CheckpointEngine, *args: Any) -> None:
        wait(engine, *args)
        log("step")  # the fence is open

    def add(reports: EventQueue, event: str, iteration: int, **fields: Any) -> None:
        report(reports, event, iteration, **fields)
        if event in ("snapshot", "replicate"):  # as soon as it has ended, on its own thread
            times = {name: fields[name] for name in ("seconds", "copy_s") if name in fields}
            log(event, iteration, **times)

    def submit(client: PersistClient, region: Any, *args: Any, **kwargs: Any) -> None:
        log("persist", region.iteration)
        ask(client, region, *args, **kwargs)

    EventLog.progress = progress  # type: ignore[assignment, method-assign]
    CheckpointEngine.before_step = before_step  # type: ignore[assignment, method-assign]
    EventQueue.add = add  # type: ignore[assignment, method-assign]
    PersistClient.submit = submit  # type: ignore[assignment, method-assign]
    pretrain_gpt_moe.main(command_line)


def digests_of(runs: dict[int, list[Times]]) -> list[str]:
    """Return the digest of each rank's state at the end of a run with --moe-ft-state-digest."""
    return [
        next(each["sha256_all"] for each in reversed(events) if each["event"] == "state_digest")
        for _, events in sorted(runs.items())
    ]


def events_of(folder: Path) -> dict[int, list[Times]]:
    """Return the events of a run by rank."""
    paths = sorted(folder.glob("rank_*.jsonl"))
    return {int(path.stem.removeprefix("rank_")): list(read_events(path)) for path in paths}


def span(end: float, seconds: float, zero: float) -> list[float]:
    """Return the beginning and the end of something that took so long, in seconds after `zero`."""
    return [round(end - seconds - zero, 4), round(end - zero, 4)]


def choose_repair(runs: dict[int, list[Times]]) -> Times:
    """Return one repair of a run: iterations by rank around it, and the phases of the repair."""
    repairs = {
        rank: next(each for each in events if each["event"] == "repair")
        for rank, events in runs.items()
    }
    death = min(each["time"] - each["seconds"] for each in repairs.values())
    end = max(each["time"] for each in repairs.values())
    ranks = []
    for rank, events in sorted(runs.items()):
        iterations = [
            [each["iteration"], *span(each["time"], each["iteration_s"], death)]
            for each in events
            if each["event"] == "iteration"
            if death - _AROUND_S < each["time"] < end + _AROUND_S
        ]
        pids = [each["pid"] for each in events if each["event"] == "start"]
        repair = repairs[rank]
        ranks.append(
            {
                "rank": rank,
                "iterations": iterations,
                "was_replaced": repair["is_replacement"],
                "kept_its_process": len(set(pids)) == 1,
                "phases": {name: round(each, 4) for name, each in repair["phases_s"].items()},
                "done": round(repair["time"] - death, 4),
                "repair_s": round(repair["seconds"], 4),
            }
        )
    first = next(iter(repairs.values()))
    facts = {name: first[name] for name in ("broken_iteration", "recovered_iteration")}
    return {**facts, "dead_ranks": first["dead_ranks"], "ranks": ranks}


def choose_iteration(runs: dict[int, list[Times]]) -> Times:
    """Return the iteration of rank 0 nearest to the median, of those that went to storage."""
    starts: dict[int, dict[str, float]] = defaultdict(dict)
    events: dict[int, dict[str, Times]] = defaultdict(dict)
    for each in runs[0]:
        if each["event"] == "phase":
            starts[each["iteration"]].setdefault(each["phase"], each["time"])
            events[each["iteration"]].setdefault(each["phase"], each)
        elif each["event"] in ("snapshot", "persist"):
            events[each["iteration"]]["whole " + each["event"]] = each
    wanted = {*_TRAINING, "snapshot", "replicate", "persist", "whole persist"}
    whole = {
        iteration: starts[iteration]["between"] - starts[iteration]["forward"]
        for iteration in list(starts)
        if wanted <= {*events[iteration]} and "forward" in starts[iteration + 1]
    }
    middle = median(whole.values())
    chosen = min(whole, key=lambda iteration: (abs(whole[iteration] - middle), iteration))
    zero, found = starts[chosen]["forward"], events[chosen]
    committed, copy_s = found["snapshot"]["time"], found["snapshot"]["copy_s"]
    begun = committed - found["snapshot"]["seconds"]
    write_s = found["whole persist"]["seconds"]
    return {
        "iteration": chosen,
        "phases": {name: round(starts[chosen][name] - zero, 4) for name in _TRAINING},
        "next": round(starts[chosen + 1]["forward"] - zero, 4),
        "copy": span(begun + copy_s, copy_s, zero),
        "commit": span(committed, committed - begun - copy_s, zero),
        "bytes": found["whole snapshot"]["bytes"],
        "send": span(found["replicate"]["time"], found["replicate"]["seconds"], zero),
        "persist": span(found["persist"]["time"] + write_s, write_s, zero),
    }


def main(arguments: list[str]) -> None:
    """Train and record, or write a recording."""
    kind, *rest = arguments
    if kind == "phases":
        record_phases(rest)
        return
    events, path, command, *undisturbed = rest
    runs = events_of(Path(events))
    recording: Times = {"command": command}
    if kind == "repair":
        digests = digests_of(runs)
        recording |= {"seconds": "after the death", **choose_repair(runs), "digests": digests}
        recording["digests_without_failure"] = digests_of(events_of(Path(*undisturbed)))
    else:
        recording |= {"seconds": "after forward begins", **choose_iteration(runs)}
    Path(path).write_text(json.dumps(recording, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
