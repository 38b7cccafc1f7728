"""An iteration as a list of operations: forward and backward passes of cells, in the order of a schedule.

The executor takes the place of Megatron's schedule in `train_step`: it has the same arguments and the same
result, and calls Megatron's own `forward_step` and `backward_step`. While no rank is dead its schedule is
1F1B, and every bit is that of Megatron's. Tensors go between stages point to point, without tags: a receiver
takes those of a sender in the order in which the sender's list makes them.

Source: ReCycle (adaptive pipelining); weight_gradients.py has its decoupled backward passes.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron.fault_tolerance.degraded.live_groups import LiveGroups
from megatron.fault_tolerance.degraded.roles import (
    CellBatches,
    RoleGradients,
    RolePlace,
    RoleRandomness,
)
from megatron.fault_tolerance.degraded.weight_gradients import LateGradients
from moe_ft.errors import RepairError
from moe_ft.planning.schedules import (
    Cell,
    Operation,
    OpKind,
    Pipelines,
    Role,
    Schedule,
    plan_schedule,
)

_STEP = {OpKind.FORWARD: 1, OpKind.BACKWARD: -1}


class Executor:
    """Runs the operations of one rank. Owned by the training thread.

    Attributes:
        randomness: of its roles.
    """

    def __init__(
        self,
        place: RolePlace,
        dead: Set[Role],
        model: Sequence[Any],
        batches: CellBatches,
        groups: LiveGroups | None,
        late: LateGradients | None = None,
        *,
        is_whole: bool = True,
    ) -> None:
        """Run no operation yet.

        Args:
            dead: roles whose ranks are dead.
            model: the one chunk of this rank, as DDP wraps it.
            groups: of live ranks; None if none is dead.
            late: puts gradients of weights off; None: they come with those of inputs.
            is_whole: whether one peer plays all of a role, or peers share its micro-batches. Then sums have
                another order, and each peer draws random numbers of its own for the role.
        """
        (chunk,) = model
        self._place = place
        self._dead = frozenset(dead)
        self._batches = batches
        self._groups = groups
        self._late = late
        self._is_whole = is_whole
        self._pipeline, self._stage = place.role
        self._is_last = self._stage == place.layout.num_stages - 1
        self.randomness = RoleRandomness(self._pipeline, is_whole=is_whole)
        self._gradients = RoleGradients(chunk, self._pipeline)

    def __call__(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,  # noqa: ARG002 - batches are read by cell
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
        **others: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Run forward and backward passes of an iteration. Called by all live ranks.

        Returns:
            The losses of the roles that this rank plays in the last stage, an entry for each: those of its
            micro-batches added up. Empty in other stages.
        """
        assert not others.get("forward_only"), "evaluations run Megatron's schedule"
        (chunk,) = model
        config = get_model_config(chunk)
        groups = pg_collection or schedules._build_default_pg_collection()
        more = None if self._late is None else self._late.most_more_held
        schedule = plan(self._place, self._dead, num_microbatches, more, is_whole=self._is_whole)
        shapes = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        everyone = None if self._groups is None else self._groups.everyone
        iteration = _Iteration(
            mail=Mail(schedule, self._place, shapes[0], config.pipeline_dtype, everyone),
            forward=(forward_step_func, chunk, num_microbatches, config, groups.cp.size()),
        )
        with chunk.no_sync():
            self._run(schedule, iteration)
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()
        if self._groups is not None and config.calculate_per_token_loss:
            self._groups.count(iteration.num_tokens)
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                [chunk],
                iteration.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
        if self._groups is not None and self._groups.idle:
            dist.barrier(self._groups.everyone)  # or those would run all iterations at once
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return self._losses(iteration)

    def _losses(self, iteration: "_Iteration") -> list[dict[str, torch.Tensor]]:
        losses = [added_up(each) for _, each in sorted(iteration.losses.items()) if each]
        has_means = any(each.numel() < 2 for entry in losses for each in entry.values())
        if has_means and not self._is_whole:
            raise RepairError(
                "peers cannot share a role: the loss function returns means. Have it return a sum and the "
                "number of its tokens"
            )
        return losses

    def leave(self) -> None:
        """Leave an iteration that was broken off in another role: gradients are those of the own one."""
        self._gradients.play(self._pipeline)

    def _run(self, schedule: Schedule, iteration: "_Iteration") -> None:
        operations = schedule.operations.get(self._place.role, ())  # none on an idle rank
        roles = sorted({each.cell.pipeline for each in operations})
        self._gradients.begin(roles)
        for operation in operations:
            self._play(operation.cell.pipeline)
            if operation.kind is OpKind.WEIGHTS:
                assert self._late is not None
                self._late.run(operation.cell)
                continue
            source = self._neighbour(schedule, operation, -1)
            received = None if source is None else iteration.mail.receive(source, operation)
            if operation.kind is OpKind.FORWARD:
                batch = self._batches.read(self._place, operation.cell)
                made = iteration.run_forward(operation.cell, batch, received, is_last=self._is_last)
            else:
                with nullcontext() if self._late is None else self._late.put_off(operation.cell):
                    made = iteration.run_backward(operation.cell, received)
            target = self._neighbour(schedule, operation, 1)
            if target is not None:
                iteration.mail.send(made, target)
                if operation.kind is OpKind.FORWARD:
                    iteration.let_go(made)
        iteration.mail.finish()
        self._play(self._pipeline)
        self._gradients.add_up(roles)

    def _play(self, pipeline: int) -> None:
        self.randomness.play(pipeline)
        self._gradients.play(pipeline)

    def _neighbour(self, schedule: Schedule, operation: Operation, way: int) -> Role | None:
        """Return who runs the operation's cell in the stage before it, or after it; None if there is none."""
        stage = self._stage + way * _STEP[operation.kind]
        if not 0 <= stage < self._place.layout.num_stages:
            return None
        return schedule.runners[operation.cell, stage], stage


