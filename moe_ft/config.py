"""Settings of moe_ft: one frozen dataclass per part, from which the --moe-ft-* flags are generated.

Field `event_log` becomes `--moe-ft-event-log`. Turning fields into argparse flags is
megatron/fault_tolerance/arguments.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from moe_ft.errors import ConfigError
from moe_ft.faults import ITERATION_PHASES, FaultKind, FaultSpec, parse_fault

FLAG_PREFIX = "--moe-ft-"
STRATEGIES = ("none", "dense", "partial")
DEFAULT_MEMORY_DIR = "/dev/shm/moe_ft"


def flag_of(field_name: str) -> str:
    """Return the command-line flag of a config field."""
    return FLAG_PREFIX + field_name.replace("_", "-")


def parse_size(text: str) -> int:
    """Return the bytes that a size such as 1.5GiB, 200GB or 4096 means.

    Raises:
        ConfigError: if it is no size.
    """
    match = re.fullmatch(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKMGT]i?B|B)?", text.strip())
    if match is None:
        raise ConfigError(
            f"--moe-ft-host-memory-limit={text} must be a size in bytes. Write it like 512GiB."
        )
    unit = match["unit"] or "B"
    power = "BKMGT".index(unit[0].upper())
    return int(float(match["number"]) * (1024 if "i" in unit else 1000) ** power)


def _count(field_name: str, text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{flag_of(field_name)}={text} must be a whole number, at least {least}, or auto. "
            "Give one of them."
        )
    return int(text)


def _one_of(field_name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{flag_of(field_name)}={value} must be one of {', '.join(choices)}. Name one of them."
        )


def _checked_name(field_name: str, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}", name):
        raise ConfigError(
            f"{flag_of(field_name)}={name} becomes a directory's name: it must consist of letters, "
            "digits, '.', '_' and '-', at most 101 of them, and not begin with '.' or '-'. Give "
            "another one."
        )
    return name


def _setting(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """What is checkpointed when, and with which Megatron."""

    strategy: str = _setting("none", "which state is checkpointed when", choices=STRATEGIES)
    interval: str = _setting(
        "1",
        "iterations between snapshots; auto = the smallest that keeps the overhead under "
        "--moe-ft-overhead-limit",
        metavar="N|auto",
    )
    sharding: str = _setting(
        "equal",
        "who saves state that data-parallel ranks hold alike: their first rank, all in equal parts, or "
        "(adaptive) the less the more selected experts a rank has; what the distributed optimizer has "
        "divided stays divided",
        choices=("none", "equal", "adaptive"),
    )
    overhead_limit: float = _setting(
        0.03, "fraction of the training time that checkpoints may cost with --moe-ft-interval auto"
    )
    on_error: str = _setting(
        "degrade",
        "when a background part fails: train on with the last good checkpoint, or raise",
        choices=("degrade", "raise"),
    )
    allow_untested_megatron: bool = _setting(
        False, "run with a megatron-core version that moe_ft was not tested with"
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is checkpointed."""
        return self.strategy != "none"

    @property
    def interval_iterations(self) -> int | None:
        """The interval, None for automatic; raises ConfigError if it is neither."""
        return None if self.interval == "auto" else _count("interval", self.interval, least=1)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a value is not among those offered."""
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("on_error", self.on_error, ("degrade", "raise"))
        _one_of("sharding", self.sharding, ("none", "equal", "adaptive"))
        _ = self.interval_iterations
        if not 0 < self.overhead_limit < 1:
            raise ConfigError(
                f"--moe-ft-overhead-limit={self.overhead_limit} must be a fraction between 0 and 1. "
                "Write 0.03 for three percent."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialConfig:
    """Partial experts checkpointing: which experts a snapshot holds."""

    k_snapshot: str = _setting(
        "auto",
        "experts per MoE layer in each snapshot; auto = as many as can be copied while forward and "
        "backward run",
        metavar="N|auto",
    )
    k_persist: int = _setting(
        1, "experts per MoE layer that each checkpoint writes to storage", metavar="N"
    )
    selection: str = _setting(
        "sequential",
        "which experts: one after the other, or those with the most unsaved tokens",
        choices=("sequential", "load-aware"),
    )
    partial_covers: str = _setting(
        "both",
        "what of an expert is saved only when it is selected: its weights, its optimizer moments, or "
        "both; the rest is in every snapshot",
        choices=("weights", "optimizer", "both"),
    )
    master_always_full: bool = _setting(
        False, "save the fp32 master weights of all experts in every snapshot"
    )
    dynamic_k: bool = _setting(
        False, "double k after a recovery if the next one might lose more than --moe-ft-plt-limit"
    )
    plt_limit: float = _setting(
        0.0375, "proportion of lost tokens that --moe-ft-dynamic-k keeps the run under"
    )

    @property
    def k_in_memory(self) -> int | None:
        """The experts in a snapshot, None for automatic; raises ConfigError if it is neither."""
        is_auto = self.k_snapshot == "auto"
        return None if is_auto else _count("k_snapshot", self.k_snapshot, least=1)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a value is not among those offered, or storage wants more than memory."""
        k_snapshot = self.k_in_memory
        _one_of("selection", self.selection, ("sequential", "load-aware"))
        _one_of("partial_covers", self.partial_covers, ("weights", "optimizer", "both"))
        if self.k_persist < 1:
            raise ConfigError(
                f"--moe-ft-k-persist={self.k_persist} must be at least 1: an expert that never goes to "
                "storage is lost with its node. Give a number of experts per MoE layer."
            )
        if k_snapshot is not None and self.k_persist > k_snapshot:
            raise ConfigError(
                f"--moe-ft-k-persist={self.k_persist} must be at most --moe-ft-k-snapshot={k_snapshot}: "
                "storage is fed from what snapshots hold. Lower the first or raise the second."
            )
        if not 0 < self.plt_limit < 1:
            raise ConfigError(
                f"--moe-ft-plt-limit={self.plt_limit} must be a fraction between 0 and 1. Write 0.0375 "
                "for 3.75 percent."
            )
        if self.partial_covers == "weights" and self.master_always_full:
            raise ConfigError(
                "--moe-ft-partial-covers=weights with --moe-ft-master-always-full leaves nothing that a "
                "snapshot could leave out. Drop one of them, or use --moe-ft-strategy dense."
            )

    def check_experts(self, num_experts: int) -> None:
        """Raise ConfigError if the model does not have so many experts.

        Args:
            num_experts: per MoE layer; 0 for a model without experts.
        """
        if num_experts == 0:
            raise ConfigError(
                "--moe-ft-strategy=partial needs a model with experts (--num-experts). Use dense."
            )
        for flag, k in (("snapshot", self.k_in_memory), ("persist", self.k_persist)):
            if k is not None and k > num_experts:
                raise ConfigError(
                    f"--moe-ft-k-{flag}={k} must be at most --num-experts={num_experts}. Lower it, or use "
                    "--moe-ft-strategy dense to save all experts each time."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """Host memory: a job's own regions, and replicas at peers."""

    memory_dir: str = _setting(
        DEFAULT_MEMORY_DIR, "directory on tmpfs for snapshots in host memory", metavar="DIR"
    )
    host_memory_limit: str | None = _setting(
        None,
        "most host memory a node may give to snapshots and replicas, such as 512GiB",
        metavar="SIZE",
    )
    replication_factor: str = _setting(
        "auto",
        "copies of every rank's state in the memory of other nodes; auto = 2 where the nodes allow "
        "it, else 1, and 0 on one node",
        metavar="N|auto",
    )
    job_id: str | None = _setting(
        None,
        "name of the job, the same after a restart; default: SLURM_JOB_ID, or torchrun's --rdzv-id",
        metavar="NAME",
    )
    node_id: str | None = _setting(
        None,
        "name of this node; default: the environment variable MOE_FT_NODE_ID, SLURMD_NODENAME or "
        "the host name",
        metavar="NAME",
    )

    @property
    def host_memory_limit_bytes(self) -> int | None:
        """The limit in bytes, None for no limit; raises ConfigError if it cannot be read."""
        return None if self.host_memory_limit is None else parse_size(self.host_memory_limit)

    @property
    def num_replicas(self) -> int | None:
        """The replication factor, None for automatic; raises ConfigError if it is neither."""
        is_auto = self.replication_factor == "auto"
        return None if is_auto else _count("replication_factor", self.replication_factor, least=0)

    def resolve_job_id(self, environment: Mapping[str, str]) -> str:
        """Return the job's name.

        Raises:
            ConfigError: if nothing names the job, or the name cannot be a directory's.
        """
        from_torchrun = environment.get("TORCHELASTIC_RUN_ID", "none")
        job_id = self.job_id or environment.get("SLURM_JOB_ID")
        job_id = job_id or (from_torchrun if from_torchrun != "none" else None)
        if job_id is None:
            raise ConfigError(
                "--moe-ft-job-id is missing: a restarted job finds its memory by name, and neither "
                "SLURM_JOB_ID nor torchrun's --rdzv-id gives one. Add --moe-ft-job-id NAME."
            )
        return _checked_name("job_id", job_id)

    def resolve_node_id(self, environment: Mapping[str, str], host: str) -> str:
        """Return this node's name; raises ConfigError if it cannot be a directory's."""
        node = self.node_id or environment.get("MOE_FT_NODE_ID")
        return _checked_name("node_id", node or environment.get("SLURMD_NODENAME") or host)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a size or a count cannot be read."""
        _ = self.host_memory_limit_bytes, self.num_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """Storage: checkpoints that outlive all nodes."""

    persist_dir: str | None = _setting(
        None, "directory or fsspec URL for checkpoints on storage", metavar="URL"
    )
    persist_interval: int = _setting(
        10, "every how many complete snapshots one is written to storage; 0 = never", metavar="N"
    )
    keep: int = _setting(2, "checkpoints to keep on storage", metavar="N")

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

    recover_from: str = _setting(
        "auto",
        "auto = the newest valid state of this job, load = ignore it and use --load or start afresh, "
        "iter_N = that iteration",
        metavar="auto|load|iter_N",
    )
    on_missing: str = _setting(
        "start",
        "when there is nothing to recover from: start (from --load, or afresh) or fail",
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
        _one_of("on_missing", self.on_missing, ("start", "fail"))


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

    router_log: bool = _setting(
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

    inject_fault: tuple[str, ...] = _setting(
        (),
        "inflict a fault: KIND:RANK@ITERATION[:PHASE], repeatable, each fires once per event log; "
        "KIND kill, exception, hang or lose-node; PHASE forward (default), backward, before-step, "
        "in-step, after-step, snapshot, replicate, persist or recovery",
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
    partial: PartialConfig = PartialConfig()
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
        for part in fields(self):
            getattr(self, part.name).validate(world_size)
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
        if not self.strategy.is_on:
            for fault in self.fault.faults:
                if fault.phase not in ITERATION_PHASES or fault.kind is FaultKind.LOSE_NODE:
                    raise ConfigError(
                        f"--moe-ft-inject-fault {fault} needs a strategy: with --moe-ft-strategy=none "
                        "nothing is checkpointed. Add --moe-ft-strategy dense."
                    )
