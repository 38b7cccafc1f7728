"""Settings of what a run says of itself: its event log, digests, metrics."""

from dataclasses import dataclass
from typing import ClassVar, override

from moe_ft.config.fields import Bounds, Part, flag_of, setting
from moe_ft.errors import ConfigError
from moe_ft.saying import FORMATS

_FIRST_PORT = 1024  # that needs no privilege


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservabilityConfig(Part):
    """Records that a run writes about itself."""

    NEEDS: ClassVar[tuple[str, ...]] = ("event_log",)

    log_format: str = setting(
        "text",
        "format of moe_ft's lines on standard error; json = an object on each line",
        choices=FORMATS,
        needs=(),
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
        bounds=Bounds(at_least=0, at_most=65535),
        remedy="Give a port from 1024 on",
    )
    metrics_interface: str | None = setting(
        None,
        "network interface on which metrics are served, to everyone who reaches it; default: 127.0.0.1 alone",
        metavar="NAME",
        needs=("metrics_port",),
    )

    @override
    def check(self, world_size: int) -> None:
        if 0 < self.metrics_port < _FIRST_PORT:
            raise ConfigError(
                f"{flag_of('metrics_port')}={self.metrics_port} must be at least {_FIRST_PORT}: lower ports "
                "are for services of the system. Give another port."
            )