@lru_cache(maxsize=4)
def plan(
    place: RolePlace,
    dead: frozenset[Role],
    num_micro_batches: int,
    more: int | None = None,
    *,
    is_whole: bool = True,
) -> Schedule:
    """Return the schedule of an iteration.

    Args:
        more: micro-batches that a rank can hold beyond 1F1B where gradients of weights are put off; None:
            they are not.
        is_whole: as for the executor.
    """
    pipelines = Pipelines(
        num_stages=place.layout.num_stages,
        num_pipelines=place.layout.num_groups,
        num_micro_batches=num_micro_batches,
    )
    return plan_schedule(
        pipelines, dead, is_split=more is not None, is_whole=is_whole, most_more_held=more or 0
    )


class _Iteration:
    """Passes of one iteration, and what is between forward and backward of a cell."""

    def __init__(self, *, mail: "Mail", forward: tuple[Any, ...]) -> None:
        self.mail = mail
        self._forward_step, self._chunk, self._num_micro_batches, self._config, self._cp = forward
        self._inputs: dict[Cell, Any] = {}
        self._outputs: dict[Cell, Any] = {}
        self._has_begun = False
        self.losses: dict[int, list[dict[str, torch.Tensor]]] = defaultdict(list)  # by pipeline
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")

    def run_forward(self, cell: Cell, batch: Any, received: Any, *, is_last: bool) -> Any:
        output, num_tokens = schedules.forward_step(
            self._forward_step,
            batch,
            self._chunk,
            self._num_micro_batches,
            received,
            self.losses[cell.pipeline],
            self._config,
            self._cp,
            is_first_microbatch=not self._has_begun,
            current_microbatch=cell.micro_batch,
            is_last_stage=is_last,
        )
        self._has_begun = True
        self.num_tokens += num_tokens
        self._inputs[cell], self._outputs[cell] = received, output
        return output

    def run_backward(self, cell: Cell, received: Any) -> Any:
        return schedules.backward_step(
            self._inputs.pop(cell), self._outputs.pop(cell), received, self._config
        )

    def let_go(self, output: Any) -> None:
        """Free the values of an output that was sent: backward needs its graph alone."""
        schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)


class Mail:
    """Tensors between stages in one iteration, without tags. Owned by the training thread."""

    def __init__(
        self, schedule: Schedule, place: RolePlace, shape: Any, dtype: Any, group: Any
    ) -> None:
        self._expected: Mapping[Role, deque[Operation]] = {
            sender: deque(order)
            for (sender, receiver), order in schedule.messages().items()
            if receiver == place.role
        }
        self._place = place
        self._shape = shape
        self._dtype = dtype
        self._group = group
        self._arrived: dict[Operation, torch.Tensor] = {}
        self._sent: list[tuple[torch.Tensor, Any]] = []

    def receive(self, sender: Role, operation: Operation) -> torch.Tensor:
        """Return what an operation of another stage has made for this one."""
        while operation not in self._arrived:
            tensor = torch.empty(
                self._shape,
                dtype=self._dtype,
                device=torch.cuda.current_device(),
                requires_grad=True,
            )
            work = dist.irecv(tensor, src=self._place.rank_of(sender), group=self._group)
            assert work is not None, "both ranks are in the group"
            work.wait()
            self._arrived[self._expected[sender].popleft()] = tensor
        return self._arrived.pop(operation)

    def send(self, tensor: torch.Tensor, receiver: Role) -> None:
        """Begin to send a tensor, whose values stay until they have been sent."""
        kept = tensor.detach().contiguous()
        work = dist.isend(kept, dst=self._place.rank_of(receiver), group=self._group)
        # Those that have arrived need no memory any more.
        self._sent = [each for each in self._sent if not each[1].is_completed()]
        self._sent.append((kept, work))

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for _, work in self._sent:
            work.wait()
        assert not self._arrived and not any(self._expected.values())


def added_up(entries: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return one entry for the losses of a role, as `train_step` sums them up for one rank."""
    found = {}
    for name in entries[0]:
        rows = torch.vstack([each[name].view(-1) for each in entries])
        # A value alone is a mean, two are a sum and what to divide it by.
        found[name] = rows.mean(dim=0) if rows.shape[1] == 1 else rows.sum(dim=0)
    return found
