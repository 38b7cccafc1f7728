"""Plans of strategies as text: the one form of their sizes, host memory, losses and recoveries.

A strategy gives numbers and sentences (`StrategyPlan`); its costs follow in job_costs.py. Lines on what all
strategies have, such as slots and the boundary log, are here too.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from moe_ft.planning.costs import Costs, ettr
from moe_ft.planning.host_memory import Footprint, MemoryShare
from moe_ft.planning.interval import smallest_interval
from moe_ft.planning.job_costs import Sizes, costs_of, known_links, missing_links
from moe_ft.planning.planned_job import (
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    PlannedJob,
    PlannedModel,
)
from moe_ft.planning.slot_tables import balanced, imbalance, skewed, stock
from moe_ft.tables import table
from moe_ft.units import UnitKind

_SKEWS = (1, 2, 4, 8)


def megabytes(num_bytes: float) -> str:
    """Return bytes in MB, without the unit."""
    return f"{num_bytes / 1e6:,.1f}"


def describe_model(model: PlannedModel) -> str:
    """Return how many parameters a model has, and how many of them are in experts."""
    if not model.num_moe_layers:
        return f"{_count(model.num_parameters)} parameters, no experts"
    num_experts = model.num_moe_layers * model.num_experts
    return (
        f"{_count(model.num_parameters)} parameters, of which "
        f"{_count(num_experts * model.expert_parameters)} in {model.num_experts} experts of each of "
        f"{model.num_moe_layers} MoE layers ({_count(model.expert_parameters)} each)"
    )


def describe_layout(job: PlannedJob) -> str:
    """Return the numbers of ranks."""
    tensor = f"tp {job.tp}, " if job.tp > 1 else ""
    return f"{tensor}pp {job.num_stages}, dp {job.dp}, ep {job.ep}"


def describe_ranks(job: PlannedJob) -> str:
    """Return the model and who saves what of it, for snapshots of everything at FULL."""
    owners = ""
    if job.model.num_moe_layers:
        holders = job.num_expert_owners
        owners = f"{holders} {'rank holds' if holders == 1 else 'ranks hold'} each expert; "
        if job.config.elastic.expert_slots:
            owners = f"each rank holds 1/{job.ep} of the state of every expert; "
    division = (
        "each rank saves its slices of the distributed optimizer"
        if job.is_optimizer_distributed
        else f"optimizer on every rank, sharding {job.config.strategy.sharding}"
    )
    return (
        f"{describe_model(job.model)}\n{describe_layout(job)}: {owners}{division}; "
        f"{job.heaviest.full_bytes / job.heaviest.num_elements:.3g} bytes of a parameter saved"
    )


Table = tuple[Sequence[str], Sequence[Sequence[object]]]  # headers, rows


class StrategyPlan(ABC):
    """Plan of one strategy for a job: what it costs, and the words that `python -m moe_ft plan` prints.

    Attributes:
        longest_window: snapshots that a window may have.
        is_exact: whether a recovery loses nothing.
    """

    longest_window = 1
    is_exact = True

    def __init__(self, job: PlannedJob, strategy: str) -> None:
        self.job = job
        self.strategy = strategy

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """Bytes that ranks save.

        Raises:
            ConfigError: if one of them follows from what was not given.
        """

    @property
    @abstractmethod
    def footprint(self) -> Footprint:
        """Room that checkpoints take, at most."""

    def choices(self) -> Mapping[str, Sequence[str]]:
        """Return flags to compare, by where recoveries find the state; the bandwidths are known."""
        return {}

    def notes(self) -> list[str]:
        """Return sentences on how it is planned."""
        return []

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values on snapshots."""
        return []

    def tables(self) -> list[Table]:
        """Return sizes."""
        return []

    def shares(self) -> dict[str, MemoryShare]:
        """Return the columns on host memory."""
        return {self.strategy: self.footprint.share}

    @property
    def full_share(self) -> MemoryShare:
        """Host memory if every snapshot held everything at FULL."""
        full = self.job.heaviest.full_bytes
        return replace(self.footprint.share, region_bytes=full, pool_bytes=0)

    def replays(self) -> list[str]:
        """Return sentences on iterations that run again, where the bandwidths are known."""
        return []

    @property
    def host_bytes(self) -> int:
        """Host memory of the rank with the most, its peers' replicas included."""
        log_bytes = self.job.boundary_bytes(self.longest_window)
        return self._total(self.footprint.share) + log_bytes

    def _total(self, share: MemoryShare) -> int:
        job = self.job
        return share.total_bytes(
            persists=job.persists,
            replication_factor=job.replication_factor,
            replica_regions=job.replica_regions,
        )

    def costs(self) -> Costs:
        """Return what the strategy costs the job.

        Raises:
            ConfigError: if a measured value is missing, or the job cannot be planned.
        """
        share = self.footprint.share
        return costs_of(self.job, self.strategy, self.sizes, share, self.host_bytes)

    def report(self) -> str:
        """Return the plan as text.

        Raises:
            ConfigError: if flags do not fit together.
        """
        lines = [f"{name}: {value}" for name, value in [*self.rows(), *self._limits()]]
        parts = [
            "\n".join([describe_ranks(self.job), *self.notes()]),
            "\n".join(lines),
            *(table(rows, headers) for headers, rows in self.tables()),
            self._memory(),
            self._losses(),
            *self._failures(),
        ]
        return "\n\n".join(filter(None, parts))

    def _limits(self) -> Iterator[tuple[str, str]]:
        """Yield the limits that bandwidths set, those that were given."""
        job, storage, speed = self.job, self.job.config.storage, self.job.measured.storage_bandwidth
        links = known_links(job)
        if links is not None:
            sizes = self.sizes
            window, lag = sizes.window, links.lag_iterations(sizes.snapshots)
            stalls_s = links.stalls_s(sizes.snapshots)
            period, every = sizes.interval, f"--moe-ft-interval {sizes.interval}"
            if window > 1:
                period, every = window + lag, f"windows of {window}"
            overhead = sum(stalls_s) / (period * links.iteration_s)
            yield (
                "copy",
                f"{max(sizes.snapshots) / links.bandwidth:.3f} s, alongside {links.hidden_s:.3f} s of "
                f"forward and backward; stall {max(stalls_s):.3f} s, {overhead:.1%} of the time with {every}",
            )
        if speed is not None and storage.persist_interval:
            sizes, iteration_s = self.sizes, job.measured.iteration_s or 0.0
            planned, unit = sizes.interval * storage.persist_interval, "iterations"
            if sizes.window > 1:
                planned, unit = storage.persist_interval, "windows"
                lag = 0 if links is None else links.lag_iterations(sizes.snapshots)
                iteration_s *= sizes.window + lag
            least = smallest_interval(
                sizes.persisted_bytes, bandwidth_bytes_per_s=speed, iteration_s=iteration_s
            )
            verdict = "is enough" if planned >= least else "is too short: persists will be skipped"
            yield (
                "persist",
                f"{sizes.persisted_bytes / speed:.3f} s; smallest interval {least} {unit}; the one planned, "
                f"{planned}, {verdict}",
            )
        if storage.persists_dense:
            whole = self.sizes.whole_bytes
            found = [f"{megabytes(whole)} MB of the rank with the most"]
            if links is not None:
                found.append(f"stall {links.stalls_s([whole])[0]:.3f} s")
            if speed is not None:
                found.append(f"written in {whole / speed:.3f} s")
            every = f"whole state on storage every {storage.persist_dense_interval} iterations"
            yield every, "; ".join(found)

    def _memory(self) -> str:
        """Return the host memory of the rank that needs the most, of a node of these, and by parameter."""
        job = self.job
        factor, num_ranks = job.replication_factor, min(job.ranks_per_node, job.num_ranks)
        num_parameters, shares = job.heaviest.num_elements, self.shares()
        own = [share.own_bytes(persists=job.persists) for share in shares.values()]
        kept = [factor * share.replica_bytes(job.replica_regions) for share in shares.values()]
        state = [sum(each) for each in zip(own, kept, strict=True)]
        both = [self._total(share) for share in shares.values()]
        beside = [all_bytes - bytes_ for all_bytes, bytes_ in zip(both, state, strict=True)]
        # Rounded up, so that a tmpfs of this size is enough.
        node = [math.ceil(num_ranks * each / 1e5) * 1e5 for each in both]
        what = "replicas" if job.config.memory.parity_nodes is None else "parity"
        rows = [
            ("a rank's own, MB", *map(megabytes, own)),
            (f"{what} that it keeps ({factor}), MB", *map(megabytes, kept)),
            ("headers, indexes and notes of both, MB", *map(megabytes, beside)),
            ("a rank, MB", *map(megabytes, both)),
            (f"a node of {num_ranks}, at most, MB", *map(megabytes, node)),
            ("bytes per parameter, own", *(f"{each / num_parameters:.1f}" for each in own)),
            ("bytes per parameter, all", *(f"{each / num_parameters:.1f}" for each in state)),
        ]
        return table(rows, ("host memory", *shares))

    def _losses(self) -> str:
        """Return what a fault loses on average with uniform routing; empty where recoveries are exact."""
        if self.is_exact:
            return ""
        job, sizes, storage = self.job, self.sizes, self.job.config.storage
        (in_memory, on_storage), every = sizes.rounds, sizes.interval * job.persist_interval
        if storage.persists_dense and not storage.persist_interval:
            on_storage, every = 1.0, storage.persist_dense_interval
        rows = []
        for name, rounds, interval in (
            ("memory or peers", in_memory, sizes.interval),
            ("storage (all nodes lost)", on_storage, every),
        ):
            if interval < math.inf:
                lost = interval * (rounds - 1) / 2
                row = [name, f"{lost:.2f}"]
                if job.train_iterations:
                    row.append(f"{lost / job.train_iterations:.4%}")
                rows.append(row)
        headers = ("a fault that recovers from", "loses tokens of iterations", "PLT")
        return table(rows, headers[: len(rows[0])])

    def _failures(self) -> Iterator[str]:
        """Yield what a failure costs, if all is known that it follows from."""
        mtbf_s = self.job.measured.mtbf_s
        if mtbf_s is None and missing_links(self.job):
            return
        costs = self.costs()
        kind = costs.fastest
        recovery, replays = costs.recoveries[kind], costs.window - 1
        rows = [
            (f"{kind}", "", recovery.notice_s + recovery.processes_s + recovery.groups_s),
            ("restore", f"{megabytes(self.sizes.read_bytes)} MB", recovery.state_s),
            (
                "conversion",
                f"{replays} {'replay' if replays == 1 else 'replays'}",
                recovery.replay_s,
            ),
            ("work to redo", f"{costs.mean_redone - replays:.1f} iterations", costs.redo_s(kind)),
            ("E[R]", "", costs.failure_s(kind)),
        ]
        cells = [(name, what, f"{seconds:.2f}") for name, what, seconds in rows]
        yield table(cells, ("recovery", "", "s"))
        lines = self.replays()
        if mtbf_s is not None:
            ratio = ettr(costs.overhead, costs.failure_s(kind), mtbf_s)
            lines.append(
                f"a failure every {mtbf_s:g} s: {ratio:.4f} of the time is training (ETTR), with an "
                f"overhead of {costs.overhead:.2%}"
            )
        yield "\n".join(lines)


