"""Settings of moe_ft: one frozen dataclass per part, from which the --moe-ft-* flags are generated.

Field `event_log` becomes `--moe-ft-event-log`. Turning fields into argparse flags is
megatron/fault_tolerance/arguments.py.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from moe_ft.errors import ConfigError
from moe_ft.faults import FaultSpec, parse_fault

FLAG_PREFIX = "--moe-ft-"
STRATEGIES = ("none",)


def flag_of(field_name: str) -> str:
    """Return the command-line flag of a config field."""
    return FLAG_PREFIX + field_name.replace("_", "-")


def _setting(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """What is checkpointed, and with which Megatron."""

    strategy: str = _setting("none", "which state is checkpointed when", choices=STRATEGIES)
    allow_untested_megatron: bool = _setting(
        False, "run with a megatron-core version that moe_ft was not tested with"
    )

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if the strategy is unknown."""
        if self.strategy not in STRATEGIES:
            raise ConfigError(
                f"--moe-ft-strategy={self.strategy} must be one of {', '.join(STRATEGIES)}. "
                "Name one of them."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservabilityConfig:
    """What a run writes about itself."""

    event_log: str | None = _setting(
        None, "directory for one JSON-lines file of events per rank", metavar="DIR"
    )
    state_digest: bool = _setting(
        False, "write a SHA-256 digest of the training state to the event log when training ends"
    )
    state_digest_interval: int = _setting(
        0, "also write the digest every N iterations; 0 = only at the end", metavar="N"
    )

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if digests are asked for without a place to write them."""
        if self.state_digest_interval < 0:
            raise ConfigError(
                f"--moe-ft-state-digest-interval={self.state_digest_interval} must be at least 0. "
                "Give a number of iterations, or leave the flag out."
            )
        if (self.state_digest or self.state_digest_interval) and self.event_log is None:
            flag = "state-digest" if self.state_digest else "state-digest-interval"
            raise ConfigError(
                f"--moe-ft-{flag} writes to the event log, and there is none. "
                "Add --moe-ft-event-log DIR."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultConfig:
    """Faults that the run inflicts on itself, for testing."""

    inject_fault: tuple[str, ...] = _setting(
        (),
        "inflict a fault: KIND:RANK@ITERATION[:PHASE], repeatable, each fires once per event log; "
        "KIND kill, exception or hang; PHASE forward (default), backward, before-step, in-step "
        "or after-step",
        metavar="KIND:RANK@ITERATION[:PHASE]",
    )
    fault_report_grace_s: float = _setting(
        5.0,
        "seconds a failing rank waits for the other ranks' reports before it names those that "
        "gave none; 0 = do not wait",
        metavar="SECONDS",
    )

    @property
    def faults(self) -> tuple[FaultSpec, ...]:
        """The parsed faults; raises ConfigError on the first that cannot be parsed."""
        return tuple(parse_fault(text) for text in self.inject_fault)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError on a fault that does not parse or names a rank that does not exist."""
        for fault in self.faults:
            if not fault.rank < world_size:
                raise ConfigError(
                    f"--moe-ft-inject-fault {fault}: rank {fault.rank} must be less than the world "
                    f"size {world_size}. Name one of the ranks 0 to {world_size - 1}."
                )
        if not 0 <= self.fault_report_grace_s <= 600:
            raise ConfigError(
                f"--moe-ft-fault-report-grace-s={self.fault_report_grace_s} must be between 0 and "
                "600 seconds. A launcher kills a slow rank after 30 seconds or so."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeFtConfig:
    """All settings of moe_ft."""

    strategy: StrategyConfig = StrategyConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    fault: FaultConfig = FaultConfig()

    def validate(self, world_size: int) -> None:
        """Check every part and the rules between parts.

        Args:
            world_size: number of ranks of the job.

        Raises:
            ConfigError: names the flag, its value, the rule and the remedy.
        """
        for part in fields(self):
            getattr(self, part.name).validate(world_size)
        if self.fault.inject_fault and self.observability.event_log is None:
            raise ConfigError(
                f"--moe-ft-inject-fault {self.fault.inject_fault[0]} needs the event log, where a "
                "fault that fired is marked so that it fires once. Add --moe-ft-event-log DIR."
            )
