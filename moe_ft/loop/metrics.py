"""Prometheus metrics of a node's ranks, for --moe-ft-metrics-port: local rank 0 serves them.

They are sums over the event log of these ranks (event_fold.py). A scrape reads it on, in the server's thread;
the training thread does nothing for them. docs/metrics.md lists the metrics.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, override
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from moe_ft.addresses import address_of
from moe_ft.config.config import MemoryConfig
from moe_ft.config.fields import flag_of
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.engine.background import BackgroundPart
from moe_ft.errors import ConfigError
from moe_ft.event_lines import (
    CorruptionLine,
    DegradedLine,
    RecoveryLine,
    RepairLine,
    SkippedLine,
)
from moe_ft.events import last_incarnation
from moe_ft.loop.corruption import Check
from moe_ft.loop.event_fold import FollowedRun, RankFold
from moe_ft.loop.listeners import LoopListener
from moe_ft.saying import warn

_LOOPBACK = "127.0.0.1"
_MOST_BYTES = 4 << 20  # of a rank's file in a scrape, so that one after a long time stays short
_PATIENCE_S = 10.0  # children of a rank that was killed may hold its port for a moment
_POLL_S = 0.2
_MOST_CONNECTIONS = (
    16  # at a time: any user of the node may open some, and each is a thread of a rank
)
_SILENT_S = 5.0  # of a connection, until it is closed
_GAUGE, _COUNTER = "gauge", "counter"
# Labels of every metric. Prometheus sets `job` and `instance` itself, so ours have other names.
LABELS = ("job_name", "node", "rank")
# By name: the kind, the meaning, and the label besides these.
METRICS: Mapping[str, tuple[str, str, str]] = {
    "iteration": (_GAUGE, "last iteration that is complete", ""),
    "incarnation": (_GAUGE, "number of the start, from 0; a repair begins one too", ""),
    "last_event_timestamp_seconds": (_GAUGE, "time of the last event", ""),
    "loss": (_GAUGE, "loss of the last iteration, of ranks that have it", ""),
    "iterations": (_COUNTER, "iterations, repeated ones included", ""),
    "tokens": (_COUNTER, "tokens of the whole job, those of repeated iterations included", ""),
    "iteration_seconds": (_GAUGE, "median of the last 20 iterations", ""),
    "stall_seconds": (_COUNTER, "time that checkpoints held training up", ""),
    "idle_seconds": (_COUNTER, "time that the rank waited for other ranks", ""),
    "own_seconds": (_GAUGE, "median of the own time of the last iterations that tell it", "stage"),
    "time_seconds": (_COUNTER, "time by use, as moe_ft report divides it", "use"),
    "snapshot_iteration": (_GAUGE, "iteration of the newest snapshot in a tier", "tier"),
    "read_back_iteration": (_GAUGE, "newest iteration that was read back from storage", ""),
    "snapshots": (_COUNTER, "snapshots that have reached a tier", "tier"),
    "snapshot_bytes": (_COUNTER, "bytes that have gone to a tier", "tier"),
    "snapshot_seconds": (_COUNTER, "time until snapshots were in a tier", "tier"),
    "skipped": (_COUNTER, "snapshots that were due and were left out", ""),
    "degraded": (_COUNTER, "failures of parts of checkpointing", "part"),
    "corruptions": (
        _COUNTER,
        "findings of silent corruption, on each rank that knows of it",
        "check",
    ),
    "recoveries": (_COUNTER, "recoveries", ""),
    "repairs": (_COUNTER, "repairs in place", ""),
    "repair_seconds": (_COUNTER, "time from deaths until the broken iterations were finished", ""),
    "lost_tokens": (_GAUGE, "tokens whose updates recoveries dropped, of the whole job", ""),
    "unread_bytes": (_GAUGE, "bytes of the event log that scrapes have still to read", ""),
}
Values = Iterable[tuple[str, str, float | None]]  # name, label and value; None is left out


def values_of(fold: RankFold) -> Values:
    """Yield name, label and value of all that a rank has, None for what is not known."""
    has_begun = fold.time_s > 0  # before the first event of a process these would fall to 0
    yield "iteration", "", fold.iteration if has_begun else None
    yield "incarnation", "", fold.incarnation if has_begun else None
    yield "lost_tokens", "", fold.lost_tokens if has_begun else None
    yield "last_event_timestamp_seconds", "", fold.time_s if has_begun else None
    yield "loss", "", fold.loss
    yield "iterations", "", fold.num_iterations
    yield "tokens", "", fold.num_tokens
    yield "iteration_seconds", "", fold.iteration_s
    yield "stall_seconds", "", fold.total_stall_s
    yield "idle_seconds", "", fold.total_idle_s
    yield "own_seconds", str(fold.stage), fold.own_times.median_s
    yield "read_back_iteration", "", fold.read_back
    yield "skipped", "", fold.num(SkippedLine)
    yield "recoveries", "", fold.num(RecoveryLine)
    yield "repairs", "", fold.num(RepairLine)
    yield "repair_seconds", "", fold.repair_s
    for use, seconds in fold.spent.seconds.items():
        yield "time_seconds", use, seconds
    for tier, moves in fold.tiers.items():
        yield "snapshot_iteration", tier, moves.iteration if moves.num else None
        yield "snapshots", tier, moves.num
        yield "snapshot_bytes", tier, moves.num_bytes
        yield "snapshot_seconds", tier, moves.seconds
    for part in BackgroundPart:  # also with 0: increase() misses the birth of a series
        yield "degraded", part, fold.counts[DegradedLine, part]
    for check in Check:
        yield "corruptions", check, fold.counts[CorruptionLine, check]


class _Collector:
    """Reads the log on and returns all metrics. Called by the threads of the server."""

    def __init__(self, run: FollowedRun, job_name: str, node: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._place = job_name, node

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {_GAUGE: GaugeMetricFamily, _COUNTER: CounterMetricFamily}
        families = {
            name: kinds[kind](f"moe_ft_{name}", text, labels=[*LABELS, *([label] if label else [])])
            for name, (kind, text, label) in METRICS.items()
        }
        with self._lock:
            self._run.read(_MOST_BYTES)
            for each in self._run.ranks:
                common = [*self._place, str(each.rank)]
                for name, label, value in values_of(each):
                    if value is not None:
                        further = [label] if METRICS[name][2] else []
                        families[name].add_metric([*common, *further], value)
                families["unread_bytes"].add_metric(common, self._run.unread_bytes_of(each.rank))
        yield from families.values()


def job_name(memory: MemoryConfig) -> str:
    """Return the job's name; torchrun's id without one, which a start without checkpoints may lack."""
    try:
        return memory.resolve_job_id(os.environ)
    except ConfigError:
        return os.environ.get("TORCHELASTIC_RUN_ID", "")


class _Handler(WSGIRequestHandler):
    """Answers a request, which comes soon; says nothing of it."""

    timeout = _SILENT_S

    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """Server with few connections at a time, each in a thread of its own; further ones are closed at once."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        """Listen; raises OSError if that is not possible."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.Semaphore(_MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)

    @override
    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._places.acquire(blocking=False)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        super().process_request_thread(request, client_address)
        self._places.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # somebody has left early


