"""Settings of moe_ft: one frozen dataclass per part, from which the --moe-ft-* flags are generated.

Field `event_log` becomes `--moe-ft-event-log`. The strategies' part is moe_ft/config/strategy.py; turning
fields into argparse flags is megatron/fault_tolerance/program/arguments.py.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from moe_ft.config.directories import check_directories
from moe_ft.config.fields import (
    checked_name,
    count,
    flag_of,
    one_of,
    parse_size,
    setting,
)
from moe_ft.config.precision import PrecisionConfig
from moe_ft.config.strategy import PartialConfig, SparseConfig, StrategyConfig
from moe_ft.errors import ConfigError
from moe_ft.faults import BACKGROUND_PHASES, ITERATION_PHASES, FaultKind, FaultSpec, parse_fault

# Each user's own, so that none can touch another's. Fixed at import: a process does not change its user.
DEFAULT_MEMORY_DIR = f"/dev/shm/moe_ft_{os.geteuid()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """Host memory: a job's own regions, and replicas at peers."""

    memory_dir: str = setting(
        DEFAULT_MEMORY_DIR,
        "directory on tmpfs for snapshots in host memory; default: /dev/shm/moe_ft_UID",
        metavar="DIR",
    )
    host_memory_limit: str | None = setting(
        None,
        "most host memory a node may give to snapshots and replicas, such as 512GiB",
        metavar="SIZE",
    )
    replication_factor: str = setting(
        "auto",
        "copies of every rank's state in the memory of other nodes; auto = 2 where the nodes allow "
        "it, else 1, and 0 on one node",
        metavar="N|auto",
    )
    job_id: str | None = setting(
        None,
        "name of the job, the same after a restart; default: SLURM_JOB_ID, or torchrun's --rdzv-id",
        metavar="NAME",
    )
    node_id: str | None = setting(
        None,
        "name of this node; default: the environment variable MOE_FT_NODE_ID, SLURMD_NODENAME or "
        "the host name",
        metavar="NAME",
    )

    @property
    def host_memory_limit_bytes(self) -> int | None:
        """The limit in bytes, None for no limit; raises ConfigError if it cannot be read."""
        return (
            None
            if self.host_memory_limit is None
            else parse_size("host_memory_limit", self.host_memory_limit)
        )

    @property
    def num_replicas(self) -> int | None:
        """The replication factor, None for automatic; raises ConfigError if it is neither."""
        is_auto = self.replication_factor == "auto"
        return None if is_auto else count("replication_factor", self.replication_factor, least=0)

    def resolve_job_id(self, environment: Mapping[str, str]) -> str:
        """Return the job's name.

        Raises:
            ConfigError: if nothing names the job, or the name cannot be a directory's.
        """
        from_torchrun = environment.get("TORCHELASTIC_RUN_ID", "none")
        names = {
            "--moe-ft-job-id": self.job_id,
            "SLURM_JOB_ID": environment.get("SLURM_JOB_ID"),
            "torchrun's --rdzv-id": None if from_torchrun == "none" else from_torchrun,
        }
        for source, name in names.items():
            if name:
                return checked_name("job_id", source, name)
        raise ConfigError(
            "--moe-ft-job-id is missing: a restarted job finds its memory by name, and neither "
            "SLURM_JOB_ID nor torchrun's --rdzv-id gives one. Add --moe-ft-job-id NAME."
        )

    def resolve_node_id(self, environment: Mapping[str, str], host: str) -> str:
        """Return this node's name; raises ConfigError if it cannot be a directory's."""
        names = {
            "--moe-ft-node-id": self.node_id,
            "MOE_FT_NODE_ID": environment.get("MOE_FT_NODE_ID"),
            "SLURMD_NODENAME": environment.get("SLURMD_NODENAME"),
        }
        for source, name in names.items():
            if name:
                return checked_name("node_id", source, name)
        return checked_name("node_id", "the host name", host)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a size or a count cannot be read."""
        _ = self.host_memory_limit_bytes, self.num_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """Storage: checkpoints that outlive all nodes."""

    persist_dir: str | None = setting(
        None, "directory or fsspec URL for checkpoints on storage", metavar="URL"
    )
    persist_interval: int = setting(
        10, "every how many complete snapshots one is written to storage; 0 = never", metavar="N"
    )
    keep: int = setting(2, "checkpoints to keep on storage", metavar="N")

    @property
    def persists(self) -> bool:
        """Whether anything goes to storage."""
        return self.persist_dir is not None and self.persist_interval > 0

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a count is out of range."""
        if self.persist_interval < 0:
            raise ConfigError(
                f"--moe-ft-persist-interval={self.persist_interval} must be at least 0. Give a number "
                "of snapshots, or 0 to write none to storage."
            )
        if self.keep < 1:
            raise ConfigError(
                f"--moe-ft-keep={self.keep} must be at least 1: the newest checkpoint is never "
                "deleted. Give the number of checkpoints that storage has room for."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """What a start recovers from."""

    recover_from: str = setting(
        "auto",
        "auto = the newest usable state of this job, or --load where that is newer; load = ignore it and use "
        "--load or start afresh; iter_N = that iteration. Restarts by the same launcher continue what this "
        "began",
        metavar="auto|load|iter_N",
    )
    on_missing: str = setting(
        "start",
        "when there is nothing to recover from: start (from --load, or afresh) or fail; state that is there "
        "and cannot be used always fails",
        choices=("start", "fail"),
    )

    @property
    def only_iteration(self) -> int | None:
        """The iteration that iter_N names, None for auto and load; raises ConfigError otherwise."""
        if self.recover_from in ("auto", "load"):
            return None
        number = self.recover_from.removeprefix("iter_")
        if number == self.recover_from or not number.isdecimal():
            raise ConfigError(
                f"--moe-ft-recover-from={self.recover_from} must be auto, load or iter_N. Write it like "
                "iter_120."
            )
        return int(number)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a value is not among those offered."""
        _ = self.only_iteration
        one_of("on_missing", self.on_missing, ("start", "fail"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservabilityConfig:
    """What a run writes about itself."""

    event_log: str | None = setting(
        None, "directory for one JSON-lines file of events per rank", metavar="DIR"
    )
    state_digest: bool = setting(
        False, "write a SHA-256 digest of the training state to the event log when training ends"
    )
    state_digest_interval: int = setting(
        0, "also write the digest every N iterations; 0 = only at the end", metavar="N"
    )

    router_log: bool = setting(
        False, "also write the tokens that every expert got from this rank in each iteration"
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
        if self.router_log and self.event_log is None:
            raise ConfigError(
                "--moe-ft-router-log writes to the event log, and there is none. "
                "Add --moe-ft-event-log DIR."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultConfig:
    """Faults that the run inflicts on itself, for testing."""

    inject_fault: tuple[str, ...] = setting(
        (),
        "inflict a fault: KIND:RANK@ITERATION[:PHASE], repeatable, each fires once per event log; "
        "KIND kill, exception, hang or lose-node; PHASE forward (default), backward, before-step, "
        "in-step, after-step, snapshot, replicate, persist, recovery or replay",
        metavar="KIND:RANK@ITERATION[:PHASE]",
    )
    fault_report_grace_s: float = setting(
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
    partial: PartialConfig = PartialConfig()
    sparse: SparseConfig = SparseConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    storage: StorageConfig = StorageConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    fault: FaultConfig = FaultConfig()

    def validate(self, world_size: int) -> None:
        """Check every part and the rules between parts.

        Args:
            world_size: number of ranks of the job.

        Raises:
            ConfigError: names the flag, its value, the rule and the remedy.
        """
        self._check_given()
        for part in fields(self):
            getattr(self, part.name).validate(world_size)
        check_directories(self.memory.memory_dir, self.storage.persist_dir)
        if self.fault.inject_fault and self.observability.event_log is None:
            raise ConfigError(
                f"--moe-ft-inject-fault {self.fault.inject_fault[0]} needs the event log, where a "
                "fault that fired is marked so that it fires once. Add --moe-ft-event-log DIR."
            )
        is_partial = self.strategy.strategy == "partial"
        if self.strategy.sharding == "adaptive" and (
            not is_partial or self.partial.selection != "sequential"
        ):
            raise ConfigError(
                "--moe-ft-sharding=adaptive needs --moe-ft-strategy partial and --moe-ft-selection "
                "sequential: only there it is known beforehand which rank has how many experts. Use "
                "equal."
            )
        if self.strategy.is_exact:
            self.precision.check_is_exact(self.strategy.strategy)
        if self.strategy.strategy == "sparse" and self.strategy.interval != "1":
            raise ConfigError(
                f"--moe-ft-interval={self.strategy.interval} must be 1 with --moe-ft-strategy sparse: a "
                "window needs a snapshot of every iteration. Leave it out; --moe-ft-window says how much "
                "each of them holds."
            )
        if not self.strategy.is_on:
            for fault in self.fault.faults:
                if fault.phase not in ITERATION_PHASES or fault.kind is FaultKind.LOSE_NODE:
                    raise ConfigError(
                        f"--moe-ft-inject-fault {fault} needs a strategy: with --moe-ft-strategy=none "
                        "nothing is checkpointed. Add --moe-ft-strategy dense."
                    )

    def _check_given(self) -> None:
        """Raise ConfigError if a flag was given without a value: most would look like left out."""
        for name, value, _ in self._settings():
            if isinstance(value, str) and not value.strip():
                raise ConfigError(
                    f"{flag_of(name)}={value} is empty: an unset variable? Give a value, or leave the flag "
                    "out."
                )

    def _settings(self, *parts: str) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, value and default of the settings of some parts, or of all."""
        for part in fields(self):
            values = getattr(self, part.name)
            for each in fields(values) if not parts or part.name in parts else ():
                yield each.name, getattr(values, each.name), each.default

    def warnings(self, train_iterations: int | None) -> list[str]:
        """Describe settings that change nothing.

        Args:
            train_iterations: at which training ends; None if that is not known.
        """
        strategy, users = self.strategy.strategy, {}
        if not self.strategy.is_on:
            users = dict.fromkeys(("precision", "memory", "storage", "recovery"), "a strategy")
        users |= {each: each for each in ("partial", "sparse") if each != strategy}
        found = [
            f"{flag_of(name)} changes nothing with --moe-ft-strategy={strategy}: it is for {user}"
            for part, user in users.items()
            for name, value, default in self._settings(part)
            if value != default
        ]
        for fault in self.fault.faults:
            num_iterations = fault.iteration + (fault.phase not in BACKGROUND_PHASES)
            if train_iterations is not None and num_iterations > train_iterations:
                found.append(
                    f"--moe-ft-inject-fault {fault} never happens: training ends at iteration "
                    f"{train_iterations}"
                )
        return found
