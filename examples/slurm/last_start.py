"""Outcome of the last start of a job, from its event log: for examples/slurm/restarts.sh.

    last_start.py iteration EVENTS [--checkpoints DIR]     # the newest iteration that is finished
    last_start.py failed EVENTS --since TIME --nodes N     # nodes to blame, each with a reason

It needs only Python: the node of a batch script may have nothing else. docs/events.md describes the log.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_TAIL_BYTES = 1 << 20  # of a rank's file: its failure is at the end
_LONGEST = 160  # characters of a reason


def last_events(path: Path) -> Iterator[Event]:
    """Yield the last events of a rank, newest first; lines that are none are left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:  # torn by the end of the process
            continue
        if isinstance(event, dict) and isinstance(event.get("time"), int | float):
            yield event


def newest_iteration(events: Path, checkpoints: Path) -> int:
    """Return the newest finished iteration; without events, the one that Megatron has saved; else 0."""
    found = (e for e in last_events(events / "rank_00000.jsonl") if e.get("event") == "iteration")
    for event in found:
        return int(event["iteration"])
    try:
        return int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def events_of_last_start(events: Path, since_s: float) -> dict[int, list[Event]]:
    """Return ``[rank]`` the events since a time that belong to the last of the starts since then."""
    found: dict[int, list[Event]] = {}
    for path in events.glob("rank_*.jsonl"):
        if rank := re.fullmatch(r"rank_(\d+)\.jsonl", path.name):
            own = [event for event in last_events(path) if event["time"] >= since_s]
            found[int(rank[1])] = own
    newest = max((e.get("incarnation", 0) for own in found.values() for e in own), default=0)
    return {
        rank: kept
        for rank, own in found.items()
        if (kept := [event for event in own if event.get("incarnation", 0) == newest])
    }


def failed_ranks(events: Mapping[int, Iterable[Event]]) -> dict[int, str]:
    """Return the ranks whose failure came first, each with a reason.

    Ranks that gave no sign of life have died. A rank that hung says so. Otherwise it is the first that ended
    by itself, before others noticed, unless others have ended with the same words: that is the program.
    """
    stopped: dict[int, Event] = {}
    hung: dict[int, str] = {}
    silent: set[int] = set()
    for rank, own in events.items():
        for event in own:
            if event.get("event") == "stopped":
                stopped[rank] = event
                silent.update(event.get("silent_ranks") or ())
            elif event.get("event") == "hang":
                hung[rank] = f"rank {rank} hung"
    if hung:
        return hung
    if silent := silent - stopped.keys():
        return {rank: f"rank {rank} died without a report" for rank in sorted(silent)}
    own_end = {
        rank: str(event.get("reason", ""))
        for rank, event in sorted(stopped.items(), key=lambda item: item[1]["time"])
        if not str(event.get("reason", "")).startswith("SIGTERM") and not event.get("silent_ranks")
    }
    if not own_end:
        return {}
    first, reason = next(iter(own_end.items()))
    if any(rank != first and other == reason for rank, other in own_end.items()):
        return {}
    return {first: f"rank {first}: {reason}"}


def failed_nodes(events: Path, since_s: float, num_nodes: int) -> dict[int, str]:
    """Return the nodes whose ranks have failed, by their number, each with a reason."""
    found = events_of_last_start(events, since_s)
    sizes = [e["world_size"] for own in found.values() for e in own if e.get("event") == "start"]
    ranks_per_node = max(sizes, default=0) // num_nodes
    if ranks_per_node == 0:
        return {}
    nodes: dict[int, str] = {}
    for rank, reason in failed_ranks(found).items():
        if (node := rank // ranks_per_node) < num_nodes:
            nodes.setdefault(node, " ".join(reason.split())[:_LONGEST])
    return nodes


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description="What the last start of a job has come to.")
    parser.add_argument("what", choices=["iteration", "failed"])
    parser.add_argument("events", type=Path, help="--moe-ft-event-log of the job")
    parser.add_argument("--checkpoints", type=Path, default=Path("none"), help="Megatron's --save")
    parser.add_argument("--since", type=float, default=0.0, help="seconds since 1970: of the start")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that train")
    args = parser.parse_args()
    if args.what == "iteration":
        print(newest_iteration(args.events, args.checkpoints))
        return
    for node, reason in failed_nodes(args.events, args.since, args.nodes).items():
        print(node, reason)


if __name__ == "__main__":
    main()
