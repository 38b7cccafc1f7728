"""A job while some of its ranks are dead, as one live rank sees it: when it begins and ends, and the seams.

Nothing that Megatron has built changes: groups, sizes, buffers and scales stay those of the healthy job.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args, training

from megatron.fault_tolerance.degraded.deputies import Deputies, RoleNorm
from megatron.fault_tolerance.degraded.executor import Executor
from megatron.fault_tolerance.degraded.live_groups import LiveGroups, Recording
from megatron.fault_tolerance.degraded.roles import CellBatches, RolePlace, layout_of_job
from megatron.fault_tolerance.degraded.rules import Usage, check_job, check_room, check_weights
from megatron.fault_tolerance.degraded.weight_gradients import LateGradients
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Function, Layer, Layers
from moe_ft.loop.listeners import Built, Listeners
from moe_ft.planning.schedules import Pipelines, choose_deputies
from moe_ft.saying import warn


class Degradation:
    """Seams of one rank that run iterations without dead ranks. Owned by the training thread.

    Attributes:
        deputies: shards of dead ranks that this rank has.
        chosen: by dead or idle rank, the live one that plays its role.
    """

    def __init__(
        self, data_sets: DataSets, late: LateGradients | None = None, *, is_whole: bool = True
    ) -> None:
        """Run iterations of the whole job.

        Args:
            late: puts gradients of weights off in iterations of the executor; None: they are not.
            is_whole: whether one peer plays all of a role, bit for bit, or peers share it, which is faster.
        """
        self._late = late
        self._is_whole = is_whole
        self._batches = CellBatches(data_sets)
        self.deputies = Deputies()
        self.chosen: Mapping[int, int] = {}
        self._executor: Executor | None = None
        self._layers = Layers()
        self._while_dead = ExitStack()
        self._has_room = False

    def install(self, layers: Layers) -> None:
        """Put layers around what an iteration needs."""
        self._layers = layers
        self.deputies.install(layers)
        functions = {"train_step": self._train_step, "setup_model_and_optimizer": self._set_up}
        layers.put(Layer.ROLES, functions)

    def run_healthy(self, built: Built) -> None:
        """Run iterations of the whole job by the executor from the next one on. Called by all ranks."""
        place = RolePlace(layout_of_job(get_args()), dist.get_rank())
        self._executor = Executor(place, frozenset(), built[0], self._batches, None, self._late)

    def begin(
        self,
        dead: Iterable[int],
        built: Built,
        listeners: Listeners,
        recording: Recording = nullcontext,
        connect_s: float | None = None,
    ) -> None:
        """Run iterations without dead ranks from the next one on. Called by all live ranks, between two.

        The listeners are suspended. Their next setup recovers the state of all ranks, that of the dead ones
        on their deputies, which take snapshots of it from then on.

        Args:
            dead: global ranks; all that are dead, if some were before.
            recording: a context for whatever makes groups.
            connect_s: for live ranks to connect; None for as long as an operation may take.

        Raises:
            ConfigError: if peers cannot play roles in this job.
            PlanError: if nobody can play a role of these ranks.
        """
        self.end(listeners)
        args, lost = get_args(), frozenset(dead)
        check_job(args)
        place = RolePlace(layout_of_job(args), dist.get_rank())
        roles = place.layout.roles_of(lost)
        pipelines = Pipelines(
            num_stages=place.layout.num_stages,
            num_pipelines=place.layout.num_groups,
            num_micro_batches=1,  # does not matter here
        )
        ranks_of = place.layout.ranks_of
        self.chosen = chosen = {
            rank: deputy
            for role, pipeline in choose_deputies(pipelines, roles).items()
            for rank, deputy in zip(ranks_of(role), ranks_of((pipeline, role[1])), strict=True)
        }
        # A repair has a store of its own for each round.
        name = f"without_{'_'.join(map(str, sorted(lost)))}"
        groups = LiveGroups(lost, chosen, name, recording, connect_s)
        self._while_dead.enter_context(groups.answering())
        self._executor = Executor(
            place, roles, built[0], self._batches, groups, self._late, is_whole=self._is_whole
        )
        for rank in chosen:
            if chosen[rank] == place.rank:
                self.deputies.take(rank, built)
        if self.deputies.shards:
            step = partial(self._step, built[1])
            layers = self._while_dead.enter_context(Layers())
            layers.put(Layer.ROLES, {"ChainedOptimizer.step": step}, of=built[1])
        last = dist.get_world_size() - 1
        if last in chosen:  # Megatron's last rank prints log lines
            patches = self._while_dead.enter_context(Patches())
            patches.set(
                training, "print_rank_last", _print if chosen[last] == place.rank else _leave_out
            )
        if place.rank == min(groups.ranks):
            played = ", ".join(f"{rank} by {deputy}" for rank, deputy in sorted(chosen.items()))
            warn(f"training continues without the dead ranks, whose roles are played ({played})")

    def end(self, listeners: Listeners) -> None:
        """Run the loop's own iterations again: all ranks live. Called by all of them, as `begin`.

        Their groups have their members again. The next setup recovers the state, on ranks that are back too.
        """
        self._while_dead.close()
        if self._executor is not None:
            self._executor.leave()
        self._executor = None
        self.chosen = {}
        self.deputies.shards.clear()

    def _set_up(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if get_args().use_distributed_optimizer:  # roles are refused without
            check_weights(result[0])
            norm = RoleNorm(result[1], self.deputies)
            self._layers.put(Layer.ROLES, {"ChainedOptimizer.get_grad_norm": norm}, of=result[1])
        return result

    def _train_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if self._executor is not None:  # instead of forward_backward_func
            args = (*args[:6], self._executor, *args[7:])
        if self._late is not None:
            self._late.model = args[2]
        before = torch.cuda.memory_allocated()
        result = original(*args, **kwargs)
        if (
            self._executor is None and not self._has_room
        ):  # the first iteration: no later one needs more
            used = Usage(
                state=torch.cuda.memory_allocated(),
                activations=torch.cuda.max_memory_allocated() - before,
            )
            limit = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            check_room(get_args(), args[2], dist.get_rank(), used, limit)
            self._has_room = True
        self.deputies.follow(args[3])
        return result

    def _step(self, optimizer: Any, original: Function) -> Any:
        with self.deputies.stepping(optimizer):
            return original()


def _print(message: str) -> None:
    print(message, flush=True)


def _leave_out(message: str) -> None:
    """Leave a log line to the rank that plays the role of the last one."""
