"""Local recovery of a job: a plan in which only some stages run iterations again, and the search for it.

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

Pure: the same remains in any order give the same plan. recovery/plan.py calls it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_ft.format.identity import History
from moe_ft.planning.branches import is_alive
from moe_ft.planning.recovery import (
    Ordered,
    Plan,
    StagePlan,
    Version,
    left_of,
    order_histories,
    versions_of,
)
from moe_ft.planning.remains import FoundLog, PipelineLayout, Remains
from moe_ft.planning.restorable import Restorable, StageState
from moe_ft.planning.scope import KeptRecord, Place, Scope, SentLog

_MOST_REASONS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWay:
    """Way of all stages to one target.

    Attributes:
        stages: one outside of every scope restores the target itself.
        scopes: see `Plan`.
    """

    target: int
    stages: Mapping[int, StagePlan]
    scopes: tuple[Scope, ...]

    @property
    def worth(self) -> tuple[int, int]:
        """Order among ways: the newest target first, then what runs the fewest iterations again."""
        return self.target, -sum(stage.num_replays for stage in self.stages.values())


def plan_local(
    plans: Sequence[Plan],
    versions: Sequence[Version],
    logs: Sequence[FoundLog],
    pipelines: PipelineLayout,
    can_replay: Callable[[str], bool],
    is_evaluated: Callable[[int], bool] = lambda iteration: False,
    has_same_records: Callable[[str], bool] = lambda settings: True,
    unreadable: frozenset[Place] = frozenset(),
) -> tuple[Plan | None, str]:
    """Return a local recovery that loses or repeats less than the best global one.

    Args:
        plans: the global ones, best first.
        versions, logs: everything that was found, in any order.
        can_replay: whether a replay may use what was made with some settings, given as JSON.
        is_evaluated: whether this start evaluates the state of an iteration.
        has_same_records: whether this start makes the records that a start with some settings has made, and
            evaluates the same states; the settings are given as JSON.
        unreadable: places of logs and records that a rank has tried to read, in vain.

    Returns:
        The plan, or None if the best global recovery is as good. And the reason why nothing newer is reached,
        or why no stage recovers alone; empty if neither is so, or if nothing has to be run again.
    """
    if not versions:
        return None, ""
    run = plans[0].history if plans else order_histories(versions)[0]
    remains = _remains_of(run, versions, logs, can_replay)
    newest = max((each.iteration for each in remains.versions), default=0)
    oldest = min((each.iteration for each in remains.logs), default=newest)
    own_record_only = {
        *filter(is_evaluated, range(oldest, newest + 1)),
        *_changed_after(run, logs, has_same_records),
    }
    remains = replace(remains, own_record_only=frozenset(own_record_only), unreadable=unreadable)
    found, reason = search_way(remains, pipelines)
    if found is not None and found.target < newest and not reason:
        reason = f"iteration {newest}: no stage has the state of all its ranks"
    if found is None or (plans and _worth_of(plans[0]) >= found.worth):
        return None, reason if _loses_something(plans, newest) else ""
    versions_used = [
        version
        for stage in found.stages.values()
        for rank in stage.sources
        for version in versions_of(stage.sources, rank)
    ]
    return (
        Plan(
            iteration=found.target,
            lineage=plans[0].lineage if plans else versions_used[0].lineage,
            history=run,
            start=max(each.start for each in versions_used),
            stages=found.stages,
            elsewhere=plans[0].elsewhere if plans else left_of(run, versions, pipelines.node_of),
            scopes=found.scopes,
        ),
        reason,
    )


def is_behind(plans: Sequence[Plan], versions: Sequence[Version]) -> bool:
    """Return whether the best global recovery runs iterations again, or is older than the newest state."""
    if not versions:
        return False
    run = plans[0].history if plans else order_histories(versions)[0]
    alive = [each.iteration for each in versions if is_alive(each.iteration, each.history, run)]
    return _loses_something(plans, max(alive, default=0))


def _changed_after(
    run: History, logs: Sequence[FoundLog], has_same_records: Callable[[str], bool]
) -> Iterator[int]:
    """Yield the states of a run that were made, or evaluated, with other settings than those of now."""
    for each in logs:
        state = each.iteration + 1
        if is_alive(state, each.history, run) and not has_same_records(each.record_settings):
            yield state


def _loses_something(plans: Sequence[Plan], newest: int) -> bool:
    """Return whether the best global recovery is worse than the newest state would be; see `is_behind`."""
    return not plans or plans[0].num_replays > 0 or plans[0].iteration < newest


def _worth_of(plan: Plan) -> tuple[int, int]:
    return LocalWay(target=plan.iteration, stages=plan.stages, scopes=plan.scopes).worth


def _remains_of(
    run: History,
    versions: Sequence[Version],
    logs: Sequence[FoundLog],
    can_replay: Callable[[str], bool],
) -> Remains:
    """Return what is alive of a run. Whole states may have been made with any settings."""
    usable = [each for each in logs if can_replay(each.replay_settings)]
    return Remains(
        versions=[
            each
            for each in versions
            if is_alive(each.iteration, each.history, run)
            and (each.window == 1 or can_replay(each.replay_settings))
        ],
        logs=[
            sent
            for each in usable
            if is_alive(each.iteration + 1, each.history, run)
            for sent in _sent_logs(each)
        ],
        records=[
            KeptRecord(
                rank=each.rank,
                iteration=each.iteration,
                node=each.node,
                path=each.path,
                numbers=each.numbers,
            )
            for each in usable
            if each.numbers is not None and is_alive(each.iteration, each.history, run)
        ],
    )


def _sent_logs(log: FoundLog) -> Iterator[SentLog]:
    for receiver, direction in log.receivers:
        yield SentLog(
            sender=log.rank,
            receiver=receiver,
            direction=direction,
            iteration=log.iteration,
            node=log.node,
            path=log.path,
        )


def search_way(remains: Remains, pipelines: PipelineLayout) -> tuple[LocalWay | None, str]:
    """Return the way to the newest target that runs the fewest iterations again; None if all must.

    And for people why newer iterations cannot be reached, empty if there are none.
    """
    search = _Search(Restorable(remains, pipelines), pipelines)
    reasons: list[str] = []
    for target in search.targets():
        chosen, reason = search.choose(target)
        if chosen is not None:
            return search.describe(chosen, target), _join(reasons)
        reasons.append(f"iteration {target}: {reason}")
    reason = _join(reasons) or "no stage has the state of all its ranks"
    return None, reason


def _join(reasons: Sequence[str]) -> str:
    return "; ".join([*reasons[:_MOST_REASONS], *["..."] * (len(reasons) > _MOST_REASONS)])


class _Search:
    """Search for what each stage restores. Changes nothing."""

    def __init__(self, found: Restorable, pipelines: PipelineLayout) -> None:
        self._found = found
        self._pipelines = pipelines

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

    def describe(self, chosen: list[StageState], target: int) -> LocalWay:
        """Return the way that restores the chosen states."""
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
                stages=tuple(sorted(members)),
                logs=tuple(self._logs(members, begins, target)),
                records={
                    stage: tuple(self._records(stage, chosen[stage].iteration, target))
                    for stage in sorted(members)
                },
            )
            for members in self._pipelines.joined(replaying)
        )
        return LocalWay(target=target, stages=stages, scopes=scopes)

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
