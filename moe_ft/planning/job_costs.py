"""Costs of a strategy for a planned job, from the sizes of its snapshots and the links of a rank.

A strategy gives the sizes (`Sizes`). `SnapshotLinks` say how long training waits for them, and how late they
arrive. The values that result are costs.py; planned_job.py has the job.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs, RecoveryCosts, RecoveryKind, StoredStates
from moe_ft.planning.host_memory import MemoryShare
from moe_ft.planning.interval import CheckpointCost, best_interval, smallest_interval
from moe_ft.planning.planned_job import PlannedJob


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of the rank with the most, as a strategy saves them.

    Attributes:
        snapshots: ``[snapshot of a window]`` that it copies.
        interval: iterations between windows of one snapshot.
        persisted_bytes: that it writes to storage of one window.
        whole_bytes: of its state at FULL.
        read_bytes: that it reads in a recovery.
        rounds: snapshots, and checkpoints on storage, until each has held every unit; 1 each where all do.
        sent_share: bytes that a peer gets for each byte of a snapshot.
    """

    snapshots: tuple[float, ...]
    interval: int
    persisted_bytes: float
    whole_bytes: float
    read_bytes: float
    rounds: tuple[float, float] = (1.0, 1.0)
    sent_share: float = 1.0

    @property
    def window(self) -> int:
        """Snapshots of a window."""
        return len(self.snapshots)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotLinks:
    """Links that a snapshot goes through, for each rank.

    Attributes:
        hidden_s: its forward and backward pass, during which state can be copied.
        bandwidth: from device to host, bytes per second.
        network_bandwidth: to other nodes, bytes per second; not used without replicas.
        sent_share: bytes that a peer gets for each byte of a snapshot: less where it gets gradients.
    """

    iteration_s: float
    hidden_s: float
    bandwidth: float
    network_bandwidth: float = math.inf
    replication_factor: int = 0
    sent_share: float = 1.0

    @property
    def budget_bytes(self) -> float:
        """The largest snapshot that costs no time.

        Source: MoEvement, Algorithm 1, line 14, which leaves replication out.
        """
        return min(self.hidden_s * self.bandwidth, self.iteration_s * self.replication_bandwidth)

    @property
    def replication_bandwidth(self) -> float:
        """Bytes of a snapshot that all peers get in a second, infinite without replicas."""
        if not self.replication_factor:
            return math.inf
        return self.network_bandwidth / self.replication_factor / self.sent_share

    @property
    def reading_bandwidth(self) -> float:
        """Bytes per second of the slower way back: from own memory to the device, or from a peer."""
        return min(self.bandwidth, self.network_bandwidth if self.replication_factor else math.inf)

    def stalls_s(self, snapshots: Sequence[float]) -> list[float]:
        """Return ``[snapshot]`` the time that the optimizer step waits for its copy."""
        return [max(0.0, size / self.bandwidth - self.hidden_s) for size in snapshots]

    def lag_iterations(self, snapshots: Sequence[float]) -> int:
        """Return the iterations from a window's last snapshot until its peers have all of it.

        The copy of the last snapshot does not count: it is done by the next optimizer step. Snapshots are
        sent one after the other, each while the next is copied. The time of a commit is left out. No window
        begins before the previous one is complete.
        """
        start = sent = fence = 0.0
        for size, stall_s in zip(snapshots, self.stalls_s(snapshots), strict=True):
            sent = max(sent, start + size / self.bandwidth) + size / self.replication_bandwidth
            fence = start + self.hidden_s + stall_s
            start += self.iteration_s + stall_s
        return max(0, math.ceil((sent - fence) / self.iteration_s - 1e-9))

    def overhead(self, snapshots: Sequence[float]) -> float:
        """Return the fraction by which windows, one after the other, lengthen training."""
        num_iterations = len(snapshots) + self.lag_iterations(snapshots)
        return sum(self.stalls_s(snapshots)) / (num_iterations * self.iteration_s)


def known_links(job: PlannedJob) -> SnapshotLinks | None:
    """Return the links of a rank; None if the time of an iteration or the bandwidth is not known."""
    measured = job.measured
    if measured.bandwidth is None or measured.iteration_s is None:
        return None
    unknown = measured.network_bandwidth is None
    return SnapshotLinks(
        iteration_s=measured.iteration_s,
        hidden_s=measured.hidden_s,
        bandwidth=measured.bandwidth,
        network_bandwidth=math.inf if unknown else measured.network_bandwidth or 0.0,
        replication_factor=job.replication_factor,
    )


def missing_links(job: PlannedJob) -> str:
    """Return which value is missing that costs follow from, with the remedy; empty if none is."""
    measured = job.measured
    if known_links(job) is None:
        if measured.mtbf_s is not None:
            return (
                f"--mtbf-s={measured.mtbf_s} needs --iteration-s and --bandwidth: the cost of a failure "
                "follows from them. Give them, or leave --mtbf-s out."
            )
        return (
            "--iteration-s or --bandwidth not given: what checkpoints cost follows from them. Give them, or "
            "--cluster NAME, or --from-run DIR."
        )
    if job.replication_factor and measured.network_bandwidth is None:
        asked = job.config.memory.replication_factor
        return (
            f"--moe-ft-replication-factor={asked}, that is {job.replication_factor}, needs "
            "--network-bandwidth: every snapshot goes to as many peers. Give it before the --, or "
            "--moe-ft-replication-factor 0."
        )
    if job.reads_storage and measured.storage_bandwidth is None:
        return (
            "--moe-ft-replication-factor=0 needs --storage-bandwidth: the state of a lost node comes from "
            "storage. Give it before the --, or keep replicas."
        )
    return ""


