"""Costs of a strategy for a planned job, from the sizes of its snapshots and the links of a rank.

A strategy gives the sizes (`Saved`). The values that result are costs.py; planned_job.py has the job.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs, RecoveryCosts, RecoveryKind, StoredStates
from moe_ft.planning.host_memory import MemoryShare
from moe_ft.planning.interval import CheckpointCost, best_interval, smallest_interval
from moe_ft.planning.machine import Machine
from moe_ft.planning.planned_job import PlannedJob


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Bytes of the rank with the most, as a strategy saves them.

    Attributes:
        snapshots: ``[snapshot of a window]`` that it copies.
        interval: iterations between windows of one snapshot.
        persisted_bytes: that it writes to storage of one window.
        read_bytes: that it reads in a recovery.
        whole_bytes: of its state at FULL.
        rounds: snapshots, and checkpoints on storage, until each has held every unit; 1 each where all do.
        longest_window: snapshots that a window may have.
        sent_share: bytes that a peer gets for each byte of a snapshot.
    """

    snapshots: tuple[float, ...]
    interval: int
    persisted_bytes: float
    read_bytes: float
    whole_bytes: float
    share: MemoryShare
    rounds: tuple[float, float] = (1.0, 1.0)
    longest_window: int = 1
    sent_share: float = 1.0


def known_machine(job: PlannedJob) -> Machine | None:
    """Return the links of a rank; None if the time of an iteration or the bandwidth is not known."""
    measured = job.measured
    if measured.bandwidth is None or measured.iteration_s is None:
        return None
    unknown = measured.network_bandwidth is None
    return Machine(
        iteration_s=measured.iteration_s,
        hidden_s=measured.hidden_s,
        bandwidth=measured.bandwidth,
        network_bandwidth=math.inf if unknown else measured.network_bandwidth or 0.0,
        replication_factor=job.replication_factor,
    )


def needed_machine(job: PlannedJob) -> Machine:
    """Return the links of a rank.

    Raises:
        ConfigError: if a value is missing that costs follow from.
    """
    machine, measured = known_machine(job), job.measured
    if machine is None:
        if measured.mtbf_s is not None:
            raise ConfigError(
                f"--mtbf-s={measured.mtbf_s} needs --iteration-s and --bandwidth: the cost of a failure "
                "follows from them. Give them, or leave --mtbf-s out."
            )
        raise ConfigError(
            "--iteration-s or --bandwidth not given: what checkpoints cost follows from them. Give them, or "
            "--cluster NAME, or --from-run DIR."
        )
    if job.replication_factor and measured.network_bandwidth is None:
        asked = job.config.memory.replication_factor
        raise ConfigError(
            f"--moe-ft-replication-factor={asked}, that is {job.replication_factor}, needs "
            "--network-bandwidth: every snapshot goes to as many peers. Give it before the --, or "
            "--moe-ft-replication-factor 0."
        )
    if job.reads_storage and measured.storage_bandwidth is None:
        raise ConfigError(
            "--moe-ft-replication-factor=0 needs --storage-bandwidth: the state of a lost node comes from "
            "storage. Give it before the --, or keep replicas."
        )
    return machine


