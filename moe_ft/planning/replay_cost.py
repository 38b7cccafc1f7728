"""Cost of running iterations again: a few stages alone against the whole pipeline.

A pipeline of S stages and M micro-batches idles for the share (S-1) / (M+S-1) of an iteration, while it fills
and drains. A stage that runs an iteration again alone has its input at hand and never waits. The unit here is
a slot: the time of one micro-batch on one model chunk, forward and backward. All stages count as equally
fast. Reading logs and the optimizer step are left out.

Pure. planning/scope.py plans which stages these are. Source: MoEvement, section 3.4.
"""

import math
from dataclasses import dataclass

from moe_ft.planning.remains import Pipelines
from moe_ft.planning.scope import Scope, ScopePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Pipeline schedule of a job: 1F1B, or interleaved if a rank has several model chunks.

    Attributes:
        num_stages: S, pipeline ranks.
        num_microbatches: M of an iteration, for each data-parallel rank.
        num_chunks: model chunks (virtual stages) of each pipeline rank.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int = 1

    @property
    def bubble_share(self) -> float:
        """Share of an iteration in which a stage waits for others."""
        return (self.num_stages - 1) / self.slots(self.num_stages)

    def slots(self, num_live: int) -> int:
        """Return the length of an iteration of neighbouring stages that are linked live; 0 of none."""
        return self.num_chunks * self.num_microbatches + num_live - 1 if num_live else 0

    def speedup(self, num_live: int = 1) -> float:
        """Return how many times faster neighbouring stages run an iteration again than all stages do."""
        return self.slots(self.num_stages) / self.slots(num_live)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayCost:
    """Cost of a planned recovery after everything is restored.

    Attributes:
        replays: ``[stage]`` iterations that each stage runs again.
        slots: length of the replay; scopes run at the same time.
        global_slots: length if all stages ran the iterations from the earliest one to the target.
    """

    replays: tuple[int, ...]
    slots: int
    global_slots: int

    @property
    def speedup(self) -> float:
        """Length of the global replay in multiples of this one; infinite if nothing is run again."""
        return self.global_slots / self.slots if self.slots else math.inf


def cost_of(plan: ScopePlan, pipelines: Pipelines, schedule: Schedule) -> ReplayCost:
    """Return the cost of a plan."""
    first = min((scope.replay_from for scope in plan.scopes), default=plan.target)
    return ReplayCost(
        replays=tuple(plan.stages[stage].num_replays for stage in range(pipelines.num_stages)),
        slots=max((_slots(plan, each, pipelines, schedule) for each in plan.scopes), default=0),
        global_slots=(plan.target - first) * schedule.slots(pipelines.num_stages),
    )


def _slots(plan: ScopePlan, scope: Scope, pipelines: Pipelines, schedule: Schedule) -> int:
    members = frozenset(scope.stages)
    return sum(
        schedule.slots(_longest(pipelines, members & plan.replaying(iteration)))
        for iteration in range(scope.replay_from, plan.target)
    )


def speedup_of_one_failure(pipelines: Pipelines, schedule: Schedule) -> float:
    """Return how many times faster replays are than global ones, if any stage is as likely to fail.

    The stage that fails runs again with the stages that it is coupled to. No log is lost.
    """
    lengths = []
    for stage in range(pipelines.num_stages):
        coupled = (each.stages for each in pipelines.couplings if stage in each.stages)
        members = frozenset({stage}).union(*coupled)
        lengths.append(schedule.slots(_longest(pipelines, members)))
    return schedule.slots(pipelines.num_stages) * len(lengths) / sum(lengths)


def _longest(pipelines: Pipelines, stages: frozenset[int]) -> int:
    return max((len(run) for run in pipelines.segments(stages)), default=0)