def needed_links(job: PlannedJob) -> SnapshotLinks:
    """Return the links of a rank; raises ConfigError with `missing_links`."""
    links = known_links(job)
    if links is None or missing_links(job):
        raise ConfigError(missing_links(job))
    return links


def costs_of(
    job: PlannedJob, strategy: str, sizes: Sizes, share: MemoryShare, host_bytes: float
) -> Costs:
    """Return what a strategy costs a job.

    Snapshots are copied while the next iteration runs: a state is there one iteration after its last
    snapshot at the earliest. Without replicas the state of a lost node comes from storage, which takes one
    checkpoint at a time; without both, and on one node, states survive their processes alone.

    Args:
        share: of the host memory, of the rank with the most.
        host_bytes: all that this rank takes of it, its peers' replicas included.

    Raises:
        ConfigError: as `needed_links`.
    """
    links, snapshots, window = needed_links(job), sizes.snapshots, sizes.window
    links = replace(links, sent_share=sizes.sent_share)
    iteration_s, late = links.iteration_s, links.lag_iterations(snapshots)
    period = max(sizes.interval, late + 1) if window == 1 else window + late
    every, write_s = _writes(job, sizes, period * iteration_s)
    interval, lag, rounds = float(period), 1.0 + late, sizes.rounds[0]
    on_storage = StoredStates(
        interval=period * every,
        lag=1.0 + write_s / iteration_s,
        state_s=sizes.read_bytes / min(links.bandwidth, job.measured.storage_bandwidth or math.inf),
    )
    if job.reads_storage:
        interval, lag, rounds = on_storage.interval, on_storage.lag, sizes.rounds[1]
    whole = job.config.storage.persist_dense_interval or math.inf
    copied = sum(snapshots) / period
    lost = interval * (rounds - 1) / 2
    return Costs(
        strategy=strategy,
        iteration_s=iteration_s,
        blocked_s=sum(links.stalls_s(snapshots)) / period
        + links.stalls_s([sizes.whole_bytes])[0] / whole,
        interval=interval,
        window=window,
        lag=lag,
        snapshot_bytes=copied,
        peer_bytes=job.replication_factor * copied * sizes.sent_share,
        storage_bytes=sizes.persisted_bytes / (period * every) + sizes.whole_bytes / whole,
        host_bytes=host_bytes,
        lost_token_share=lost / (interval / 2 + window - 1 + lag),
        recoveries=_recoveries(job, links, sizes),
        nodes_lost=None
        if job.reads_storage
        else share.num_covered(job.replication_factor, job.replica_regions),
        stored=None if job.reads_storage or math.isinf(every) else on_storage,
    )


def _writes(job: PlannedJob, sizes: Sizes, period_s: float) -> tuple[float, float]:
    """Return the periods from one checkpoint on storage to the next, and the seconds that one is written."""
    if not job.persists or not job.config.storage.persist_interval:
        return math.inf, 0.0
    bandwidth = job.measured.storage_bandwidth or math.inf
    least = smallest_interval(
        sizes.persisted_bytes, bandwidth_bytes_per_s=bandwidth, iteration_s=period_s
    )
    return max(job.persist_interval, least), sizes.persisted_bytes / bandwidth


def _recoveries(
    job: PlannedJob, links: SnapshotLinks, sizes: Sizes
) -> Mapping[RecoveryKind, RecoveryCosts]:
    """Return what each kind of recovery takes that the settings allow and whose time is known."""
    measured, window = job.measured, sizes.window
    bandwidth = links.reading_bandwidth
    if job.reads_storage:
        bandwidth = min(bandwidth, measured.storage_bandwidth or math.inf)
    # With parity, survivors first read as much as is lost, to make it again.
    is_made = job.config.memory.parity_nodes is not None and not job.reads_storage
    rest = {
        "state_s": (1 + is_made) * sizes.read_bytes / bandwidth,
        "replay_s": (window - 1) * links.iteration_s,
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


def interval_choices(
    job: PlannedJob, snapshot_bytes: float, persisted_bytes: float, own: Sequence[str] = ()
) -> Mapping[str, Sequence[str]]:
    """Return by place of the state the flags with which snapshots, peers and storage cost the least.

    Args:
        snapshot_bytes: that the rank with the most copies.
        persisted_bytes: that it writes to storage.
        own: flags of the strategy.
    """
    links, measured = needed_links(job), job.measured
    copy_s = snapshot_bytes / links.bandwidth
    write_s = persisted_bytes / (measured.storage_bandwidth or math.inf)
    found = {}
    for place, at_peers in places(job).items():
        sent_s = snapshot_bytes / links.replication_bandwidth if at_peers else write_s
        cost = CheckpointCost(
            iteration_s=links.iteration_s,
            overhead_s=max(0.0, copy_s - links.hidden_s),
            completion_s=copy_s + sent_s,
        )
        interval = best_interval(cost, measured.mtbf_s or math.inf)
        flags = storage_flags(job, interval, write_s, at_peers=at_peers)
        found[place] = [*own, f"--moe-ft-interval={interval}", *flags]
    return found


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
