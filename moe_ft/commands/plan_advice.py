"""Advice on a planned job: all strategies side by side, the best of them, and what its result hangs on.

Numbers only. plan_words.py prints them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs, RecoveryKind
from moe_ft.planning.planned_job import PlannedJob, flag_of
from moe_ft.planning.time_shares import TimeShares, calculate_shares
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts, StrategyKind

Configure = Callable[[Sequence[str]], MoeFtConfig]
# Values of the machine that are varied, and flags of the settings.
_VARIED = ("mtbf_s", "iteration_s", "bandwidth", "network_bandwidth", "storage_bandwidth")
_VARIED_FLAGS = re.compile(
    r"--moe-ft-(?:window|interval|replication-factor|persist-interval|k-snapshot)=(\d+)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A way to checkpoint a job.

    Attributes:
        flags: of moe_ft.
        costs: None if the job cannot be checkpointed so.
        problem: the reason, or why it does not fit; empty if it fits.
        node_bytes: host memory of a node.
        stored_bytes: on storage, at most.
    """

    name: str
    flags: tuple[str, ...]
    is_exact: bool
    mtbf_s: float
    costs: Costs | None = None
    problem: str = ""
    node_bytes: float = 0.0
    stored_bytes: float = 0.0

    @property
    def shares(self) -> TimeShares:
        """Shares of the time, with the fastest recovery."""
        assert self.costs is not None
        return calculate_shares(self.costs, self.costs.fastest, self.mtbf_s)

    @property
    def ettr(self) -> float:
        """The share of the time in which training gets ahead; 0 where it cannot run so."""
        return 0.0 if self.costs is None or self.problem else self.shares.productive


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """ETTR with one input at half of its value and at twice; None where that cannot be."""

    name: str
    value: float
    halved: float | None
    doubled: float | None

    def swing(self, ettr: float) -> float:
        """Return the largest change of ETTR."""
        return max(
            abs(each - ettr) for each in (self.halved, self.doubled, ettr) if each is not None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Alternatives, best first, and what the best one hangs on, most important first."""

    alternatives: tuple[Alternative, ...]
    sensitivities: tuple[Sensitivity, ...] = ()

    @property
    def best(self) -> Alternative | None:
        """The exact one with the most training, else the lossy one; None if nothing fits."""
        fitting = [each for each in self.alternatives if each.ettr > 0]
        return max(fitting, key=lambda each: (each.is_exact, each.ettr), default=None)


def check_room(job: PlannedJob, rank_bytes: float, limit: float | None) -> tuple[float, str]:
    """Return the host memory of a node, and why it does not fit; empty if it does.

    Args:
        rank_bytes: host memory of the rank with the most.
        limit: bytes that checkpoints may take of a node; None if that is not known.
    """
    node_bytes = min(job.ranks_per_node, job.num_ranks) * rank_bytes
    if limit is None or node_bytes <= limit:
        return node_bytes, ""
    return node_bytes, (
        f"does not fit: needs {node_bytes / 2**30:,.0f} GiB of host memory per node, and "
        f"{limit / 2**30:,.0f} GiB may be used"
    )


class Advisor:
    """Compares strategies for a job."""

    def __init__(
        self, job: PlannedJob, configure: Configure, node_limit_bytes: float | None = None
    ) -> None:
        """Take the job.

        Args:
            job: with all measured values, and any settings.
            configure: returns the settings of the job's command line with further flags.
            node_limit_bytes: host memory of a node that checkpoints may take; None if that is not known.
        """
        self._job, self._configure, self._limit = job, configure, node_limit_bytes

    def compare(self) -> list[Alternative]:
        """Return what all strategies cost."""
        return [each for kind in registry.kinds() for each in self._of_kind(kind)]

    def examine(self, kind: StrategyKind) -> list[Alternative]:
        """Return the same of the job's own settings alone."""
        return [self.evaluate(kind.name, kind, (), self._job)]

    def advise(self, found: Sequence[Alternative]) -> Advice:
        """Return the best of these, and what it hangs on."""
        alternatives = sorted(
            found, key=lambda each: (-each.ettr, bool(each.problem), each.node_bytes)
        )
        advice = Advice(alternatives=tuple(alternatives))
        if (best := advice.best) is None:
            return advice
        varied = sorted(self._vary(best), key=lambda each: -each.swing(best.ettr))
        return replace(advice, sensitivities=tuple(varied))

    def _of_kind(self, kind: StrategyKind) -> Iterator[Alternative]:
        chosen = (f"--moe-ft-strategy={kind.name}",)
        try:
            job = self._configured(chosen)
            choices = kind.choices(job)
        except ConfigError as error:
            yield self._alternative(kind.name, kind, chosen, problem=str(error))
            return
        for place, flags in choices.items():
            yield self.evaluate(f"{kind.name} {place}", kind, (*chosen, *flags), self._job)

    def _configured(self, flags: Sequence[str]) -> PlannedJob:
        config = self._configure(flags)
        config.validate(self._job.num_ranks)
        facts = ModelFacts(
            num_experts=self._job.model.num_experts, num_iterations=self._job.train_iterations
        )
        registry.check(config, facts)
        return self._job.with_config(config)

    def _alternative(
        self, name: str, kind: StrategyKind, flags: Sequence[str], **values: object
    ) -> Alternative:
        return Alternative(
            name=name,
            flags=tuple(flags),
            is_exact=kind.is_exact,
            mtbf_s=self._job.measured.mtbf_s or 0.0,
            **values,  # type: ignore[arg-type]
        )

    def evaluate(
        self, name: str, kind: StrategyKind, flags: Sequence[str], job: PlannedJob
    ) -> Alternative:
        """Return what flags cost a job, or why it cannot have them."""
        try:
            job = replace(self._configured(flags), measured=job.measured)
            costs, footprint = kind.costs(job), kind.footprint(job)
        except ConfigError as error:
            return self._alternative(name, kind, flags, problem=str(error))
        node_bytes, problem = check_room(job, costs.host_bytes, self._limit)
        stored = footprint.num_stored(job.config.storage.keep) * footprint.checkpoint_bytes
        return self._alternative(
            name,
            kind,
            flags,
            costs=costs,
            problem=problem,
            node_bytes=node_bytes,
            stored_bytes=stored if job.persists else 0,
        )

    def _vary(self, best: Alternative) -> Iterator[Sensitivity]:
        """Yield what becomes of the best alternative with each input halved and doubled."""
        assert best.costs is not None
        kind = registry.chosen(self._configure(best.flags))
        starts = {RecoveryKind.RESTART: "restart_s", RecoveryKind.KEEP: "keep_s"}
        for name in (*_VARIED, starts.get(best.costs.fastest, "repair_s")):
            if value := getattr(self._job.measured, name):
                ratios = [self._with(best, kind, name, value * factor) for factor in (0.5, 2)]
                yield Sensitivity(
                    name=flag_of(name), value=value, halved=ratios[0], doubled=ratios[1]
                )
        for flag in best.flags:
            if match := _VARIED_FLAGS.fullmatch(flag):
                yield self._vary_flag(best, kind, flag.partition("=")[0], int(match[1]))

    def _with(self, best: Alternative, kind: StrategyKind, name: str, value: float) -> float | None:
        measured = self._job.measured
        try:
            changed = replace(measured, **{name: value})
        except ConfigError:  # half an iteration that is all optimizer step
            return None
        found = self.evaluate(best.name, kind, best.flags, replace(self._job, measured=changed))
        found = replace(found, mtbf_s=changed.mtbf_s or best.mtbf_s)
        return None if found.costs is None else found.shares.productive

    def _vary_flag(
        self, best: Alternative, kind: StrategyKind, flag: str, value: int
    ) -> Sensitivity:
        ratios: Mapping[int, float | None] = {
            other: self._with_flag(best, kind, flag, other) for other in {value // 2, 2 * value}
        }
        return Sensitivity(
            name=flag, value=value, halved=ratios[value // 2], doubled=ratios[2 * value]
        )

    def _with_flag(
        self, best: Alternative, kind: StrategyKind, flag: str, value: int
    ) -> float | None:
        if not value:
            return None
        found = self.evaluate(best.name, kind, (*best.flags, f"{flag}={value}"), self._job)
        return None if found.costs is None else found.shares.productive
