"""Settings of what a run says of itself: events, digests, metrics; and of faults that it inflicts."""

from dataclasses import dataclass
from typing import ClassVar, override

from moe_ft.config.fields import Bounds, ConfigPart, flag_of, setting
from moe_ft.errors import ConfigError
from moe_ft.faults import FaultSpec, parse_fault
from moe_ft.saying import FORMATS

_FIRST_PORT = 1024  # that needs no privilege


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservabilityConfig(ConfigPart):
    """Records that a run writes about itself."""

    TITLE: ClassVar[str] = "lines, events and metrics"
    PAGE: ClassVar[str] = "events.md"
    NEEDS: ClassVar[tuple[str, ...]] = ("event_log",)

    log_format: str = setting(
        "text",
        "format of moe_ft's lines on standard error; json = an object on each line",
        choices=FORMATS,
        needs=(),
        page="watching.md#log-lines",
    )
    event_log: str | None = setting(
        None, "directory for one JSON-lines file of events per rank", metavar="DIR", needs=()
    )
    state_digest: bool = setting(
        False, "write a SHA-256 digest of the training state to the event log when training ends"
    )
    state_digest_interval: int = setting(
        0,
        "also write the digest every N iterations; 0 = only that of --moe-ft-state-digest",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations, or leave the flag out",
    )
    router_log: bool = setting(
        False, "also write the tokens that every expert got from this rank in each iteration"
    )
    metrics_port: int = setting(
        0,
        "serve Prometheus metrics of the node's ranks at this port, by local rank 0; 0 = do not",
        metavar="PORT",
        page="metrics.md",
        bounds=Bounds(at_least=0, at_most=65535),
        remedy="Give a port from 1024 on",
    )
    metrics_interface: str | None = setting(
        None,
        "network interface on which metrics are served, to everyone who reaches it",
        metavar="NAME",
        unset="127.0.0.1 alone",
        needs=("metrics_port",),
    )

    @override
    def check(self, world_size: int) -> None:
        if 0 < self.metrics_port < _FIRST_PORT:
            raise ConfigError(
                f"{flag_of('metrics_port')}={self.metrics_port} must be at least {_FIRST_PORT}: lower ports "
                "are for services of the system. Give another port."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultConfig(ConfigPart):
    """Faults that the run inflicts on itself, for testing."""

    TITLE: ClassVar[str] = "faults, for testing"

    inject_fault: tuple[str, ...] = setting(
        (),
        "inflict a fault: KIND:RANK@ITERATION[:PHASE], repeatable, each fires once per event log; "
        "KIND kill, exception, hang, stop, lose-node or terminate; PHASE forward (default), backward, "
        "before-step, in-step, after-step, snapshot, replicate, persist, recovery or replay; "
        "or flip:RANK@ITERATION:TARGET, which flips one bit of weights, gradients, an activation or a moment",
        metavar="KIND:RANK@ITERATION[:PHASE]",
        needs=("event_log",),
    )
    fault_report_grace_s: float = setting(
        5.0,
        "seconds a failing rank waits for others' reports before it names those without; 0 = do not wait",
        metavar="SECONDS",
        bounds=Bounds(at_least=0, at_most=600),
        reason="a launcher kills a slow rank after 30 seconds or so",
        remedy="Give a number of seconds",
    )

    @property
    def faults(self) -> tuple[FaultSpec, ...]:
        """The parsed faults; raises ConfigError on the first that cannot be parsed."""
        return tuple(parse_fault(text) for text in self.inject_fault)

    @override
    def check(self, world_size: int) -> None:
        for fault in self.faults:
            if not fault.rank < world_size:
                raise ConfigError(
                    f"--moe-ft-inject-fault {fault}: rank {fault.rank} must be less than the world "
                    f"size {world_size}. Name one of the ranks 0 to {world_size - 1}."
                )
