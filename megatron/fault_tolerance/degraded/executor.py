"""An iteration as a list of operations: forward and backward passes of cells, in the order of a schedule.

The executor takes the place of Megatron's schedule in `train_step`: it has the same arguments and the same
result, and calls Megatron's own `forward_step` and `backward_step`. While each rank has a device of its own
its schedule is 1F1B, and every bit is that of Megatron's. Gradients of all cells that a rank runs are added
up as they come: reductions of data-parallel ranks do the rest. Tensors go between stages point to point,
without tags: a receiver takes those of a sender in the order in which the sender's list makes them.

Source: ReCycle (adaptive pipelining); weight_gradients.py has its decoupled backward passes.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron.fault_tolerance.degraded.roles import CellBatches, RolePlace
from megatron.fault_tolerance.degraded.weight_gradients import LateGradients
from moe_ft.planning.schedules import Operation, OpKind, Role, Schedule, Turn

_STEP = {OpKind.FORWARD: 1, OpKind.BACKWARD: -1}
_NAMES_BYTES = 4096  # of the names of losses, as JSON
Losses = list[dict[str, torch.Tensor]]


class Executor:
    """Runs the operations of one rank. Owned by the training thread."""

    def __init__(
        self,
        place: RolePlace,
        schedule: Schedule,
        batches: CellBatches,
        links: Sequence[Any],
        late: LateGradients | None = None,
    ) -> None:
        """Run no operation yet.

        Args:
            schedule: the same on all ranks.
            links: groups of all ranks, for tensors to the next stage and to the one before.
            late: puts gradients of weights off, if the schedule does; None: they come with those of inputs.
        """
        self._place = place
        self._schedule = schedule
        self._batches = batches
        self._links = links
        self._late = late
        self._stage = place.role[1]
        self._is_last = self._stage == place.layout.num_stages - 1

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
    ) -> Losses:
        """Run forward and backward passes of an iteration. Called by all ranks.

        Returns:
            The losses of the micro-batches that this rank runs in the last stage, or one of zeros if it runs
            none there. Empty in other stages.
        """
        assert not others.get("forward_only"), "evaluations run Megatron's schedule"
        (chunk,) = model
        config = get_model_config(chunk)
        groups = pg_collection or schedules._build_default_pg_collection()
        # Sequence and context parallelism divide it, and products of few bits take multiples of 16.
        num_empty = min(seq_length, 32 * groups.tp.size() * groups.cp.size())
        shapes = [
            schedules.get_tensor_shapes(
                seq_length=length,
                micro_batch_size=size,
                decoder_seq_length=length,
                config=config,
                tp_group=groups.tp,
                cp_group=groups.cp,
            )[0]
            for length, size in (
                (decoder_seq_length or seq_length, micro_batch_size),
                (num_empty, 1),
            )
        ]
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        if chunk.ddp_config.overlap_param_gather:
            # Hooks of forward passes would start gathers, and some ranks have no passes.
            with torch.no_grad():
                chunk.start_param_sync(force_sync=True)
        mail = Mail(self._schedule, self._place, shapes, config.pipeline_dtype, self._links)
        embedding = schedules.clear_embedding_activation_buffer(config, chunk, self._is_last)
        forward = (forward_step_func, chunk, num_microbatches, config, groups.cp.size())
        iteration = _Iteration(forward)
        with chunk.no_sync():
            self._run(iteration, mail, micro_batch_size, num_empty)
        schedules.finish_embedding_wgrad_compute(config, embedding, self._is_last, groups.tp)
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                [chunk],
                iteration.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return _known_to_all(iteration.losses, groups.dp_cp) if self._is_last else []

    def _run(self, iteration: "_Iteration", mail: "Mail", num_samples: int, num_empty: int) -> None:
        for operation in self._schedule.operations.get(self._place.role, ()):
            if operation.kind is OpKind.WEIGHTS:
                assert self._late is not None
                self._late.run(operation.turn)
                continue
            is_empty = operation.cell is None
            source, target = (self._neighbour(operation, way) for way in (-1, 1))
            received = None if source is None else mail.receive(source, operation)
            size = num_empty if is_empty else num_samples
            with iteration.without_samples(num_empty) if is_empty else nullcontext():
                made = self._pass(iteration, operation, received, size)
            if target is not None and not is_empty:
                mail.send(made, target, operation)
            if target is not None and operation.kind is OpKind.FORWARD:
                iteration.let_go(made)
        mail.finish()

    def _pass(self, iteration: "_Iteration", operation: Operation, received: Any, size: int) -> Any:
        if operation.kind is OpKind.FORWARD:
            batch = self._batches.read(operation.cell, size)
            return iteration.run_forward(operation, batch, received, is_last=self._is_last)
        with nullcontext() if self._late is None else self._late.put_off(operation.turn):
            return iteration.run_backward(operation.turn, received)

    def _neighbour(self, operation: Operation, way: int) -> Role | None:
        """Return who runs the operation's cell in the stage before it, or after it; None if there is none.

        Of an empty micro-batch it is this rank's own neighbour, with which it exchanges nothing.
        """
        stage = self._stage + way * _STEP[operation.kind]
        if not 0 <= stage < self._place.layout.num_stages:
            return None
        if operation.cell is None:
            return self._place.role[0], stage
        return self._schedule.runners[operation.cell, stage], stage


class _Iteration:
    """Passes of one iteration, and what is between forward and backward of a cell."""

    def __init__(self, forward: tuple[Any, ...]) -> None:
        self._forward_step, self._chunk, self._num_micro_batches, self._config, self._cp = forward
        self._inputs: dict[Turn, Any] = {}
        self._outputs: dict[Turn, Any] = {}
        self._has_begun = False
        self.losses: Losses = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")

    def run_forward(self, operation: Operation, batch: Any, received: Any, *, is_last: bool) -> Any:
        output, num_tokens = schedules.forward_step(
            self._forward_step,
            batch,
            self._chunk,
            self._num_micro_batches,
            received,
            self.losses,
            self._config,
            self._cp,
            is_first_microbatch=not self._has_begun,
            current_microbatch=operation.turn.number,
            is_last_stage=is_last,
        )
        self._has_begun = True
        self.num_tokens += num_tokens
        self._inputs[operation.turn], self._outputs[operation.turn] = received, output
        return output

    def run_backward(self, turn: Turn, received: Any) -> Any:
        return schedules.backward_step(
            self._inputs.pop(turn), self._outputs.pop(turn), received, self._config
        )

    @contextmanager
    def without_samples(self, num_tokens: int) -> Iterator[None]:
        """Have a pass take a few tokens that change nothing: their loss is not counted, nor are they.

        Layers do not take a batch of no samples.
        """
        args = get_args()
        routers = [each for each in self._chunk.modules() if isinstance(each, Router)]
        shape = args.micro_batch_size, args.seq_length
        counts = [getattr(each, "local_tokens_per_expert", None) for each in routers]
        before = [None if each is None else each.clone() for each in counts]
        # The shape in which tensor-parallel ranks receive a batch.
        args.micro_batch_size, args.seq_length = 1, num_tokens
        for each in routers:
            each.eval()
        try:
            yield
        finally:
            args.micro_batch_size, args.seq_length = shape
            for router, of_router, kept in zip(routers, counts, before, strict=True):
                router.train()
                if of_router is not None:
                    of_router.copy_(kept)

    def let_go(self, output: Any) -> None:
        """Free the values of an output that was sent: backward needs its graph alone."""
        schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)


class Mail:
    """Tensors between stages in one iteration, without tags. Owned by the training thread."""

    def __init__(
        self,
        schedule: Schedule,
        place: RolePlace,
        shapes: Sequence[Any],
        dtype: Any,
        links: Sequence[Any],
    ) -> None:
        """Expect what the others send.

        Args:
            shapes: of a tensor of a micro-batch, and of an empty one.
            links: as for the executor.
        """
        # Both ways are apart: on one connection a device would wait for a receiver that waits for it.
        self._expected: Mapping[tuple[Role, OpKind], deque[Operation]] = {
            (sender, kind): deque(each for each in order if each.kind is kind)
            for (sender, receiver), order in schedule.messages.items()
            if receiver == place.role
            for kind in _STEP
        }
        self._place = place
        self._shape = tuple(shapes[0])
        self._empty_shape = tuple(shapes[1])
        self._dtype = dtype
        self._links = dict(zip(_STEP, links, strict=True))
        self._arrived: dict[tuple[OpKind, Any], torch.Tensor] = {}
        self._sent: list[tuple[torch.Tensor, Any]] = []

    def receive(self, sender: Role, operation: Operation) -> torch.Tensor:
        """Return what an operation of another stage has made for this one; nothing is sent without a cell."""
        kind, _, cell = operation
        if cell is None:
            return self._empty(self._empty_shape).zero_().requires_grad_()
        while (kind, cell) not in self._arrived:
            tensor = self._empty(self._shape).requires_grad_()
            # Idle time is what this takes (seams/pipeline_tap.py).
            dist.recv(tensor, src=self._place.rank_of(sender), group=self._links[kind])
            self._arrived[kind, self._expected[sender, kind].popleft().cell] = tensor
        return self._arrived.pop((kind, cell))

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=torch.cuda.current_device())

    def send(self, tensor: torch.Tensor, receiver: Role, operation: Operation) -> None:
        """Begin to send a tensor, whose values stay until they have been sent."""
        kept = tensor.detach().contiguous()
        link = self._links[operation.kind]
        work = dist.isend(kept, dst=self._place.rank_of(receiver), group=link)
        # Those that have arrived need no memory any more.
        self._sent = [each for each in self._sent if not each[1].is_completed()]
        self._sent.append((kept, work))

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for _, work in self._sent:
            work.wait()
        assert not self._arrived and not any(self._expected.values())


def _known_to_all(losses: Losses, group: Any) -> Losses:
    """Return losses, or one of zeros on ranks without any, which do not know their names.

    Called by all ranks of a group; those that have losses have the same names.
    """
    names = json.dumps(sorted(losses[0]) if losses else []).encode().ljust(_NAMES_BYTES)
    device = torch.cuda.current_device()
    told = torch.frombuffer(bytearray(names), dtype=torch.uint8).to(device, torch.int32)
    if not losses:
        told.zero_()
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    if losses:
        return losses
    found = json.loads(bytes(told.to("cpu", torch.uint8).numpy()))
    return [{name: torch.zeros(2, device=device) for name in found}]