def boundary_line(job: PlannedJob, longest_window: int) -> list[str]:
    """Return what the boundary log takes, if there is one."""
    traffic, num_bytes = job.traffic, job.boundary_bytes(longest_window)
    if traffic is None or not num_bytes:
        return []
    stages = range(traffic.num_stages)
    most = max(stages, key=traffic.num_sends)
    iterations = num_bytes // traffic.slot_bytes(most)
    return [
        f"boundary log: {megabytes(traffic.sent_bytes(most))} MB of an iteration in "
        f"{traffic.num_sends(most)} tensors, {iterations} iterations, {megabytes(num_bytes)} MB of the rank "
        "with the most, besides the host memory above"
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.3f}e9" if number >= 1e9 else f"{number / 1e6:.1f}e6"


def sent_bytes(job: PlannedJob, num_moe_layers: int) -> tuple[int, int]:
    """Return the bytes of gradients and of weights of its slots that a rank sends to others in an iteration.

    Tables change nothing in it, and neither is optimizer state. Padding is not counted.
    """
    expert, rank = next(
        (each, rank) for rank in job.ranks for each in rank.sizes if each.kind is UnitKind.EXPERT
    )
    sizes = rank.sizes[expert]
    held = num_moe_layers * job.config.elastic.expert_slots * job.model.expert_parameters
    sent = held * (job.ep - 1) // job.ep
    return sent * job.reduced_bytes, sent * round(sizes.compute / sizes.elements)


