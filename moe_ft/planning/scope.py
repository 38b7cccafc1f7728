"""Scope of a recovery: the stages that run iterations again, from where, and what answers at their borders.

Stages outside of the scope keep the state that they have. A stage that runs iteration n again is linked live
to a neighbour that runs n again too; any other neighbour's tensors come from its boundary log, and what is
sent to it goes nowhere.

For one target, begin with the newest state that every stage could restore, at the target or before it. As
long as a stage runs an iteration again for which the log of a neighbour is missing, or without a stage that
it is coupled to, move that other stage back to its newest state that is old enough. A stage only ever moves
back, so this ends. Each of these demands is of the form "at or before a limit", and a limit only falls if the
stage that makes the demand moves back. So the later of two possible choices is possible too, stage by stage,
and there is one choice that is the latest for all stages at once: this one. No other choice for that target
runs fewer iterations again on any stage. Nothing is greedy, and there are no ties.

Targets are tried newest first: the iterations of whole states and the ends of windows that some stage has
completely. One is passed over if a stage has no state that is old enough, or if all stages would run the same
iterations again. That is a global recovery, which planning/recovery.py plans and which needs no log. A target
before the newest global recovery's is never better.

Pure: the same remains in any order give the same plan. planning/remains.py has the input.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_ft.planning.recovery import Ordered, StagePlan
from moe_ft.planning.remains import KeptRecord, PipelineLayout, Remains, SentLog
from moe_ft.planning.restorable import Restorable, StageState

_MOST_REASONS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Stages that recover together. Two scopes need nothing of each other and run at the same time.

    Attributes:
        segments: runs of neighbouring stages with live links between them; on a ring one may pass the end.
            There are several only where a coupling joins them.
        replay_from: the first iteration that one of its stages runs again. Others may join later.
        logs: logs that are read at its borders, ordered by iteration and receiver.
        records: by stage, records that answer for the iterations after its window, one for each, ascending.
    """

    segments: tuple[tuple[int, ...], ...]
    replay_from: int
    logs: tuple[SentLog, ...]
    records: Mapping[int, tuple[KeptRecord, ...]]

    @property
    def stages(self) -> tuple[int, ...]:
        """All of its stages, ascending."""
        return tuple(sorted(stage for run in self.segments for stage in run))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopePlan:
    """Local recovery of a job.

    Attributes:
        stages: the way of every stage. One outside of every scope restores the target itself.
        scopes: ordered by their lowest stage; empty if nothing is run again.
    """

    target: int
    stages: Mapping[int, StagePlan]
    scopes: tuple[Scope, ...]

    @property
    def num_replays(self) -> int:
        """Iterations that are run again, summed over the stages."""
        return sum(stage.num_replays for stage in self.stages.values())

    def replaying(self, iteration: int) -> frozenset[int]:
        """Return the stages that run an iteration again. Links between two of them are live."""
        return frozenset(
            stage
            for stage, plan in self.stages.items()
            if plan.replay_from <= iteration < self.target
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeDecision:
    """Answer to the question of how a job recovers.

    Attributes:
        plan: None if recovery is global.
        reason: for people: why newer iterations cannot be reached, empty if there are none.
    """

    plan: ScopePlan | None
    reason: str = ""


def plan_scope(remains: Remains, pipelines: PipelineLayout) -> ScopeDecision:
    """Return the local recovery with the newest target that runs the fewest iterations again."""
    search = _Search(Restorable(remains, pipelines), pipelines)
    reasons: list[str] = []
    for target in search.targets():
        chosen, reason = search.choose(target)
        if chosen is not None:
            return ScopeDecision(plan=search.describe(chosen, target), reason=_join(reasons))
        reasons.append(f"iteration {target}: {reason}")
    reason = _join(reasons) or "no stage has the state of all its ranks"
    return ScopeDecision(plan=None, reason=reason)


def _join(reasons: Sequence[str]) -> str:
    return "; ".join([*reasons[:_MOST_REASONS], *["..."] * (len(reasons) > _MOST_REASONS)])


class _Search:
    """Search for what each stage restores. Changes nothing."""

    def __init__(self, found: Restorable, pipelines: PipelineLayout) -> None:
        self._found, self._pipelines = found, pipelines

    def targets(self) -> list[int]:
        """Return the iterations that a local recovery may go to, newest first."""
        states = self._found.states
        common = set.intersection(*({each.key for each in own} for own in states))
        newest_global = max((iteration for iteration, _, _ in common), default=0)
        reached = {each.iteration for own in states for each in own}
        return sorted((each for each in reached if each >= newest_global), reverse=True)

    def choose(self, target: int) -> tuple[list[StageState] | None, str]:
        """Return ``[stage]`` the latest states from which the target can be reached, or None and why not."""
        usable = []
        for stage, own in enumerate(self._found.states):
            states = [each for each in own if each.iteration <= target]
            gaps = [self._found.first_gap(stage, each, target) for each in states]
            usable.append([each for each, gap in zip(states, gaps, strict=True) if gap is None])
            if not states:
                return None, f"stage {stage} has no such or older state of all its ranks"
            if not usable[-1]:
                gap = max(each for each in gaps if each is not None)
                return None, f"stage {stage} {self._found.reason_of_gap(gap)}"
        chosen = [max(own, key=lambda each: each.order) for own in usable]
        while (demand := next(self._demands(chosen, target), None)) is not None:
            stage, limit, cause = demand
            states = [each for each in usable[stage] if each.replay_from <= limit]
            if not states:
                return (
                    None,
                    f"{cause}, and stage {stage} has no state of iteration {limit} or older",
                )
            chosen[stage] = max(states, key=lambda each: each.order)
        begins = {each.replay_from for each in chosen}
        if len(begins) == 1 and min(begins) < target:
            return None, f"all stages would run the iterations from {min(begins)} again"
        return chosen, ""

    def _demands(self, chosen: list[StageState], target: int) -> Iterator[tuple[int, int, str]]:
        """Yield the stages that must begin earlier: stage, latest iteration to begin with, cause."""
        begins = [each.replay_from for each in chosen]
        for link in self._pipelines.links:
            for iteration in range(begins[link.receiver], min(target, begins[link.sender])):
                if (wire := self._found.broken_wire(link, iteration)) is not None:
                    sender, receiver = wire
                    yield (
                        link.sender,
                        iteration,
                        f"the log of rank {sender} for rank {receiver} of iteration {iteration} is missing",
                    )
                    break
        for coupling in self._pipelines.couplings:
            limit = min(begins[stage] for stage in coupling.stages)
            for stage in coupling.stages:
                if begins[stage] > limit:
                    yield stage, limit, f"stages {coupling.stages} share {coupling.reason}"

    def describe(self, chosen: list[StageState], target: int) -> ScopePlan:
        """Return the plan that restores the chosen states."""
        nodes = self._pipelines.node_of
        stages = {
            stage: StagePlan(
                target=target,
                replay_from=state.replay_from,
                sources=Ordered(state.versions, nodes),
            )
            for stage, state in enumerate(chosen)
        }
        begins = [each.replay_from for each in chosen]
        replaying = frozenset(stage for stage, begin in enumerate(begins) if begin < target)
        scopes = tuple(
            Scope(
                segments=self._pipelines.segments(members),
                replay_from=min(begins[stage] for stage in members),
                logs=tuple(self._logs(members, begins, target)),
                records={
                    stage: tuple(self._records(stage, chosen[stage].iteration, target))
                    for stage in sorted(members)
                },
            )
            for members in self._pipelines.joined(replaying)
        )
        return ScopePlan(target=target, stages=stages, scopes=scopes)

    def _logs(self, members: frozenset[int], begins: list[int], target: int) -> Iterator[SentLog]:
        """Yield the logs that the stages of a scope read, each from the place nearest to its reader."""
        for iteration in range(min(begins[stage] for stage in members), target):
            read = [
                self._found.log(link, wire, iteration)
                for link in self._pipelines.links
                if link.receiver in members
                and begins[link.receiver] <= iteration < begins[link.sender]
                for wire in self._pipelines.wires(link)
            ]
            yield from sorted(read, key=lambda each: (each.receiver, each.sender, each.direction))

    def _records(self, stage: int, iteration: int, target: int) -> Iterator[KeptRecord]:
        """Yield the records that answer for a stage after the iteration of its whole state."""
        for each in range(iteration + 1, target + 1):
            record = self._found.record(stage, each)
            assert record is not None, "states without records are not chosen"
            yield record
