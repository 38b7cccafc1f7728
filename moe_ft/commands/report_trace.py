"""Trace of `moe_ft report --trace`: a run in the Trace Event Format of Chrome, which Perfetto opens.

A process is a node and a thread a rank. What overlaps the iterations of a rank has threads beside its own:
its waits, its snapshots by tier, its recoveries and repairs.

Source: Trace Event Format, the document of Chrome's catapult project.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, override

from moe_ft.errors import ConfigError
from moe_ft.event_lines import (
    IterationLine,
    Line,
    Mark,
    RecoveryLine,
    RepairLine,
    SnapshotTier,
    StartLine,
)
from moe_ft.loop.event_fold import Sink
from moe_ft.planning.time_shares import Spent

_TRAINING, _WAITS, _RECOVERIES, _REPAIRS = "training", "waits", "recoveries", "repairs"
_LANES = (_TRAINING, _WAITS, *SnapshotTier, _RECOVERIES, _REPAIRS)
_NAMES = {
    SnapshotTier.MEMORY: "snapshot",
    SnapshotTier.PEERS: "replicate",
    SnapshotTier.STORAGE: "persist",
}
_ANY = "unknown"  # node of a rank whose log does not say where it ran
Part = tuple[str, str]  # node, and an event as JSON without its brace and the number of its process


class TraceSink(Sink):
    """Spans and moments of one rank. They are as many as its log is long."""

    kinds = frozenset((StartLine, IterationLine, RecoveryLine, RepairLine))

    def __init__(self, rank: int, first_s: float) -> None:
        """Begin; times count from `first_s`."""
        self._rank = rank
        self._first_s = first_s
        self._node = _ANY
        self._free = 0  # microseconds: the rank's own thread has nothing from then on
        # By node and lane: whole spans, each followed by its parts.
        self._spans: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}

    def _us(self, time_s: float) -> int:
        return max(0, round((time_s - self._first_s) * 1e6))

    def _add(
        self,
        lane: str,
        name: str,
        begin_s: float,
        end_s: float,
        parts: Mapping[str, float] = {},
        **arguments: object,
    ) -> None:
        """Add a span, and the parts of it that follow each other from its beginning on, in seconds."""
        begin, end = self._us(begin_s), self._us(end_s)
        if lane in (_TRAINING, _WAITS):  # one after the other, also where a clock was put back
            begin, end = max(begin, self._free), max(end, self._free)
        begin = min(begin, end)
        whole = {"ph": "X", "cat": lane, "ts": begin, "dur": end - begin, "name": name}
        events = [{**whole, "args": arguments}]
        for part, seconds in parts.items():
            length = min(max(0, round(seconds * 1e6)), end - begin)
            events.append({**whole, "ts": begin, "dur": length, "name": part})
            begin += length
        self._spans.setdefault((self._node, lane), []).append(events)

    def _instant(self, time_s: float, scope: str, kind: str, text: str) -> None:
        event = {"ph": "i", "s": scope, "cat": kind, "ts": self._us(time_s), "name": text}
        self._spans.setdefault((self._node, _TRAINING), []).append([event])

    @override
    def span(
        self,
        kind: Spent | SnapshotTier,
        begin_s: float,
        end_s: float,
        event: Line,
        num_bytes: int = 0,
    ) -> None:
        if isinstance(kind, SnapshotTier):
            name = _NAMES[kind]
            self._add(kind, name, begin_s, end_s, iteration=event.iteration, bytes=num_bytes)
        elif kind is Spent.RECOVERING:
            self._add(_TRAINING, kind, begin_s, end_s)
            self._free = max(self._free, self._us(end_s))

    @override
    def moment(self, mark: Mark, time_s: float, text: str) -> None:
        self._instant(time_s, "t", mark, text)

    @override
    def take(self, event: Line) -> None:
        match event:
            case StartLine():
                self._node = event.host or _ANY
            case IterationLine():
                self._iterate(event)
            case RecoveryLine(phases_s=phases_s):
                self._add(
                    _RECOVERIES,
                    "recovery",
                    event.time - sum(phases_s.values()),
                    event.time,
                    phases_s,
                    target_iteration=event.target_iteration,
                    units=event.sources,
                    lost_tokens=event.lost_tokens,
                )
            case RepairLine():
                begin_s, broken = event.time - event.seconds, event.broken_iteration + 1
                self._add(
                    *(_REPAIRS, "repair", begin_s, event.time, event.phases_s),
                    dead_ranks=event.dead_ranks,
                    iteration=broken,
                )
                for lost, spare in event.taken_over.items() if event.is_replacement else ():
                    text = f"node {lost} is lost: {spare} has its ranks"
                    self._instant(begin_s, "p", Mark.FAULT, text)

    def _iterate(self, event: IterationLine) -> None:
        begin_s, name = event.time - event.iteration_s, f"iteration {event.iteration}"
        arguments = {"loss": event.loss, "stall_s": event.stall_s, "tokens": event.num_tokens}
        self._add(_TRAINING, name, begin_s, event.time, event.phases_s or {}, **arguments)
        if event.idle_s is not None:
            idle_s, exchange_s = event.idle_s, event.exchange_s or 0.0
            own_s = max(0.0, event.iteration_s - idle_s - exchange_s)
            parts = {"own": own_s, "exchange": exchange_s, "idle": idle_s}
            self._add(_WAITS, name, begin_s, event.time, parts)
        self._free = max(self._free, self._us(event.time))

    def parts(self) -> Iterator[Part]:
        """Yield the events of the rank, by thread and by ascending time on each."""
        for node, lane in sorted(self._spans, key=lambda each: (each[0], _LANES.index(each[1]))):
            spans = sorted(self._spans[node, lane], key=lambda each: each[0]["ts"])
            threads: list[list[dict[str, Any]]] = [[]]
            ends = [0]
            for events in spans:
                # In this format a span that lies in another one is a part of it: what overlaps otherwise
                # gets a further thread.
                begin, is_span = events[0]["ts"], events[0]["ph"] == "X"
                free = (number for number, end in enumerate(ends) if end <= begin or not is_span)
                thread = next(free, len(ends))
                if thread == len(ends):
                    ends.append(0)
                    threads.append([])
                ends[thread] = max(ends[thread], begin + events[0].get("dur", 0))
                threads[thread] += events
            for copy, found in enumerate(threads):
                yield from self._thread(node, lane, copy, found)

    def _thread(
        self, node: str, lane: str, copy: int, events: list[dict[str, Any]]
    ) -> Iterator[Part]:
        number = _LANES.index(lane)
        thread = self._rank + 10**6 * number + 10**7 * copy
        words = (f"rank {self._rank}", lane if number else "", f"{copy + 1}" if copy else "")
        place = (self._rank * len(_LANES) + number) * 1000 + copy
        name = {"name": " ".join(filter(None, words))}
        heads = ("thread_name", name), ("thread_sort_index", {"sort_index": place})
        for kind, arguments in heads:
            head = {"ph": "M", "name": kind, "args": arguments, "tid": thread}
            yield node, json.dumps(head)[1:]
        # Moments lie between spans and their parts.
        for event in sorted(events, key=lambda each: (each["ts"], -each.get("dur", 0))):
            yield node, json.dumps({**event, "tid": thread})[1:]


@contextmanager
def open_trace(path: Path) -> Iterator[Callable[[Iterable[Part]], None]]:
    """Give a function that writes a rank's part; FILE is there with all of them, or as it was before.

    Raises:
        ConfigError: if FILE cannot be written.
    """
    nodes: dict[str, int] = {}
    beside = None

    def add(parts: Iterable[Part]) -> None:
        for node, event in parts:
            comma = ",\n" if nodes else ""
            if node not in nodes:
                nodes[node] = len(nodes) + 1
                head = {"ph": "M", "name": "process_name", "args": {"name": node}}
                file.write(f'{comma}{{"pid": {nodes[node]}, {json.dumps(head)[1:]}')
                comma = ",\n"
            file.write(f'{comma}{{"pid": {nodes[node]}, {event}')

    try:
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"--trace={path} must be a file, and it is something else. Name a file."
            )
        if not path.parent.is_dir():
            raise ConfigError(
                f"--trace={path} must be in a folder that exists. Make it, or name another file."
            )
        number, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(number, "w", encoding="ascii") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            yield add
            file.write("\n]}\n")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(
            f"--trace={path} cannot be written: {error.strerror}. Name another file."
        ) from error
    finally:
        if beside is not None:
            with suppress(FileNotFoundError):
                os.unlink(beside)
