"""What moe_ft does at the seams of one training run: progress, events, faults, checkpoints, digests.

hooks.py calls these methods from inside Megatron's loop; this file knows nothing of how it got there. What
checkpointing does is moe_ft/recovery/session.py.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
from megatron.training.training import num_floating_point_operations

from megatron.fault_tolerance.seams import loop_facts
from megatron.fault_tolerance.seams.replay import LoopParts, Replay
from megatron.fault_tolerance.watch import failure_causes
from megatron.fault_tolerance.watch.faults import FaultInjector
from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.background import Report
from moe_ft.events import EventLog, last_incarnation
from moe_ft.faults import Phase
from moe_ft.format.records import IterationRecord
from moe_ft.recovery.attempts import describe
from moe_ft.recovery.job import Recovery
from moe_ft.recovery.session import Session
from moe_ft.state.digest import StateDigest, digest_state
from moe_ft.state.record import IterationFacts, apply_rng
from moe_ft.state.router_load import RouterLoad, table
from moe_ft.strategies.interface import Counting, JobLoss
from moe_ft.strategies.registry import kind_of


class TrainingRun:
    """One incarnation of a training run on one rank. Owned by the training thread.

    Attributes:
        iteration, phase: where the loop is now.
        is_torn: whether the weights and moments of this rank are a mixture of two iterations now.
        is_replaying: whether an iteration is run again before the loop goes on.
        num_tokens: of the batch, with --calculate-per-token-loss, noted by the seam.
        grad_norm: of this iteration as clipping used it, noted by the seam; None if nothing was clipped,
            because gradients were not finite.
        is_saved: False if training has ended and its last state should be on storage, but is not.
    """

    def __init__(self, config: MoeFtConfig, rank: int) -> None:
        directory = config.observability.event_log
        self.config = config
        # Without a directory the log is never started and drops what is written to it.
        self.event_log = EventLog(Path(directory or os.devnull), rank)
        self.faults = FaultInjector(config.fault.faults, self.event_log)
        self.iteration, self.phase = 0, Phase.SETUP
        self.is_torn = False
        self.is_replaying = False
        self.num_tokens: torch.Tensor | None = None
        self.grad_norm: float | None = None
        self._replay: Replay | None = None
        self._recovery: Recovery | None = None
        self._loop: LoopParts | None = None
        self._last_facts: IterationFacts | None = None
        self._built: tuple[Any, Any, Any] | None = None
        self._iteration_start_s = 0.0
        self._session: Session | None = None
        self._opened: Session | None = None  # also one whose recovery has failed
        self._is_recovering = False
        self._began_with = ""
        self._router_load = RouterLoad()
        self._record_to_resume: IterationRecord | None = None
        self._num_floating_point_operations = 0.0
        self._iteration_s = self._stall_s = 0.0
        self._is_seam_open = False  # the engine has not acted on the last iteration yet
        self._is_in_iteration = False
        self._has_ended = False
        self.is_saved = True

    @property
    def _counting(self) -> Counting:
        """The numbers that routers sum up for the strategy."""
        kind = kind_of(self.config.strategy.strategy)
        return Counting.NOTHING if kind is None else kind.counting(self.config)

    @property
    def checkpoints(self) -> bool:
        """Whether a strategy takes checkpoints in this run."""
        return self._session is not None

    def before_setup(self) -> None:
        """Model and optimizer are about to be built, and --load to be read, which changes --finetune."""
        self._began_with = loop_facts.began_with(get_args())

    def after_setup(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Model and optimizer exist, `args.iteration` is set. Called by all ranks.

        Recovers, if there is something to recover from, and sets the counters of the loop to it.

        Raises:
            ConfigError: if the flags do not fit this machine or what is there to recover from.
        """
        self._built = (model, optimizer, scheduler)
        args = get_args()
        self.iteration = args.iteration
        if self.config.observability.event_log is not None:
            self._open_event_log()
        recovery = None
        if self.config.strategy.is_on and optimizer is not None:
            recovery = self._start_session(args)
        if self._session is not None or self.config.observability.router_log:
            is_soft = self._counting is Counting.PROBABILITIES
            self._router_load.start(model, sums_probabilities=is_soft)
        self._num_floating_point_operations = float(args.num_floating_point_operations_so_far)
        if self.config.observability.event_log is not None:
            self._write_start(args)
        if recovery is not None and recovery.record is not None and self._replay is None:
            self._write_recovery(recovery)

    def _start_session(self, args: Any) -> Recovery:
        assert self._built is not None
        session = Session(
            self.config,
            loop_facts.job_facts(args, self._began_with),
            self._built,
            self.enter_background,
        )
        self.faults.node_of(session)
        self._opened, self._is_recovering = session, True
        recovery = session.open()
        self._session = session
        if recovery.record is not None:
            loop_facts.resume(args, recovery.record)
            self.iteration = args.iteration
            self._record_to_resume = recovery.record
        self._is_recovering = False
        if recovery.conversion is not None:
            self._recovery = recovery
            self._replay = Replay(
                recovery.conversion, session.parameters, args, self._note_replayed_iteration
            )
            # The data iterators, which are built next, begin with what the replay reads first.
            args.consumed_train_samples = self._replay.first_record.consumed_train_samples
        return recovery

    def begin_training(self, loop: LoopParts) -> None:
        """`train` begins; the data iterators exist."""
        self._loop = loop
        if self._record_to_resume is not None:
            get_args().consumed_train_samples = self._record_to_resume.consumed_train_samples

    def replay_if_due(self, forward_backward: Callable[..., Any] | None = None) -> None:
        """Run the iterations of a recovered window again; only now has the loop configured the model.

        Called by all ranks.

        Args:
            forward_backward: the loop's own, if it is about to call it.
        """
        if self._replay is None:
            return
        assert self._recovery is not None and self._loop is not None
        if forward_backward is not None:
            self._loop = replace(self._loop, forward_backward=forward_backward)
        args, replay = get_args(), self._replay
        start = time.perf_counter()
        self.is_replaying, self.phase = True, Phase.REPLAY
        self._is_recovering = True
        replay.run(self._loop)
        self.is_replaying, self.phase, self._replay = False, Phase.SETUP, None
        self._is_recovering = False
        loop_facts.resume(args, replay.last_record)
        self.iteration = args.iteration
        self._recovery.phases_s["replay"] = time.perf_counter() - start
        self._write_recovery(self._recovery, replay.num_iterations)
        self._recovery = None

    def _note_replayed_iteration(self, iteration: int) -> None:
        self.iteration = iteration
        self.event_log.progress(iteration, Phase.REPLAY)
        self.faults.fire(iteration, Phase.REPLAY)

    def _write_recovery(self, recovery: Recovery, num_replayed: int = 0) -> None:
        self.event_log.write(
            "recovery",
            recovery.iteration,
            scope="global",
            target_iteration=recovery.iteration,
            restored_iteration=recovery.iteration - num_replayed,
            replayed_iterations=num_replayed,
            start=recovery.start,
            writer=recovery.writer,
            **(recovery.loss or JobLoss()).fields(),
            sources={tier.value: count for tier, count in recovery.sources.items()},
            phases_s=recovery.phases_s,
            deterministic=recovery.is_deterministic,
            lossy=dict(recovery.lossy),
            problems=recovery.problems,
        )
        if recovery.loss is not None:
            numbers = {"plt": recovery.loss.total_plt, "lost_tokens": recovery.loss.lost_tokens}
            self._write_scalars(numbers, recovery.iteration)

    def _open_event_log(self) -> None:
        log = self.event_log
        # A rank may have died before it wrote a line: all ranks agree on the highest count.
        incarnation = torch.tensor(last_incarnation(log.directory, log.rank) + 1, device="cuda")
        dist.all_reduce(incarnation, op=dist.ReduceOp.MAX)
        log.start()
        log.incarnation = int(incarnation)

    def _write_start(self, args: Any) -> None:
        self.event_log.write(
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
            state_dtype=dict(self.config.precision.packings),
            lossy=dict(self.config.precision.lossy_parts),
        )

    def enter(self, phase: Phase) -> None:
        """Note the phase that the current iteration enters, and inflict the faults that wait there.

        Raises:
            InjectedFaultError: if such a fault is of kind exception.
        """
        self.phase = phase
        self.event_log.progress(self.iteration, phase)
        self.faults.fire(self.iteration, phase)

    def enter_background(self, phase: Phase, iteration: int) -> None:
        """Inflict the faults that wait in a phase beside the iteration. Any thread."""
        self.faults.fire(iteration, phase)

    def begin_iteration(self, iteration: int) -> None:
        """The loop is about to run an iteration."""
        self.skip_iteration()
        self.iteration, self._is_in_iteration = iteration, True
        self.num_tokens, self.grad_norm = None, None
        self._resume_rng()  # nothing draws random numbers any more before forward
        self._iteration_start_s = time.perf_counter()

    def begin_attempt(self) -> None:
        """Forward and backward of the iteration are about to run, perhaps not for the first time."""
        self._router_load.begin()

    def skip_iteration(self) -> None:
        """The loop is about to go on, be it with a batch that nothing is computed from."""
        if self._is_seam_open:  # the state was evaluated
            self._stall_s = self._pass_seam(self._iteration_s)

    def _resume_rng(self) -> None:
        if self._record_to_resume is not None:
            apply_rng(self._record_to_resume)
            self._record_to_resume = None

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

    def before_step(self) -> None:
        """Gradients are ready, no weight has changed."""
        self.enter(Phase.BEFORE_STEP)
        if self._session is not None:
            layers, load = self._session.counted_layers, self._router_load
            is_soft = self._counting is Counting.PROBABILITIES
            counts = load.probabilities() if is_soft else load.counts()
            tokens = table(counts, layers, get_args().num_experts) if layers else None
            self._session.engine.before_step(tokens)

    def end_iteration(self, losses: Mapping[str, torch.Tensor], *, is_skipped: bool) -> None:
        """`train_step` has returned; the next forward pass has not begun.

        Args:
            losses: on the last stage the loss by name, elsewhere empty.
            is_skipped: whether the optimizer did not step because of infinite gradients.
        """
        self.enter(Phase.BETWEEN)
        args = get_args()
        self.iteration += 1
        num_readers = args.data_parallel_size * args.gtp_weight_remat_size
        num_samples = get_num_microbatches() * args.micro_batch_size * num_readers
        iteration_s = self._iteration_s = time.perf_counter() - self._iteration_start_s
        self._is_in_iteration = False
        stall_s, self._stall_s = self._stall_s, 0.0
        if self._session is not None:
            self._num_floating_point_operations += num_floating_point_operations(args, num_samples)
            if loop_facts.is_evaluated(args, self.iteration):
                # Evaluation moves random numbers and the validation data: the state is taken behind it.
                self._is_seam_open = True
            else:
                stall_s += self._pass_seam(iteration_s, num_samples)
        # To read a loss is to wait for the GPU: only where somebody reads the log.
        is_logged = self.config.observability.event_log is not None
        loss = losses.get("lm loss") if is_logged else None
        times = {"iteration_s": iteration_s, "stall_s": stall_s}
        self.event_log.write(
            "iteration",
            self.iteration,
            **times,
            loss=None if loss is None else float(loss),
            num_tokens=num_samples * args.seq_length,
        )
        self._write_scalars(times, self.iteration)
        if self.config.observability.router_log:
            self._write_router_load(is_skipped=is_skipped)
        interval = self.config.observability.state_digest_interval
        if interval and self.iteration % interval == 0:
            self._write_digest(args.consumed_train_samples + num_samples)
        if self._session is not None:
            self._session.engine.drain(self._write_report)

    def _write_router_load(self, *, is_skipped: bool) -> None:
        tokens = {name: counts.tolist() for name, counts in self._router_load.counts().items()}
        self.event_log.write("router_load", self.iteration, tokens=tokens, is_skipped=is_skipped)

    def _pass_seam(self, iteration_s: float, num_samples: int = 0) -> float:
        """Let the engine act on the state as it is now; return the seconds that training stood still."""
        assert self._session is not None
        session, facts = self._session, self._facts(num_samples)
        self._is_seam_open, self._last_facts = False, facts
        return session.engine.end_iteration(
            self.iteration, iteration_s, lambda: session.capture(facts)
        )

    def _facts(self, num_samples: int = 0) -> IterationFacts:
        return loop_facts.iteration_facts(
            get_args(),
            self.iteration,
            grad_norm=self.grad_norm,
            num_tokens=self.num_tokens,
            num_samples=num_samples,
            num_floating_point_operations=self._num_floating_point_operations,
            tokens_per_expert=self._router_load.counts(),
        )

    def _write_report(self, report: Report) -> None:
        self.event_log.write(report.event, report.iteration, **report.fields)
        numbers = {
            f"{report.event}/{name}": float(value)
            for name, value in report.fields.items()
            if isinstance(value, int | float)
        }
        self._write_scalars(numbers, report.iteration)

    def _write_scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Write to Megatron's TensorBoard and W&B, on the rank that has them."""
        scalars = {f"moe-ft/{name}": value for name, value in values.items()}
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        if board:
            for name, value in scalars.items():
                board.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)

    def end_training(self) -> None:
        """`train` has returned, or leaves by one of Megatron's --exit-* paths. Called by all ranks."""
        self._resume_rng()  # nothing was left to train
        # An exit in the middle of an iteration leaves half of it in the buffers: that is no state.
        if self._session is not None and not self._is_in_iteration:
            if self._is_seam_open:
                self._pass_seam(self._iteration_s)
            # Not those of now, where the loop has passed over a batch since.
            self.is_saved = self._session.finish(
                self.iteration,
                self._last_facts or self._facts(),
                self._write_report,
                is_complete=self.iteration >= get_args().train_iters,
            )
        if self.config.observability.state_digest:
            self._write_digest(get_args().consumed_train_samples)

    def end(self, reason: str, exit_code: int = 0) -> None:
        """`pretrain` has returned or exited: the last checkpoint and evaluation are done.

        Args:
            reason: for the event log.
            exit_code: if it is not 0 the job is to be started again, and finds its memory.
        """
        # On a CPU this is the largest resident set, see cpu_device.py.
        peak_bytes = torch.cuda.max_memory_allocated()
        if not self.is_saved:
            reason += ", the last state is not on storage"
        self.event_log.write(
            "end", self.iteration, reason=reason, peak_device_memory_bytes=peak_bytes
        )
        self._has_ended = exit_code == 0 and not self._is_in_iteration

    def close(self) -> None:
        """End checkpointing and close the event log."""
        self._router_load.close()
        if self._session is not None:
            self._session.close(is_clean=self._has_ended)
        self.event_log.close()

    def note_failure(self, error: Exception) -> None:
        """Remember a failure that speaks against the state that this start has recovered."""
        if self._opened is None or not failure_causes.speaks_against_state(error):
            return
        if self._is_recovering or failure_causes.is_not_finite(error):
            where = "recovery" if self.phase is Phase.SETUP else f"iteration {self.iteration}"
            # Megatron's words name the rank and the node, which may be others the next time.
            is_not_finite = failure_causes.is_not_finite(error)
            what = "a result that is not finite" if is_not_finite else describe(error)
            self._opened.note_failure(f"{where}: {what}")

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