def slot_lines(job: PlannedJob) -> list[str]:
    """Return what slots give and cost: load of the ranks, memory and messages where there are most layers."""
    settings, model, num_ranks = job.config.elastic, job.model, job.ep
    if not settings.expert_slots or not model.num_moe_layers:
        return []
    rows = []
    for ratio in _SKEWS:
        load = skewed(model.num_experts, ratio, is_one_hot=False)
        once = stock(model.num_experts, math.gcd(model.num_experts, num_ranks))
        found = balanced(load, num_ranks, settings.expert_slots, settings.min_replicas)
        rows.append((f"{ratio}:1", *(f"{imbalance(each, load):.2f}" for each in (once, found))))
    num_layers = max(stage.num_moe_layers for stage in job.stages)
    slots = num_layers * settings.expert_slots * model.expert_parameters
    homes = num_layers * model.num_experts * model.expert_parameters / num_ranks
    gradients, weights = map(megabytes, sent_bytes(job, num_layers))
    return [
        f"{settings.expert_slots} slots on each of {num_ranks} ranks of a stage, for {model.num_experts} "
        "experts of a layer: tokens of the busiest rank over the mean, if the tokens of the experts fall "
        "in a geometric row",
        table(rows, ("most to least", "each expert once", "slots")),
        f"a rank has {megabytes(WEIGHT_BYTES * slots)} MB of weights and gradients in slots and "
        f"{megabytes((WEIGHT_BYTES + OPTIMIZER_BYTES) * homes)} MB of state in homes; in each iteration it "
        f"sends {gradients} MB of gradients and {weights} MB of weights, whatever the tables are, and no "
        "state of the optimizer",
    ]
