"""What moe_ft does at the seams of one training run: progress, events, faults, digests.

hooks.py calls these methods from inside Megatron's loop; this file knows nothing of how it got there.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

from megatron.fault_tolerance.fault_injection import FaultInjector
from moe_ft.config import MoeFtConfig
from moe_ft.events import EventLog, last_incarnation
from moe_ft.faults import Phase
from moe_ft.state.digest import StateDigest, digest_state


class TrainingRun:
    """One incarnation of a training run on one rank. Owned by the training thread.

    Attributes:
        iteration, phase: where the loop is now.
    """

    def __init__(self, config: MoeFtConfig, rank: int) -> None:
        directory = config.observability.event_log
        self.config = config
        # Without a directory the log is never started and drops what is written to it.
        self.event_log = EventLog(Path(directory or os.devnull), rank)
        self.faults = FaultInjector(config.fault.faults, self.event_log)
        self.iteration, self.phase = 0, Phase.SETUP
        self._built: tuple[Any, Any, Any] | None = None
        self._iteration_start_s = 0.0

    def after_setup(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Model and optimizer exist, `args.iteration` is set. Called by all ranks."""
        self._built = (model, optimizer, scheduler)
        args = get_args()
        self.iteration = args.iteration
        if self.config.observability.event_log is not None:
            self._start_event_log(args)

    def _start_event_log(self, args: Any) -> None:
        log = self.event_log
        # A rank may have died before it wrote a line: all ranks agree on the highest count.
        incarnation = torch.tensor(last_incarnation(log.directory, log.rank) + 1, device="cuda")
        dist.all_reduce(incarnation, op=dist.ReduceOp.MAX)
        log.start()
        log.incarnation = int(incarnation)
        log.write(
            "start",
            self.iteration,
            pid=os.getpid(),
            host=socket.gethostname(),
            world_size=args.world_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            ep=args.expert_model_parallel_size,
            etp=args.expert_tensor_parallel_size,
            dp=args.data_parallel_size,
            seq_length=args.seq_length,
            num_experts=args.num_experts,
            train_iterations=args.train_iters,
        )

    def enter(self, phase: Phase) -> None:
        """Note the phase that the current iteration enters, and inflict the faults that wait there.

        Raises:
            InjectedFaultError: if such a fault is of kind exception.
        """
        self.phase = phase
        self.event_log.progress(self.iteration, phase)
        self.faults.fire(self.iteration, phase)

    def begin_iteration(self, iteration: int) -> None:
        """The loop is about to run an iteration."""
        self.iteration = iteration
        self._iteration_start_s = time.perf_counter()

    def watch_forward_step(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward step that notes when forward and backward of this iteration begin."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.phase in (Phase.SETUP, Phase.BETWEEN):
                self.enter(Phase.FORWARD)
            output, loss_function = forward_step(*args, **kwargs)
            # Which micro-batch and chunk goes backward first depends on the schedule. The hook changes
            # no value: it returns None.
            may_be_first = self.phase is Phase.FORWARD and isinstance(output, torch.Tensor)
            if may_be_first and output.requires_grad:
                output.register_hook(lambda gradient: self._begin_backward())
            return output, loss_function

        return watched

    def _begin_backward(self) -> None:
        if self.phase is Phase.FORWARD:
            self.enter(Phase.BACKWARD)

    def end_iteration(self, losses: Mapping[str, torch.Tensor]) -> None:
        """`train_step` has returned; the next forward pass has not begun.

        Args:
            losses: on the last stage the loss by name, elsewhere empty.
        """
        self.enter(Phase.BETWEEN)
        args = get_args()
        self.iteration += 1
        num_samples = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        loss = losses.get("lm loss")
        times = {"iteration_s": time.perf_counter() - self._iteration_start_s, "stall_s": 0.0}
        self.event_log.write(
            "iteration",
            self.iteration,
            **times,
            loss=None if loss is None else float(loss),
            num_tokens=num_samples * args.seq_length,
        )
        self._write_scalars(times)
        interval = self.config.observability.state_digest_interval
        if interval and self.iteration % interval == 0:
            self._write_digest(args.consumed_train_samples + num_samples)

    def _write_scalars(self, values: Mapping[str, float]) -> None:
        """Write to Megatron's TensorBoard and W&B, on the rank that has them."""
        scalars = {f"moe-ft/{name}": value for name, value in values.items()}
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        if board:
            for name, value in scalars.items():
                board.add_scalar(name, value, self.iteration)
        if wandb:
            wandb.log(scalars, self.iteration)

    def end_training(self) -> None:
        """`train` has returned, or leaves by one of Megatron's --exit-* paths."""
        if self.config.observability.state_digest:
            self._write_digest(get_args().consumed_train_samples)

    def end(self, reason: str) -> None:
        """`pretrain` has returned or exited: the last checkpoint and evaluation are done."""
        # On a CPU this is the largest resident set, see cpu_device.py.
        peak_bytes = torch.cuda.max_memory_allocated()
        self.event_log.write(
            "end", self.iteration, reason=reason, peak_device_memory_bytes=peak_bytes
        )

    def close(self) -> None:
        """Close the event log."""
        self.event_log.close()

    def digest(self, consumed_train_samples: int) -> StateDigest:
        """Digest this rank's state."""
        counters = {
            "iteration": self.iteration,
            "consumed_train_samples": consumed_train_samples,
            "consumed_valid_samples": get_args().consumed_valid_samples,
        }
        assert self._built is not None
        return digest_state(*self._built, counters)

    def _write_digest(self, consumed_train_samples: int) -> None:
        digest = self.digest(consumed_train_samples)
        self.event_log.write(
            "state_digest", self.iteration, sha256=digest.sha256, sha256_all=digest.sha256_all
        )