def costs_of(job: PlannedJob, strategy: str, saved: Saved) -> Costs:
    """Return what a strategy costs a job.

    Snapshots are copied while the next iteration runs: a state is there one iteration after its last
    snapshot at the earliest. Without replicas the state of a lost node comes from storage, which takes one
    checkpoint at a time; without both, and on one node, states survive their processes alone.

    Raises:
        ConfigError: as `needed_machine`.
    """
    machine = replace(needed_machine(job), sent_share=saved.sent_share)
    window = len(saved.snapshots)
    iteration_s = machine.iteration_s
    period = saved.interval if window == 1 else window + machine.lag_iterations(saved.snapshots)
    if window == 1:
        period = max(period, machine.lag_iterations(saved.snapshots) + 1)
    every, write_s = _writes(job, saved, period * iteration_s)
    interval, lag = float(period), 1.0 + machine.lag_iterations(saved.snapshots)
    rounds, stored = saved.rounds[0], None
    if job.reads_storage:
        interval, lag, rounds = period * every, 1.0 + write_s / iteration_s, saved.rounds[1]
    elif math.isfinite(every):
        stored = StoredStates(
            interval=period * every,
            lag=1.0 + write_s / iteration_s,
            state_s=saved.read_bytes
            / min(machine.bandwidth, job.measured.storage_bandwidth or math.inf),
        )
    whole = job.config.storage.persist_dense_interval or math.inf
    stall_s = sum(machine.stalls_s(saved.snapshots)) / period
    copied = sum(saved.snapshots) / period
    lost = interval * (rounds - 1) / 2
    share = saved.share.total_bytes(
        persists=job.persists,
        replication_factor=job.replication_factor,
        replica_regions=job.replica_regions,
    )
    return Costs(
        strategy=strategy,
        iteration_s=iteration_s,
        blocked_s=stall_s + machine.stalls_s([saved.whole_bytes])[0] / whole,
        interval=interval,
        window=window,
        lag=lag,
        snapshot_bytes=copied,
        peer_bytes=job.replication_factor * copied * saved.sent_share,
        storage_bytes=saved.persisted_bytes / (period * every) + saved.whole_bytes / whole,
        host_bytes=share + job.boundary_bytes(saved.longest_window),
        lost_token_share=lost / (interval / 2 + window - 1 + lag),
        recoveries=_recoveries(job, machine, saved),
        nodes_lost=None
        if job.reads_storage
        else saved.share.num_covered(job.replication_factor, job.replica_regions),
        stored=stored,
    )


def _writes(job: PlannedJob, saved: Saved, period_s: float) -> tuple[float, float]:
    """Return the periods from one checkpoint on storage to the next, and the seconds that one is written."""
    if not job.persists or not job.config.storage.persist_interval:
        return math.inf, 0.0
    bandwidth = job.measured.storage_bandwidth or math.inf
    least = smallest_interval(
        saved.persisted_bytes, bandwidth_bytes_per_s=bandwidth, iteration_s=period_s
    )
    return max(job.persist_interval, least), saved.persisted_bytes / bandwidth


def _recoveries(
    job: PlannedJob, machine: Machine, saved: Saved
) -> Mapping[RecoveryKind, RecoveryCosts]:
    """Return what each kind of recovery takes that the settings allow and whose time is known."""
    measured, window = job.measured, len(saved.snapshots)
    bandwidth = machine.reading_bandwidth
    if job.reads_storage:
        bandwidth = min(bandwidth, measured.storage_bandwidth or math.inf)
    # With parity, survivors first read as much as is lost, to make it again.
    is_made = job.config.memory.parity_nodes is not None and not job.reads_storage
    rest = {
        "state_s": (1 + is_made) * saved.read_bytes / bandwidth,
        "replay_s": (window - 1) * machine.iteration_s,
    }
    found = {RecoveryKind.RESTART: RecoveryCosts(processes_s=measured.restart_s, **rest)}
    if measured.keep_s is not None:
        found[RecoveryKind.KEEP] = RecoveryCosts(processes_s=measured.keep_s, **rest)
    if job.config.recovery.repair == "auto" and measured.repair_s is not None:
        repair = RecoveryCosts(processes_s=measured.repair_s, **rest)
        found[RecoveryKind.REPAIR] = repair
        if (traffic := job.traffic) is not None:
            # Alone, a stage waits for no other: the bubble of the pipeline is left out (MoEvement, 3.4).
            bubble = (traffic.num_stages - 1) / traffic.num_chunks
            alone = traffic.num_microbatches / (traffic.num_microbatches + bubble)
            found[RecoveryKind.LOCAL] = RecoveryCosts(
                processes_s=measured.repair_s,
                state_s=rest["state_s"],
                replay_s=rest["replay_s"] * alone,
                redo_share=alone,
            )
    return found