class Metrics(LoopListener):
    """Server of the metrics of a node. Owned by the training thread, which starts and closes it."""

    def __init__(self, config: ObservabilityConfig, memory: MemoryConfig, rank: int) -> None:
        self._config = config
        self._memory = memory
        self._rank = rank
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @override
    def start(self) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if not self._config.metrics_port or local_rank or self._config.event_log is None:
            return
        directory, first = Path(self._config.event_log), self._rank
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        run = FollowedRun(directory, range(first, first + num_local), is_from_end=True)
        address, interface = _LOOPBACK, self._config.metrics_interface
        try:
            if interface is not None:
                address = address_of(flag_of("metrics_interface"), interface)
            self._serve(run, address)
        except OSError as error:
            warn(
                f"no metrics are served: {flag_of('metrics_port')}={self._config.metrics_port} "
                f"cannot be opened on {address} ({error.strerror}): local rank 0 of each node serves metrics "
                "there. Name a port that is free on all nodes, or leave the flag out."
            )
        except ConfigError as error:
            if last_incarnation(directory, self._rank) < 0:
                raise
            warn(f"no metrics are served: {error}")  # on a spare node, of a run that has begun

    def _serve(self, run: FollowedRun, address: str) -> None:
        """Listen; retry for a while where the port is taken."""
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError as error:
            raise ConfigError(
                f"{flag_of('metrics_port')}={self._config.metrics_port} needs prometheus_client, which is "
                "not installed. Install it (pip install prometheus-client), or leave the flag out."
            ) from error
        registry = CollectorRegistry(auto_describe=False)
        node = self._memory.resolve_node_id(os.environ, socket.gethostname())
        registry.register(_Collector(run, job_name(self._memory), node))
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._server = _Server(address, self._config.metrics_port)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @override
    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread is not None:
            self._thread.join()
        self._server = self._thread = None
