"""Local recovery of a job: a plan in which only some stages run iterations again.

planning/scope.py searches for it. This file arranges what was found for the search, and compares the result
with the best global recovery. Pure; recovery/plan.py calls it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_ft.format.identity import History
from moe_ft.planning.branches import is_alive
from moe_ft.planning.recovery import Plan, Version, left_of, order_histories, versions_of
from moe_ft.planning.remains import FoundLog, KeptRecord, PipelineLayout, Place, Remains, SentLog
from moe_ft.planning.scope import Scope, ScopePlan, plan_scope


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlan(Plan):
    """Recovery in which some stages run iterations again and the others keep the state that they have.

    Attributes:
        scope: the stages that do, and what answers at their borders.
    """

    scope: ScopePlan

    @property
    def is_local(self) -> bool:
        """True."""
        return True

    def scope_of(self, stage: int) -> Scope | None:
        """Return the scope that a stage is in; None if it runs nothing again."""
        return next((each for each in self.scope.scopes if stage in each.stages), None)


def plan_local(
    plans: Sequence[Plan],
    versions: Sequence[Version],
    logs: Sequence[FoundLog],
    pipelines: PipelineLayout,
    can_replay: Callable[[str], bool],
    is_evaluated: Callable[[int], bool] = lambda iteration: False,
    has_same_records: Callable[[str], bool] = lambda settings: True,
    unreadable: frozenset[Place] = frozenset(),
) -> tuple[LocalPlan | None, str]:
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
    decision = plan_scope(remains, pipelines)
    found, reason = decision.plan, decision.reason
    if found is not None and found.target < newest and not reason:
        reason = f"iteration {newest}: no stage has the state of all its ranks"
    if found is None or (plans and _worth(plans[0]) >= (found.target, -found.num_replays)):
        return None, reason if _loses_something(plans, newest) else ""
    versions_used = [
        version
        for stage in found.stages.values()
        for rank in stage.sources
        for version in versions_of(stage.sources, rank)
    ]
    return (
        LocalPlan(
            iteration=found.target,
            lineage=plans[0].lineage if plans else versions_used[0].lineage,
            history=run,
            start=max(each.start for each in versions_used),
            stages=found.stages,
            elsewhere=plans[0].elsewhere if plans else left_of(run, versions, pipelines.node_of),
            scope=found,
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


def _worth(plan: Plan) -> tuple[int, int]:
    return plan.iteration, -sum(stage.num_replays for stage in plan.stages.values())


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
