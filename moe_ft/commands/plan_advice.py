"""Advice on a planned job: its strategies side by side, the best of them, and what would change that."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from markupsafe import Markup

from moe_ft.command_lines import as_flag
from moe_ft.commands.pages import (
    LEFT,
    WIDTH,
    Comparison,
    PagePart,
    bar,
    key_of_colours,
    label,
    shares_rows,
    svg,
)
from moe_ft.commands.plan_command import StartCommand
from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs
from moe_ft.planning.job_costs import stock_costs
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.time_shares import Spent, TimeShares, calculate_shares
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts, StrategyKind

Configure = Callable[[Sequence[str]], MoeFtConfig]
Check = Callable[[Sequence[str]], str]
_REPAIR = "--moe-ft-repair=auto"
SPEEDS = ("bandwidth", "network_bandwidth", "storage_bandwidth")
REACH = 64  # times more or less than an input is thought to be
EVEN = 0.0005  # of the time: what differs by less is as good
_BISECTIONS = 8
_HOURS_OF_A_WEEK = 168.0
STOCK = "Megatron's --save"
_HEADERS = (
    *(
        "alternative",
        "ETTR",
        "lost in a week",
        "every",
        "stall",
        "recovery",
        "again",
        "tokens lost",
    ),
    *("host memory of a node", "to storage", "on storage"),
)
# The remedy of each share of the time that is not training.
_LIMITS = {
    Spent.BLOCKED: "training waits for checkpoints: a longer interval or window, or more bandwidth to the "
    "host",
    Spent.RECOVERING: "recoveries take long before iterations run again: faster starts, as with "
    "`python -m moe_ft keep`, or --moe-ft-repair auto where a start accepts it",
    Spent.REDONE: "iterations run again after failures: a shorter interval or window, or more bandwidth to "
    "peers and storage",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A way to checkpoint a job.

    Attributes:
        flags: of moe_ft.
        is_stock: whether Megatron itself does it: a row to compare with.
        is_usual: whether it is what the user does without moe_ft.
        costs: None if the job cannot be checkpointed so.
        problem: the reason, or why it does not fit; empty if it fits.
        refusal: the rule by which a start of the job refuses it, with the remedy; empty if it does not.
        node_bytes: host memory of a node.
        stored_bytes: on storage, at most.
    """

    name: str
    flags: tuple[str, ...]
    is_exact: bool
    mtbf_s: float
    is_stock: bool = False
    is_usual: bool = False
    costs: Costs | None = None
    problem: str = ""
    refusal: str = ""
    node_bytes: float = 0.0
    stored_bytes: float = 0.0

    @property
    def shares(self) -> TimeShares:
        """Shares of the time, with the fastest recovery."""
        assert self.costs is not None
        return calculate_shares(self.costs, self.costs.fastest, self.mtbf_s)

    @property
    def is_on_storage(self) -> bool:
        """True if the state of a lost node comes from storage."""
        return self.costs is not None and self.costs.nodes_lost is None

    @property
    def ettr(self) -> float:
        """The share of the time in which training gets ahead; 0 where it cannot run so."""
        if self.costs is None or self.problem or self.refusal:
            return 0.0
        return self.shares.productive

    @property
    def lost_hours(self) -> float:
        """Hours of a week in which training does not get ahead; of no meaning where it cannot run so."""
        return _HOURS_OF_A_WEEK * (1 - self.ettr)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurningPoint:
    """Value of an input from which another exact alternative is recommended.

    Attributes:
        value: that the advice rests on.
        at: where that begins; None if it does nowhere within `REACH`.
        other: its name.
    """

    name: str
    value: float
    at: float | None = None
    other: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Alternatives, best first, and which values would change the advice."""

    alternatives: tuple[Alternative, ...]
    turns: tuple[TurningPoint, ...] = ()

    @property
    def usual(self) -> Alternative | None:
        """The row of what the user does without moe_ft; None where the speed of storage is not known."""
        return next((each for each in self.alternatives if each.is_usual), None)

    @property
    def best(self) -> Alternative | None:
        """The exact one with the most training, else the lossy one; None if nothing fits or starts.

        Where exact ones are even, one whose state is in memory wins, and then the one that needs less of it.
        """
        fitting = [each for each in self.alternatives if each.ettr > 0 and not each.is_stock]
        top = max(fitting, key=lambda each: (each.is_exact, each.ettr), default=None)
        if top is None or not top.is_exact:
            return top
        even = [each for each in fitting if each.is_exact and each.ettr > top.ettr - EVEN]
        return min(even, key=lambda each: (each.is_on_storage, each.node_bytes, -each.ettr))


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


@dataclass(frozen=True, kw_only=True)
class Advisor:
    """Compares strategies for a job.

    Attributes:
        job: with all measured values, and any settings.
        configure: returns the settings of the job's command line with further flags.
        node_limit_bytes: host memory of a node that checkpoints may take; None if that is not known.
        check: returns why a start of the job with further flags is refused; empty if it is not.
        saves: how often the user has Megatron save, in words and in iterations; None if nobody knows.
    """

    job: PlannedJob
    configure: Configure
    node_limit_bytes: float | None = None
    check: Check = lambda flags: ""
    saves: tuple[str, int] | None = None

    def compare(self) -> list[Alternative]:
        """Return what all strategies and `--save` cost; the best also with repairs that a start refuses."""
        found = [each for kind in registry.kinds() for each in self._of_kind(kind)]
        best = Advice(alternatives=tuple(found)).best
        if (
            best is not None
            and self.job.measured.repair_s is not None
            and _REPAIR not in best.flags
        ):
            kind = registry.chosen(self.configure(best.flags))
            flags = (*best.flags, _REPAIR)
            found.append(self.evaluate(f"{best.name}, repaired", kind, flags))
        return [*found, *self._stock()]

    def compare_exact(self) -> Advice:
        """Return what exact strategies cost, with flags that suit the job and that a start accepts."""
        exact = [kind for kind in registry.kinds() if kind.is_exact]
        return Advice(alternatives=tuple(each for kind in exact for each in self._of_kind(kind)))

    def with_input(self, name: str, value: float) -> "Advisor":
        """Return the advisor of the job with another measured value.

        Raises:
            ConfigError: if it cannot be.
        """
        measured = replace(self.job.measured, **{name: value})
        return replace(self, job=replace(self.job, measured=measured))

    def _stock(self) -> Iterator[Alternative]:
        """Yield what Megatron's own checkpoints cost, if the speed of storage is known."""
        if self.job.measured.storage_bandwidth is None:
            return
        choices: list[tuple[str, int | None]] = [("at its best", None)]
        if self.saves is not None:
            choices.append(self.saves)
        for how, interval in choices:
            costs = stock_costs(self.job, interval)
            yield Alternative(
                name=f"{STOCK} {how}",
                flags=("--save=DIR", f"--save-interval={costs.interval:g}"),
                is_exact=True,
                is_stock=True,
                is_usual=interval is not None,
                mtbf_s=self.job.measured.mtbf_s or 0.0,
                costs=costs,
            )

    def advise(self, found: Sequence[Alternative]) -> Advice:
        """Return these, best first, and what would change the advice."""
        alternatives = sorted(
            found,
            key=lambda each: (-each.ettr, not each.is_exact, bool(each.problem), each.node_bytes),
        )
        advice = Advice(alternatives=tuple(alternatives))
        if (best := advice.best) is None or not best.is_exact or len(alternatives) == 1:
            return advice
        return replace(advice, turns=tuple(self._turns(best)))

    def _turns(self, best: Alternative) -> Iterator[TurningPoint]:
        """Yield for each input the nearest values, below and above, at which another one is recommended."""
        for name in (*SPEEDS, "mtbf_s"):
            if not (value := getattr(self.job.measured, name)):
                continue
            found = [self._turn(best.name, name, value, factor) for factor in (0.5, 2.0)]
            yield from filter(None, found)
            if not any(found):
                yield TurningPoint(name=as_flag(name), value=value)

    def _turn(self, best: str, name: str, value: float, factor: float) -> TurningPoint | None:
        """Look for the turn in steps of a factor, and then closely between two of them."""
        near, far, other = value, value, best
        while other == best and far not in (value * REACH, value / REACH):
            near, far = far, far * factor
            other = self._recommended(name, far)
        if other == best:
            return None
        for _ in range(_BISECTIONS):
            middle = math.sqrt(near * far)
            if (found := self._recommended(name, middle)) == best:
                near = middle
            else:
                far, other = middle, found
        return TurningPoint(name=as_flag(name), value=value, at=far, other=other)

    def _recommended(self, name: str, value: float) -> str:
        """Return the exact alternative that is recommended with one input changed."""
        best = self.with_input(name, value).compare_exact().best
        return "nothing" if best is None else best.name

    def _of_kind(self, kind: StrategyKind) -> Iterator[Alternative]:
        chosen = (f"--moe-ft-strategy={kind.name}",)
        try:
            job = self._configured(chosen)
            choices = kind.plan(job).choices()
        except ConfigError as error:
            yield self._alternative(kind.name, kind, chosen, problem=str(error))
            return
        for place, flags in choices.items():
            found = self.evaluate(f"{kind.name} {place}", kind, (*chosen, *flags))
            if found.refusal and _REPAIR in flags:
                without = [flag for flag in (*chosen, *flags) if flag != _REPAIR]
                found = self.evaluate(found.name, kind, without)
            yield found

    def _configured(self, flags: Sequence[str]) -> PlannedJob:
        config = self.configure(flags)
        config.validate(self.job.num_ranks)
        facts = ModelFacts(
            num_experts=self.job.model.num_experts, num_iterations=self.job.train_iterations
        )
        registry.check(config, facts)
        return self.job.with_config(config)

    def _alternative(
        self, name: str, kind: StrategyKind, flags: Sequence[str], **values: object
    ) -> Alternative:
        return Alternative(
            name=name,
            flags=tuple(flags),
            is_exact=kind.is_exact,
            mtbf_s=self.job.measured.mtbf_s or 0.0,
            **values,  # type: ignore[arg-type]
        )

    def evaluate(self, name: str, kind: StrategyKind, flags: Sequence[str] = ()) -> Alternative:
        """Return what flags cost a job, or why it cannot have them."""
        try:
            job = self._configured(flags)
            plan = kind.plan(job)
            costs, footprint = plan.costs(), plan.footprint
        except ConfigError as error:
            return self._alternative(name, kind, flags, problem=str(error))
        node_bytes, problem = check_room(job, costs.host_bytes, self.node_limit_bytes)
        stored = footprint.num_stored(job.config.storage.keep) * footprint.checkpoint_bytes
        return self._alternative(
            name,
            kind,
            flags,
            costs=costs,
            problem=problem,
            refusal=self.check(flags),
            node_bytes=node_bytes,
            stored_bytes=stored if job.persists else 0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Advice on a job, with what it rests on.

    Attributes:
        begin: the command that starts it with the recommended flags.
        assumptions: by name, values and where they come from.
        notes: on what is not counted.
    """

    job: PlannedJob
    advice: Advice
    begin: StartCommand
    assumptions: Sequence[tuple[str, str, str]]
    notes: Sequence[str]


def word(proposal: Proposal) -> Comparison:
    """Return advice in words."""
    best, found = proposal.advice.best, proposal.advice.alternatives
    headline = "nothing fits or starts: the table says what each alternative needs"
    limit = "fewer replicas, other formats (--moe-ft-state-dtype) or more nodes need less of a node"
    command, fill_in, shares = "", "", None
    if best is not None:
        lossy = "" if best.is_exact else "; recoveries lose tokens"
        headline = (
            f"recommended: {best.name}, {_percent(best.ettr)} of the time is training (ETTR), "
            f"{_hours(best.lost_hours)} of a week are lost{lossy}"
        )
        command, names = proposal.begin.text, proposal.begin.placeholders
        fill_in = f"Fill in {', '.join(names)}." if names else ""
        most = max(_LIMITS, key=lambda name: best.shares[name])
        limit = f"{best.shares[most]:.2%} of the time: {_LIMITS[most]}"
        shares = (("time", best.name), shares_rows({best.name: best.shares}))
    gain = _gain(proposal)
    problems = [
        f"{each.name}: {each.problem or f'refused: {each.refusal}'}"
        for each in found
        if each.problem or each.refusal
    ]
    drawing = _draw_shares([(each.name, each.shares) for each in found if each.ettr])
    return Comparison(
        command="plan",
        job=proposal.job,
        headline=headline,
        parts=[
            PagePart(lines=[each for each in (gain, _assumed(proposal)) if each], words=command),
            PagePart(lines=[fill_in] if fill_in else []),
            PagePart(title="Alternatives", table=(_HEADERS, [_cells(each) for each in found])),
            PagePart(lines=problems),
            PagePart(
                title="Time that is not training",
                table=shares,
                drawings=[("", key_of_colours([*_LIMITS])), ("", drawing)],
            ),
            PagePart(lines=[f"what limits it: {limit}"]),
            PagePart(lines=_turns(proposal.advice)),
        ],
        assumptions=proposal.assumptions,
        notes=proposal.notes,
        values={
            "recommended": None if best is None else best.name,
            "flags": [] if best is None else list(best.flags),
            "command": command,
            "gain": gain,
            "limit": limit,
            "turns": [asdict(each) for each in proposal.advice.turns],
            "parameters": proposal.job.model.num_parameters,
            "active_parameters": round(proposal.job.model.active_parameters),
            "alternatives": [_as_object(each) for each in found],
        },
    )


def _percent(share: float) -> str:
    """Return a share of the time, which is never all of it."""
    text = f"{share:.2%}"
    return "> 99.99%" if text == "100.00%" else text


def _hours(hours: float) -> str:
    return f"{hours:.2f} h" if hours < 10 else f"{hours:.1f} h"


def _gain(proposal: Proposal) -> str:
    """Return what the recommendation saves of what the user does now; empty if either is not known."""
    best, usual, job = proposal.advice.best, proposal.advice.usual, proposal.job
    if best is None or usual is None:
        return ""
    hours = usual.lost_hours - best.lost_hours
    than = f"{usual.name}, which loses {_hours(usual.lost_hours)} ({_percent(usual.ettr)} ETTR)"
    if hours <= 0:
        return f"gain: none over {than}"
    return f"gain: {_hours(hours)} of a week ({hours * job.num_ranks:,.0f} rank-hours) over {than}"


def _assumed(proposal: Proposal) -> str:
    """Return which values of ETTR nobody has measured; empty if there are none."""
    names = [name for name, _, source in proposal.assumptions if source.startswith("assumed: ")]
    if not names:
        return ""
    return f"these are assumed, not measured: {', '.join(names)} (below; --from-run DIR measures)"


def _cells(found: Alternative) -> tuple[str, ...]:
    costs = found.costs
    if costs is None:
        return (found.name, "cannot be", *[""] * (len(_HEADERS) - 2))
    kind = costs.fastest
    verdict = "does not fit" if found.problem else "refused" if found.refusal else ""
    return (
        found.name,
        verdict or _percent(found.ettr),
        "" if verdict else _hours(found.lost_hours),
        f"{costs.interval:g} iterations",
        f"{costs.blocked_s:.3f} s",
        f"{costs.recoveries[kind].ready_s:.1f} s ({kind})",
        f"{costs.recoveries[kind].replay_s + costs.redo_s(kind):.1f} s",
        f"{costs.lost_iterations:.1f} iterations" if costs.lost_iterations else "none",
        f"{found.node_bytes / 2**30:,.0f} GiB",
        f"{costs.storage_bytes / costs.iteration_s / 1e6:,.1f} MB/s a rank",
        f"{found.stored_bytes / 1e9:,.0f} GB",
    )


def _turns(advice: Advice) -> list[str]:
    """Return what would change the advice: values of inputs, most of which are assumed."""
    if not advice.turns:
        return []
    lines = [f"what would change the recommendation ({EVEN:.2%} of the time and less is even):"]
    return [*lines, *map(_turn, advice.turns)]


def _turn(turn: TurningPoint) -> str:
    unit, scale, form = ("s", 1.0, ",.0f") if turn.name == "--mtbf-s" else ("GB/s", 1e-9, ".2g")
    least, now, most = (f"{scale * turn.value * each:{form}}" for each in (1 / REACH, 1, REACH))
    if turn.at is None:
        return f"  {turn.name}: nothing from {least} to {most} {unit}"
    side = "below" if turn.at < turn.value else "above"
    return f"  {turn.name}: {turn.other} {side} {scale * turn.at:{form}} {unit} ({now} now)"


def _as_object(found: Alternative) -> Mapping[str, Any]:
    value = {**asdict(found), "ettr": found.ettr}
    if found.costs is not None:
        value["time"] = asdict(found.shares)
        value["badput"] = found.shares.badput
        value["failure_s"] = found.costs.failure_s(found.costs.fastest)
    return value


def _draw_shares(rows: Sequence[tuple[str, TimeShares]]) -> Markup:
    """Return bars of the time that is not training, to the scale of the longest."""
    longest = max((1 - shares.productive for _, shares in rows), default=0.0) or 1.0
    scale, parts = (WIDTH - LEFT - 80) / longest, []
    for row, (name, shares) in enumerate(rows):
        parts.append(label(0, row, name))
        x = float(LEFT)
        for kind in _LIMITS:
            width = scale * shares[kind]
            parts.append(bar(x, width, row, kind))
            x += width
        parts.append(label(x + 6, row, f"{1 - shares.productive:.2%}"))
    return svg(len(rows), "".join(parts))
