"""A job while some of its ranks are dead, as one live rank sees it: its beginning, and seams into Megatron.

Nothing that Megatron has built changes: groups, sizes, buffers and scales stay those of the healthy job.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.training import get_args, training

from megatron.fault_tolerance.degraded.deputies import Deputies, Memory
from megatron.fault_tolerance.degraded.executor import Executor
from megatron.fault_tolerance.degraded.live_groups import LiveGroups
from megatron.fault_tolerance.degraded.roles import CellBatches, Place, layout_of_job
from megatron.fault_tolerance.degraded.rules import check_job
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.loop.listeners import Built, Listeners
from moe_ft.planning.schedules import Pipelines, choose_deputies
from moe_ft.saying import say


class Degradation:
    """Seams of one rank that run iterations without dead ranks. Owned by the training thread.

    Attributes:
        deputies: shards of dead ranks that this rank has.
    """

    def __init__(self, patches: Patches) -> None:
        """Wrap what an iteration needs, before `pretrain` is called, until the patches end."""
        self._patches = patches
        self._batches, self.deputies = CellBatches(), Deputies()
        self._executor: Executor | None = None
        self._batches.install(patches)
        self.deputies.install(patches)
        patches.wrap(training, "train_step", self._train_step)

    def run_healthy(self, built: Built) -> None:
        """Run iterations of the whole job by the executor from the next one on. Called by all ranks."""
        place = Place(layout_of_job(get_args()), dist.get_rank())
        self._executor = Executor(place, frozenset(), built[0], self._batches, None)

    def begin(
        self,
        dead: Iterable[int],
        built: Built,
        memory: Memory,
        iteration: int,
        listeners: Listeners,
    ) -> None:
        """Run iterations without dead ranks from the next one on. Called by all live ranks, between two.

        No snapshots are taken any more: the agreement on them takes all ranks.

        Args:
            dead: global ranks.
            memory: of this node.
            iteration: the next one; the state of the dead ranks before it is in memory.

        Raises:
            ConfigError: if peers cannot play roles in this job.
            PlanError: if nobody can play a role of these ranks.
            RepairError: if a shard that this rank would hold is not in memory.
        """
        args, lost = get_args(), frozenset(dead)
        check_job(args)
        place = Place(layout_of_job(args), dist.get_rank())
        roles = place.layout.roles_of(lost)
        pipelines = Pipelines(
            num_stages=place.layout.num_stages,
            num_pipelines=place.layout.num_groups,
            num_micro_batches=1,  # does not matter here
        )
        chosen = {
            place.rank_of(role): place.rank_of((pipeline, role[1]))
            for role, pipeline in choose_deputies(pipelines, roles).items()
        }
        listeners.suspend(iteration)
        groups = LiveGroups(lost, chosen, f"without_{'_'.join(map(str, sorted(lost)))}")
        groups.install(self._patches)
        for rank, deputy in sorted(chosen.items()):
            if deputy == place.rank:
                self.deputies.take(rank, built, memory, iteration)
        if self.deputies.shards:
            self._patches.wrap(built[1], "step", partial(self._step, built[1]))
        if place.rank == min(groups.ranks):
            played = ", ".join(f"{rank} by {deputy}" for rank, deputy in sorted(chosen.items()))
            say(
                f"training continues with iteration {iteration + 1} without the dead ranks, whose roles are "
                f"played ({played}); no snapshots are taken any more"
            )
        self._executor = Executor(place, roles, built[0], self._batches, groups)

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._executor is not None:  # instead of forward_backward_func
            args = (*args[:6], self._executor, *args[7:])
        return original(*args, **kwargs)

    def _step(self, optimizer: Any, original: Callable[..., Any]) -> Any:
        with self.deputies.stepping(optimizer):
            return original()
