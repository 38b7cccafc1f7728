"""A job while some of its ranks are dead, as one live rank sees it: when it begins and ends, and the seams.

Nothing that Megatron has built changes: groups, sizes, buffers and scales stay those of the healthy job.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.training import get_args, training

from megatron.fault_tolerance.degraded.deputies import Deputies, RoleNorm, facts_of_dead
from megatron.fault_tolerance.degraded.executor import Executor
from megatron.fault_tolerance.degraded.live_groups import LiveGroups, Recording
from megatron.fault_tolerance.degraded.roles import CellBatches, Place, layout_of_job
from megatron.fault_tolerance.degraded.rules import Usage, check_job, check_room, check_weights
from megatron.fault_tolerance.degraded.weight_gradients import LateGradients
from megatron.fault_tolerance.repair.catch_up import COUNTERS
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.background import ThreadWorker
from moe_ft.engine.seats import Seat, Seats
from moe_ft.events import EventLog
from moe_ft.loop.checkpoints import Checkpoints, checkpoints_of_dead_rank
from moe_ft.loop.dead_ranks import DeadRank, Idle, Together
from moe_ft.loop.listeners import Built, Listeners, LoopState
from moe_ft.planning.schedules import Pipelines, choose_deputies
from moe_ft.saying import say


class Degradation:
    """Seams of one rank that run iterations without dead ranks. Owned by the training thread.

    Attributes:
        deputies: shards of dead ranks that this rank has.
        chosen: by dead or idle rank, the live one that plays its role.
    """

    def __init__(
        self, patches: Patches, late: LateGradients | None = None, *, is_whole: bool = True
    ) -> None:
        """Wrap what an iteration needs, before `pretrain` is called, until the patches end.

        Args:
            late: puts gradients of weights off in iterations of the executor; None: they are not.
            is_whole: whether one peer plays all of a role, bit for bit, or peers share it, which is faster.
        """
        self._late, self._is_whole = late, is_whole
        if late is not None:
            late.install(patches)
        self._batches, self.deputies = CellBatches(), Deputies()
        self.chosen: Mapping[int, int] = {}
        self._executor: Executor | None = None
        self._stand_in: Together | Idle | None = None  # for the checkpoints of this rank
        self._patches = Patches()  # while ranks are dead
        self._has_room = False
        self._batches.install(patches)
        self.deputies.install(patches)
        patches.wrap(training, "train_step", self._train_step)
        patches.wrap(training, "setup_model_and_optimizer", self._set_up)

    def run_healthy(self, built: Built) -> None:
        """Run iterations of the whole job by the executor from the next one on. Called by all ranks."""
        place = Place(layout_of_job(get_args()), dist.get_rank())
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
        place = Place(layout_of_job(args), dist.get_rank())
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
        groups.install(self._patches)
        self._executor = Executor(
            place, roles, built[0], self._batches, groups, self._late, is_whole=self._is_whole
        )
        self._share_checkpoints(chosen, built, listeners, groups)
        if self.deputies.shards:
            self._patches.wrap(built[1], "step", partial(self._step, built[1]))
        last = dist.get_world_size() - 1
        if last in chosen:  # Megatron's last rank prints log lines
            self._patches.set(
                training, "print_rank_last", _print if chosen[last] == place.rank else _leave_out
            )
        if place.rank == min(groups.ranks):
            played = ", ".join(f"{rank} by {deputy}" for rank, deputy in sorted(chosen.items()))
            say(f"training continues without the dead ranks, whose roles are played ({played})")

    def end(self, listeners: Listeners) -> None:
        """Run the loop's own iterations again: all ranks live. Called by all of them, as `begin`.

        Their groups have their members again. The next setup recovers the state, on ranks that are back too.
        """
        self._patches.__exit__()
        if self._executor is not None:
            self._executor.leave()
        self._executor, self.chosen = None, {}
        self.deputies.shards.clear()
        if self._stand_in is not None:
            listeners.replace(self._stand_in, self._stand_in.own)
            self._stand_in = None
        listeners.find(Checkpoints).sit(None)

    def _share_checkpoints(
        self, chosen: Mapping[int, int], built: Built, listeners: Listeners, groups: LiveGroups
    ) -> None:
        """Have the dead and idle ranks for which this one speaks take part in checkpoints.

        An idle rank takes no part itself: nobody may speak for a rank twice.
        """
        assert self._executor is not None
        checkpoints, args = listeners.find(Checkpoints), get_args()
        tell = partial(_tell_idle, groups, listeners.loop)
        if dist.get_rank() in groups.idle:
            checkpoints.close()  # its deputy has the memory now, and may remove it
            self._stand_in = Idle(checkpoints, tell)
            listeners.replace(checkpoints, self._stand_in)
            return
        limit_s = 60.0 * args.distributed_timeout_minutes
        seats = Seats(
            {rank: chosen.get(rank, rank) for rank in range(dist.get_world_size())},
            dist.get_rank(),
            groups.make_for_agreement,
            limit_s,
        )
        checkpoints.sit(Seat(seats, seats.own))
        dead = {}
        for rank in sorted(each for each in seats.ranks if each != seats.own):
            role = Place(layout_of_job(args), rank).role
            change = partial(
                facts_of_dead,
                seat=Seat(seats, rank),
                randomness=self._executor.randomness.of(role[0]),
            )
            log = EventLog(checkpoints.log.directory, rank)
            dead[rank] = DeadRank(
                checkpoints=checkpoints_of_dead_rank(checkpoints, change, log),
                shard=self.deputies.take(rank, built),
                log=log,
                worker=ThreadWorker(f"rank-{rank}"),
            )
        self._stand_in = Together(checkpoints, dead, seats, limit_s, tell)
        listeners.replace(checkpoints, self._stand_in)

    def _set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if get_args().use_distributed_optimizer:  # roles are refused without
            check_weights(result[0])
            RoleNorm(result[1], self.deputies).install()
        return result

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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

    def _step(self, optimizer: Any, original: Callable[..., Any]) -> Any:
        with self.deputies.stepping(optimizer):
            return original()


def _tell_idle(groups: LiveGroups, loop: LoopState) -> None:
    """Have idle ranks continue where a recovery has set the others. Called by all live ranks."""
    if not groups.idle:
        return
    args = get_args()
    source = min(set(groups.ranks) - groups.idle)
    names = ("iteration", *COUNTERS)
    found = torch.tensor([float(getattr(args, name)) for name in names], dtype=torch.float64)
    dist.broadcast(found, src=source, group=groups.everyone)
    if dist.get_rank() in groups.idle:
        *counts, num_operations = found.tolist()
        vars(args).update(zip(names, (*map(int, counts), num_operations), strict=True))
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        loop.iteration = args.iteration


def _print(message: str) -> None:
    print(message, flush=True)


def _leave_out(message: str) -> None:
    """Leave a log line to the rank that plays the role of the last one."""