def stock_costs(job: PlannedJob, interval: int | None = None) -> Costs:
    """Return what Megatron's own `--save` costs a job, with restarts from storage.

    Training waits until all is written, and nothing is copied meanwhile.

    Args:
        interval: iterations between checkpoints; None for the best.
    """
    measured, num_bytes = job.measured, job.heaviest.full_bytes
    assert measured.iteration_s is not None and measured.storage_bandwidth is not None
    write_s = num_bytes / measured.storage_bandwidth
    if interval is None:
        cost = CheckpointCost(
            iteration_s=measured.iteration_s, overhead_s=write_s, completion_s=write_s
        )
        interval = best_interval(cost, measured.mtbf_s or math.inf)
    restart = RecoveryCosts(processes_s=measured.restart_s, state_s=write_s)
    return Costs(
        strategy="none",
        iteration_s=measured.iteration_s,
        blocked_s=write_s / interval,
        interval=interval,
        window=1,
        lag=0.0,
        snapshot_bytes=0.0,
        peer_bytes=0.0,
        storage_bytes=num_bytes / interval,
        host_bytes=0.0,
        lost_token_share=0.0,
        recoveries={RecoveryKind.RESTART: restart},
    )


PERSIST_DIR = "PERSIST_DIR"
_STORAGE_EVERY_S = 1800.0  # where replicas are what recoveries begin with


def places(job: PlannedJob) -> Mapping[str, bool]:
    """Return where recoveries may find the state of a job, and whether that is memory and not storage."""
    if job.num_nodes == 1:
        return {"in memory": True}
    found = {"at peers": True} if job.replication_factor else {}
    return found | ({"on storage": False} if job.measured.storage_bandwidth is not None else {})


def interval_flags(
    job: PlannedJob, snapshot_bytes: float, persisted_bytes: float, *, at_peers: bool
) -> list[str]:
    """Return the flags with which snapshots, peers and storage cost a job the least.

    Args:
        snapshot_bytes: that the rank with the most copies.
        persisted_bytes: that it writes to storage.
        at_peers: whether replicas are what recoveries begin with, and not storage.
    """
    machine, measured = needed_machine(job), job.measured
    copy_s = snapshot_bytes / machine.bandwidth
    write_s = persisted_bytes / (measured.storage_bandwidth or math.inf)
    sent_s = snapshot_bytes / machine.replication_bandwidth if at_peers else write_s
    cost = CheckpointCost(
        iteration_s=machine.iteration_s,
        overhead_s=max(0.0, copy_s - machine.hidden_s),
        completion_s=copy_s + sent_s,
    )
    interval = best_interval(cost, measured.mtbf_s or math.inf)
    return [
        f"--moe-ft-interval={interval}",
        *storage_flags(job, interval, write_s, at_peers=at_peers),
    ]


def storage_flags(job: PlannedJob, period: float, write_s: float, *, at_peers: bool) -> list[str]:
    """Return the flags of replicas, storage and repair; a state comes every ``period`` iterations."""
    measured = job.measured
    words = [f"--moe-ft-replication-factor={job.replication_factor if at_peers else 0}"]
    if job.config.memory.parity_nodes is not None:
        words = [] if at_peers else [*words, "--moe-ft-replicas=copies"]
    if measured.repair_s is not None:
        words.append("--moe-ft-repair=auto")
    if measured.storage_bandwidth is None and not job.persists:
        return words
    period_s = period * (measured.iteration_s or math.inf)
    every = math.ceil(max(write_s, _STORAGE_EVERY_S if at_peers else 0.0) / period_s)
    directory = job.config.storage.persist_dir or PERSIST_DIR
    return [
        *words,
        f"--moe-ft-persist-dir={directory}",
        f"--moe-ft-persist-interval={max(1, every)}",
    ]
