"""Settings of moe_ft: one frozen dataclass per part, from which the --moe-ft-* flags are generated.

Field `event_log` becomes `--moe-ft-event-log`; config/flags.py does that. The options of a strategy, and the
rules about it, are with the strategy: see moe_ft/strategies/registry.py.
"""

import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, override

from moe_ft.config.fields import (
    PEERS,
    REPAIR,
    STRATEGY,
    Bounds,
    ConfigPart,
    checked_name,
    flag_of,
    parse_size,
    setting,
)
from moe_ft.config.lost_nodes import ANSWERS, answer
from moe_ft.config.observability import FaultConfig, ObservabilityConfig
from moe_ft.config.rules import (
    OF_SETTINGS,
    check_directories,
    check_rules,
    default_memory_dir,
    unmet_needs,
)
from moe_ft.config.strategy import PrecisionConfig, StrategyConfig
from moe_ft.errors import ConfigError
from moe_ft.faults import BACKGROUND_PHASES, ITERATION_PHASES, FaultKind

# Each user's own, so that none can touch another's. Fixed at import: a process does not change its user.
DEFAULT_MEMORY_DIR = default_memory_dir()
# Run ids of torchrun that name no job: its default, and what it draws for each start with --standalone, or on
# one node without --rdzv-backend. It then ignores --rdzv-id.
_NO_NAME = re.compile("none|[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_FEWEST_OF_PARITY = 3  # nodes of a group: the XOR of one other state is a copy


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig(ConfigPart):
    """Host memory: a job's own regions, and replicas at peers."""

    TITLE: ClassVar[str] = "memory and peers"
    PAGE: ClassVar[str] = "host_memory.md"
    NEEDS: ClassVar[tuple[str, ...]] = (STRATEGY,)

    # Where a job is, and its names: scripts of a site give them to every job, with a strategy or without.
    memory_dir: str = setting(
        DEFAULT_MEMORY_DIR,
        "directory on tmpfs for snapshots in host memory",
        metavar="DIR",
        needs=(),
        unset="/dev/shm/moe_ft_UID",
    )
    host_memory_limit: str | None = setting(
        None,
        "most host memory a node may give to snapshots and replicas, such as 512GiB",
        metavar="SIZE",
        unset="no limit",
    )
    pin: str = setting(
        "require",
        "where CUDA cannot pin the memory of snapshots: require = the start fails; try = copies are slower",
        choices=("require", "try"),
        page="host_memory.md#pinned-memory",
    )
    replication_factor: str = setting(
        "auto",
        "copies of a rank's state at other nodes; auto = 2 where these allow it, else 1, and 0 on one node; "
        "0 = none",
        metavar="{N,auto}",
        bounds=Bounds(at_least=0),
        page="checkpoints.md",
    )
    replica_regions: str = setting(
        "1",
        "regions of a rank at each of several peers; 2 = as many nodes may be lost while a snapshot is sent",
        choices=("1", "2"),
        needs=(STRATEGY, PEERS),
    )
    replicas: str = setting(
        "copies",
        "what other nodes keep of a rank's state: copies, or parity:N = groups of at most N nodes keep the "
        "XOR of their states, which takes 1/(N-1) of a copy and covers one lost node of each group",
        metavar="{copies,parity:N}",
        needs=(STRATEGY, PEERS),
        page="parity.md",
    )
    failure_domain: str | None = setting(
        None,
        "where nodes fail together: a file with lines 'NODE DOMAIN', or slurm for its switches",
        metavar="{FILE,slurm}",
        needs=(STRATEGY, PEERS),
        page="failure_domains.md",
    )
    replicate: str = setting(
        "state",
        "what peers get of a new snapshot: its state, or the gradients of its iteration (4 bytes of a "
        "parameter instead of 12, or 2 where they are reduced in 16 bits), from which they make it bit for "
        "bit, and its state where they cannot",
        choices=("state", "gradients"),
        needs=(STRATEGY, PEERS),
        page="gradient_replicas.md",
    )
    breakpoints: bool = setting(
        False,
        "reserve memory for one more copy of the state, which a rank writes when the job is ended or another "
        "rank has failed: if all ranks can, nothing is run again or lost",
        page="breakpoints.md#breakpoints",
    )
    upstream_log: bool = setting(
        False,
        "keep what every rank sends to other pipeline stages since the newest complete window",
        page="local_recovery.md",
    )
    network_interface: str | None = setting(
        None,
        "network interface for replicas and state of other nodes, or one for each local rank, separated by "
        "commas",
        metavar="NAME,...",
        unset="the one towards MASTER_ADDR",
        page="networks.md",
    )
    streams: int = setting(
        1,
        "connections that share what two ranks exchange; more than 1 for networks that limit each",
        bounds=Bounds(at_least=1, at_most=8),
        remedy="Give a number of connections, or leave the flag out",
        needs=(STRATEGY, f"{PEERS}|layout=any|upstream_log"),  # or for what a recovery fetches
        metavar="N",
        page="networks.md#connections",
    )
    job_id: str | None = setting(
        None,
        "name of the job, the same after a restart, which finds its state by it",
        metavar="NAME",
        needs=(),
        unset="SLURM_JOB_ID, or torchrun's --rdzv-id",
        page="networks.md#names",
    )
    node_id: str | None = setting(
        None,
        "name of this node",
        metavar="NAME",
        needs=(),
        unset="MOE_FT_NODE_ID or SLURMD_NODENAME of the environment, or the host name",
        page="networks.md#names",
    )

    @property
    def host_memory_limit_bytes(self) -> int | None:
        """The limit in bytes, None for no limit; raises ConfigError if it cannot be read."""
        text = self.host_memory_limit
        return None if text is None else parse_size(flag_of("host_memory_limit"), text)

    @property
    def sends_gradients(self) -> bool:
        """True if peers make replicas of gradients."""
        return self.replicate == "gradients"

    @property
    def parity_nodes(self) -> int | None:
        """Most nodes of a group that keeps parity, None where peers keep copies.

        Raises:
            ConfigError: if it is neither of what the flag takes.
        """
        kind, _, number = self.replicas.partition(":")
        if self.replicas == "copies":
            return None
        if kind != "parity" or not number.isdecimal() or int(number) < _FEWEST_OF_PARITY:
            raise ConfigError(
                f"{flag_of('replicas')}={self.replicas} must be copies or parity:N, with N at least "
                f"{_FEWEST_OF_PARITY} nodes. Write it like parity:8."
            )
        return int(number)

    @property
    def num_replicas(self) -> int | None:
        """The replication factor, None for automatic; raises ConfigError if it is neither.

        Parity is sent, and lets a node be lost, as one replica does.
        """
        return 1 if self.parity_nodes is not None else self.number_or_auto("replication_factor")

    def job_names(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the names that a job has been given, by what has given them; the first counts."""
        run_id = environment.get("TORCHELASTIC_RUN_ID") or "none"
        names = {
            "--moe-ft-job-id": self.job_id,
            "SLURM_JOB_ID": environment.get("SLURM_JOB_ID"),
            "torchrun's --rdzv-id": None if _NO_NAME.fullmatch(run_id) else run_id,
        }
        return {source: name for source, name in names.items() if name}

    def resolve_job_id(self, environment: Mapping[str, str]) -> str:
        """Return the job's name.

        Raises:
            ConfigError: if nothing names the job, or the name cannot be a directory's.
        """
        for source, name in self.job_names(environment).items():
            return checked_name("job_id", source, name)
        run_id = environment.get("TORCHELASTIC_RUN_ID") or "none"
        drawn = "" if run_id == "none" else f" ({run_id} is drawn at random)"
        raise ConfigError(
            "--moe-ft-job-id is missing: a restarted job finds its memory by name, and neither "
            f"SLURM_JOB_ID nor torchrun's --rdzv-id gives one{drawn}. Add --moe-ft-job-id NAME."
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

    @override
    def check(self, world_size: int) -> None:
        _ = self.host_memory_limit_bytes, self.parity_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig(ConfigPart):
    """Storage: checkpoints that outlive all nodes."""

    TITLE: ClassVar[str] = "storage"
    PAGE: ClassVar[str] = "storage.md"
    NEEDS: ClassVar[tuple[str, ...]] = ("persist_dir",)

    persist_dir: str | None = setting(
        None, "directory or fsspec URL for checkpoints on storage", metavar="URL", needs=(STRATEGY,)
    )
    persist_interval: int = setting(
        10,
        "write every N-th complete snapshot or window to storage; 0 = only the last state",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of snapshots, or 0 to write none before the end",
    )
    persist_dense_interval: int = setting(
        0,
        "also write the whole state of one iteration to storage, every so many iterations, whatever the "
        "strategy; 0 = only at the end",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations, or leave the flag out",
        page="breakpoints.md#whole-states",
    )
    keep: int = setting(
        2,
        "checkpoints to keep on storage; with --moe-ft-persist-dense-interval also the newest whole state",
        metavar="N",
        bounds=Bounds(at_least=1),
        reason="the newest checkpoint is never deleted",
        remedy="Give the number of checkpoints that storage has room for",
    )

    @property
    def persists(self) -> bool:
        """True if anything goes to storage."""
        return self.persist_dir is not None  # at least the last state

    @property
    def persists_dense(self) -> bool:
        """True if whole states go to storage while training runs."""
        return self.persist_dense_interval > 0

    @property
    def keeps_whole(self) -> bool:
        """True if the newest whole state stays on storage besides the newest checkpoints."""
        return self.persists_dense and self.persist_interval > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig(ConfigPart):
    """Recovery: the state that a start begins with."""

    TITLE: ClassVar[str] = "recovery and repair"
    PAGE: ClassVar[str] = "recovery.md"
    NEEDS: ClassVar[tuple[str, ...]] = (STRATEGY,)

    recover_from: str = setting(
        "auto",
        "auto = the newest usable state of this job, or --load where that is newer; load = ignore it and use "
        "--load or start afresh; iter_N = that iteration. Restarts by the same launcher continue what this "
        "began",
        metavar="{auto,load,iter_N}",
    )
    recovery: str = setting(
        "auto",
        "pipeline stages that run iterations again after a failure: auto = only stages that have lost their "
        "state, where --moe-ft-upstream-log and --moe-ft-breakpoints have kept enough, else all; local = the "
        "same, but a start where that can never happen is refused; global = all",
        choices=("auto", "local", "global"),
        needs=("upstream_log", "breakpoints"),
        page="local_recovery.md",
    )
    repair: str = setting(
        "off",
        "auto = replace a rank that dies and continue in the processes of the others; needs "
        "`python -m moe_ft launch`; try = the same, or a line on why not; off = all ranks restart",
        choices=("auto", "try", "off"),
        page="repair.md",
    )
    repair_heartbeat_s: float = setting(
        30.0,
        "with --moe-ft-repair auto: seconds without a sign of life after which a rank is killed and "
        "replaced; it gives none while its process is stopped, or while something holds its interpreter",
        metavar="SECONDS",
        bounds=Bounds(at_least=1, at_most=86400),
        reason="a healthy rank on a busy machine may be silent for a moment",
        remedy="Give a number of seconds",
        needs=(REPAIR,),
    )
    hang_limit: str = setting(
        "auto",
        "seconds without progress of a rank's training thread, from the setup to the exit, after which the "
        "rank ends if it waits for no other one; auto = ten times the longest so far in the same section of "
        "the loop (an iteration, an evaluation, a checkpoint, what is between them), at least a minute or, "
        "outside of iterations and evaluations, five",
        metavar="{auto,SECONDS}",
        bounds=Bounds(at_least=1),
        needs=(),
        page="hangs.md",
    )
    without_spare: str = setting(
        "auto",
        "under `keep --nodes`, when a node is lost and no spare is left: crowd = a node that trains runs its "
        "ranks, too; share = as crowd, and peers run their micro-batches; shrink = all begin again on fewer "
        "nodes; wait = until a node comes; auto = shrink with --moe-ft-elastic, else crowd if memory allows "
        "or end",
        choices=ANSWERS,
        needs=(REPAIR,),
        page="agent.md#a-lost-node",
    )
    late_gradients: str = setting(
        "off",
        "gradients of weights wait until a rank has nothing else to do, so that those of inputs come "
        "sooner: off, shared = while peers share micro-batches, always; takes memory for activations",
        choices=("off", "shared", "always"),
        page="degraded.md#gradients-of-weights-that-wait",
    )
    layout: str = setting(
        "same",
        "same = state of another number of ranks, or of other parallel sizes, is refused; any = it is "
        "divided again among the ranks of this start",
        choices=("same", "any"),
        page="layouts.md",
    )
    data: str = setting(
        "same",
        "same = state that has seen data or a tokenizer of other content is refused; any = training goes on "
        "with those of this start",
        choices=("same", "any"),
        page="flags.md#data-and-tokenizers",
    )
    capacity_boost: float = setting(
        0.0,
        "by how much of its capacity (--moe-expert-capacity-factor) an expert may exceed it after a recovery "
        "that lost some of its tokens, until as many are made up, or for 500 iterations; 0 = never",
        metavar="FRACTION",
        bounds=Bounds(at_least=0, at_most=1),
        reason="it is a fraction of the capacity",
        remedy="Write 0.1 for ten percent",
        page="lost_tokens.md#more-than-the-capacity",
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

    @property
    def hang_limit_s(self) -> int | None:
        """The limit of every section in seconds, None for automatic; raises ConfigError if it is neither."""
        return self.number_or_auto("hang_limit")

    @override
    def check(self, world_size: int) -> None:
        _ = self.only_iteration


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig(ConfigPart):
    """Slots of experts, whose state lies on all ranks; any number of ranks."""

    TITLE: ClassVar[str] = "any number of nodes, replicas of experts"
    PAGE: ClassVar[str] = "elastic.md"
    elastic: bool = setting(
        False,
        "train with the ranks that a start has, fewer or more than before: data parallelism changes, samples "
        "of an iteration do not, and ranks that are left over wait",
        needs=(STRATEGY, "layout=any"),
    )
    expert_slots: int = setting(
        0,
        "slots of each rank in an MoE layer: an expert may have several, and they move to where tokens go; "
        "0 = each expert where Megatron puts it",
        metavar="C",
        bounds=Bounds(at_least=0),
        remedy="Give the slots of a rank, or leave the flag out",
        page="expert_slots.md",
    )
    rebalance_interval: int = setting(
        0,
        "choose the experts of the slots again every N iterations, by their tokens; 0 = never",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations, or leave the flag out",
        needs=("expert_slots",),
        page="expert_slots.md",
    )
    min_replicas: int = setting(
        1,
        "slots that every expert of a layer has at least",
        metavar="F",
        bounds=Bounds(at_least=1),
        remedy="Give a number of slots, or leave the flag out",
        needs=("expert_slots",),
        page="expert_slots.md",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksConfig(ConfigPart):
    """Checks of what ranks compute and hold, and batches that are left out."""

    TITLE: ClassVar[str] = "silent corruption and bad batches"
    PAGE: ClassVar[str] = "corruption.md"

    check_iterations: int = setting(
        0,
        "every N iterations another rank repeats each rank's forward and backward pass, and the results must "
        "be equal bit for bit before the optimizer steps; 0 = never",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations: one in N takes a second forward and backward pass",
    )
    check_weights: int = setting(
        0,
        "every N iterations compare weights that ranks must have in common, and see that nothing has changed "
        "weights and moments since the last step; 0 = never",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations",
    )
    skip_bad_batches: int = setting(
        0,
        "leave out up to N batches in a run, each of which has made the same rank fail twice with the same "
        "exception; 0 = none",
        metavar="N",
        needs=(REPAIR,),
        bounds=Bounds(at_least=0),
        remedy="Give the most batches that the run may leave out",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeFtConfig:
    """All settings of moe_ft.

    Attributes:
        options: of the strategies, by name of the strategy; of one that is missing, all have their defaults.
    """

    strategy: StrategyConfig = StrategyConfig()
    options: Mapping[str, ConfigPart] = field(default_factory=dict)
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    storage: StorageConfig = StorageConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    elastic: ElasticConfig = ElasticConfig()
    checks: ChecksConfig = ChecksConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    fault: FaultConfig = FaultConfig()

    @property
    def answer_to_lost_nodes(self) -> str:
        """Value of --moe-ft-without-spare; `auto` is one of the others."""
        return answer(self.recovery.without_spare, is_elastic=self.elastic.elastic)

    @property
    def parts(self) -> Mapping[str, ConfigPart]:
        """All parts by name, the options of the strategies included."""
        parts: dict[str, ConfigPart] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            parts |= value if each.name == "options" else {each.name: value}
        return parts

    def validate(self, world_size: int, *, allows_void: bool = False) -> None:
        """Check every part and the rules between parts, but for those of a strategy (`registry.check`).

        Args:
            allows_void: whether settings may change nothing: a plan may still lack what they need.

        Raises:
            ConfigError: names the flag, its value, the rule and the remedy.
        """
        self._check_given()
        # Another start of an elastic job may have more ranks, also those that a fault names.
        most_ranks = sys.maxsize if self.elastic.elastic else world_size
        for part in self.parts.values():
            part.validate(most_ranks if part is self.fault else world_size)
        check_directories(self.memory.memory_dir, self.storage.persist_dir)
        for problem in () if allows_void else unmet_needs(self.parts, self.options):
            raise ConfigError(problem)
        check_rules(OF_SETTINGS, self)
        if not self.strategy.is_on:
            for fault in self.fault.faults:
                if fault.phase not in ITERATION_PHASES or fault.kind is FaultKind.LOSE_NODE:
                    raise ConfigError(
                        f"--moe-ft-inject-fault {fault} needs a strategy: with --moe-ft-strategy=none "
                        "nothing is checkpointed. Name one with --moe-ft-strategy."
                    )

    def _check_given(self) -> None:
        """Raise ConfigError if a flag was given without a value: most would look like left out."""
        for part in self.parts.values():
            for each in fields(part):
                value = getattr(part, each.name)
                if isinstance(value, str) and not value.strip():
                    raise ConfigError(
                        f"{flag_of(each.name)}={value} is empty: an unset variable? Give a value, or leave "
                        "the flag out."
                    )

    def warnings(self, train_iterations: int | None, given: Collection[str] = ()) -> list[str]:
        """Describe settings that change nothing, and that `validate` does not refuse.

        Args:
            train_iterations: at which training ends; None if that is not known.
            given: names of settings that the user has given, perhaps with their defaults.
        """
        found = [*unmet_needs(self.parts, self.options, given)]
        for fault in self.fault.faults:
            num_iterations = fault.iteration + (fault.phase not in BACKGROUND_PHASES)
            if train_iterations is not None and num_iterations > train_iterations:
                found.append(
                    f"--moe-ft-inject-fault {fault} never happens: training ends at iteration "
                    f"{train_iterations}"
                )
        return found
