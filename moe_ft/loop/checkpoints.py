"""Checkpoints of a run: recovers at the start, then lets the engine act at the seams.

The only file that calls moe_ft.recovery. loop/resumption.py ends a recovery in the running loop.

The engine acts on a state at the end of its iteration, except where the loop evaluates the state, saves it,
or ends with it: then when the loop continues. An evaluation moves random numbers and the position in the
validation data. And a start that recovers a state continues with the next iteration: what was due with it
must be done.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, override

import torch
import torch.distributed as dist

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.background import EngineEvent, describe
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.engine.breakpoints import Breakpoints, Moment
from moe_ft.engine.memory.mappings import Mappings
from moe_ft.errors import RejectedResultError, RepairError
from moe_ft.events import EventLog
from moe_ft.faults import Phase
from moe_ft.loop.faults import Faults, LostNode
from moe_ft.loop.leaving import BreakpointWriter, JobProcesses, meet_processes
from moe_ft.loop.listeners import (
    Built,
    EndedIteration,
    LoopListener,
    LoopState,
    RejectedResult,
)
from moe_ft.loop.resumption import Resumption, continuation_of, recovery_fields
from moe_ft.loop.routers import Routers
from moe_ft.loop.training_loop import LoopParts, TrainingLoop
from moe_ft.recovery.checkpointing import Checkpointing, RecoveryOutcome
from moe_ft.recovery.facts import JobFacts
from moe_ft.recovery.failures import is_rejected
from moe_ft.recovery.meet import Met
from moe_ft.recovery.site import Site
from moe_ft.recovery.start import start
from moe_ft.saying import say, warn
from moe_ft.state.record import CapturedNumbers, IterationFacts, capture_numbers


class StateSeam:
    """Passes every state to the engine once, with its facts. Owned by the training thread."""

    def __init__(
        self,
        training: TrainingLoop,
        loop: LoopState,
        act: Callable[[IterationFacts, float], float],
        count_tokens: Callable[[], dict[str, torch.Tensor]],
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the counters that the loop has.

        Args:
            act: takes the facts of the state as it is now and the seconds that its iteration took; returns
                the seconds for which training stood still.
            count_tokens: returns ``[expert]`` the tokens on this rank by MoE layer.
            wait: called when the loop uses a state before `act` gets it.
        """
        self._training = training
        self._loop = loop
        self._act = act
        self._count_tokens = count_tokens
        self._wait = wait
        self._num_operations = training.num_operations_so_far()
        self._postponed: EndedIteration | None = None  # the engine has not acted on its state yet
        self._last_facts: IterationFacts | None = None

    def end_iteration(self, ended: EndedIteration) -> None:
        """Pass the new state to the engine, unless the loop uses it first."""
        self._num_operations += self._training.num_operations_of(ended.num_samples)
        if self._training.is_used(ended.iteration):
            self._postponed = ended
            self._wait()
        else:
            self._pass(ended, ended.num_samples)

    def pass_postponed(self) -> None:
        """Pass the state that the loop has used first, if there is one."""
        ended, self._postponed = self._postponed, None
        if ended is not None:
            self._pass(ended, 0)

    def facts_ahead(self, num_samples: int) -> IterationFacts | None:
        """Return the facts of the iteration that runs as they will be at its end, but for the scheduler's.

        The optimizer has stepped. None if the loop uses the state first.
        """
        iteration = self._loop.iteration + 1
        if self._training.is_used(iteration):
            return None
        num_operations = self._num_operations + self._training.num_operations_of(num_samples)
        return replace(
            self._facts(num_samples),
            iteration=iteration,
            num_floating_point_operations=num_operations,
        )

    def facts_of(self, iteration: int) -> IterationFacts | None:
        """Return the facts of a state that was passed; None if it was not the last one."""
        facts = self._last_facts
        return facts if facts is not None and facts.iteration == iteration else None

    def last_facts(self) -> IterationFacts:
        """Return the facts of the last state that was passed, or the current ones if none was.

        They may differ: the loop may have skipped a batch in the meantime.
        """
        return self._last_facts or self._facts(0)

    def _pass(self, ended: EndedIteration, num_uncounted_samples: int) -> None:
        self._last_facts = self._facts(num_uncounted_samples)
        self._loop.stall_s += self._act(self._last_facts, ended.seconds)

    def _facts(self, num_uncounted_samples: int) -> IterationFacts:
        grad_norm = self._loop.grad_norm
        return IterationFacts(
            iteration=self._loop.iteration,
            grad_norm=None if grad_norm is None else float(grad_norm),
            num_tokens=self._loop.num_tokens,
            num_floating_point_operations=self._num_operations,
            tokens_per_expert=self._count_tokens(),
            counters=self._training.counters(num_uncounted_samples),
        )


class Checkpoints(LoopListener):
    """Drives the checkpointing of one rank. Owned by the training thread.

    Does nothing without a strategy, or with --skip-train.
    """

    def __init__(
        self,
        config: MoeFtConfig,
        training: TrainingLoop,
        loop: LoopState,
        event_log: EventLog,
        faults: Faults,
        routers: Routers,
        breakpoint_writer: BreakpointWriter,
    ) -> None:
        self._config = config
        self._training = training
        self._loop = loop
        self._log = event_log
        self._faults = faults
        self._routers = routers
        self._breakpoint_writer = breakpoint_writer
        self._breakpoints: Breakpoints | None = None
        self._began_with = ""
        self._running: Checkpointing | None = None
        self._mappings = Mappings(lasts=True)  # from one start to the next in this process
        self._resumption: Resumption | None = None
        self._seam: StateSeam | None = None
        self._may_lose_memory = False  # at the end: nothing in memory is needed any more
        self._is_kept = True  # likewise: the last state is somewhere as a whole
        self._is_over = False  # until the job has ended cleanly on all ranks and needs no memory
        self._facts: JobFacts | None = None  # as they were first: Megatron changes its arguments

    @property
    def boundary_log(self) -> BoundaryLog | None:
        """Log of what this rank sends to other stages, if there is one; known after the setup."""
        return None if self._running is None else self._running.engine.boundary

    def last_numbers(self) -> CapturedNumbers | None:
        """Return the numbers of the job in the state that is live; None before an iteration has ended."""
        running, seam = self._running, self._seam
        facts = None if seam is None else seam.facts_of(self._loop.iteration)
        if running is None or facts is None:
            return None
        return capture_numbers(running.met.live.built[1], facts)

    def before_setup(self) -> None:
        """Note how the run began, before --load changes --finetune."""
        self._began_with = self._training.began_with()

    def after_setup(self, built: Built) -> None:
        """Recover, if there is something to recover from, and start the engine. Called by all ranks.

        Raises:
            ConfigError: if the flags do not fit this machine, or the state that is there.
            UnrecoverableError: if there is state, and none of it is usable.
        """
        if not self._config.strategy.is_on or built[1] is None:
            return
        training = self._training
        if self._facts is None:
            self._facts = training.job_facts(self._began_with)
        running = start(
            self._config,
            self._facts,
            built,
            lambda phase, iteration: self._faults.enter_phase(iteration, phase),  # any thread
            lambda site: self._faults.set_node(lambda: _node_of(site)),
            self._loop.most_iteration,
            self._mappings,
        )
        self._running = running
        if running.outcome.record is None and self._loop.most_iteration is not None:
            raise RepairError(
                "no rank's state is left of any iteration that all ranks have finished"
            )
        if running.outcome.record is not None:
            self._resumption = Resumption(training, self._loop, running, self._note_replayed)

        engine = running.engine
        breakpoints = self._breakpoints = engine.breakpoints
        if breakpoints is not None:
            processes = meet_processes() if dist.is_initialized() else JobProcesses()
            is_on_gpu = any(each.parameter.is_cuda for each in running.met.live.parameters)
            self._breakpoint_writer.use(
                breakpoints, processes, is_on_gpu=is_on_gpu, boundary=engine.boundary
            )

        def act(state: IterationFacts, iteration_s: float) -> float:
            if breakpoints is not None:
                breakpoints.note(*_attempt(lambda: engine.moment(running.capture(state))))
            return engine.end_iteration(
                state.iteration, iteration_s, lambda: running.capture(state)
            )

        self._seam = StateSeam(training, self._loop, act, self._routers.counts, self._wait_for_loop)

    def after_recovery(self) -> None:
        """Write the event "recovery", unless a replay is still to come, here or on other ranks."""
        self._write_elastic()
        _warn_of_load(self._training, self._log.rank, self._resumption)
        if self._running and self._resumption and not self._resumption.is_due:
            self._write_recovery(self._running.outcome, 0)
            self._loop.grad_norm = self._resumption.grad_norm

    def _write_elastic(self) -> None:
        """Write the event "elastic" if the number of ranks has changed, or ranks wait."""
        running, facts = self._running, self._facts
        if running is None or facts is None or not self._config.elastic.elastic:
            return
        plan = running.plan
        of_other_layout = 0 if plan is None else plan.version.world_size
        before = of_other_layout or facts.world_size
        if before != facts.world_size or facts.waiting_ranks:
            fields: dict[str, Any] = {
                "from": before,
                "to": facts.world_size,
                "waiting": facts.waiting_ranks,
                "evaluation_samples": facts.evaluation_samples,
            }
            self._log.write("elastic", running.outcome.iteration, **fields)

    @override
    def begin_training(self, parts: LoopParts) -> None:
        if self._resumption is not None:
            self._resumption.begin_training(parts)

    def replay_if_due(self, forward_backward: Callable[..., Any] | None = None) -> None:
        """Run iterations again that lead to the recovered state: now the loop has configured the model."""
        running, resumption = self._running, self._resumption
        if running is None or resumption is None or not resumption.is_due:
            return
        num_replayed, phases_s = resumption.finish(forward_backward)
        self._write_recovery(replace(running.outcome, phases_s=phases_s), num_replayed)
        self._loop.grad_norm = resumption.grad_norm

    def _write_recovery(self, outcome: RecoveryOutcome, num_replayed: int) -> None:
        iteration, loss = outcome.iteration, outcome.loss
        self._loop.stages_alone, self._loop.num_replayed = outcome.stages, num_replayed
        self._loop.replay_s = outcome.phases_s.get("replay", 0.0)
        self._log.write("recovery", iteration, **recovery_fields(outcome, num_replayed))
        if self._log.rank == 0:
            say(continuation_of(outcome))
        if loss is not None:
            numbers = {"plt": loss.total_plt, "lost_tokens": loss.lost_tokens}
            self._training.write_numbers(numbers, iteration=iteration)

    def _note_replayed(self, iteration: int) -> None:
        self._loop.iteration = iteration
        self._log.progress(iteration, Phase.REPLAY)
        self._faults.enter_phase(iteration, Phase.REPLAY)

    def before_batch(self) -> None:
        """Let the engine act on the state that the loop has used, if that was postponed."""
        if self._seam is not None:
            self._seam.pass_postponed()

    def begin_iteration(self) -> None:
        """Restore the random numbers, as nothing draws any before forward; raise the capacity of experts."""
        if self._resumption is not None:
            self._resumption.restore_rng()
        if self._running is not None:
            met = self._running.met
            stages = [info.stage for info in met.site.topology.ranks]
            num_ranks = stages.count(stages[met.site.rank])
            debts = self._running.engine.debts
            self._routers.make_up(debts, met.strategy.counted_layers, num_ranks)

    def before_step(self) -> None:
        """Wait until no copy reads weights any more, and count the tokens of the experts."""
        if self._running is not None:
            met = self._running.met
            num_experts = met.facts.experts.num_experts
            tokens = self._routers.popularity(met.strategy.counted_layers, num_experts)
            self._running.engine.before_step(tokens)

    def note_reduced_gradients(self) -> None:
        """Note the loss scale of the iteration, where peers follow by gradients."""
        if self._running is not None:
            self._running.engine.note_reduced_gradients(self._loop.iteration + 1)

    def note_final_gradients(self) -> None:
        """Keep the gradients for peers that follow by them."""
        if self._running is not None:
            loop = self._loop
            self._running.engine.note_final_gradients(loop.iteration + 1, loop.grad_norm)

    def begin_update(self) -> None:
        """Wait while a breakpoint is written: the weights are about to change."""
        if self._breakpoints is not None:
            self._breakpoints.begin_update()

    def end_update(self) -> None:
        """Take the record that the iteration will have: this rank may hang before it ends."""
        if self._breakpoints is not None:
            self._breakpoints.end_update(*_attempt(self._moment_ahead))

    def _moment_ahead(self) -> Moment | None:
        running, seam = self._running, self._seam
        num_samples = self._training.samples_ahead()
        if running is None or seam is None or num_samples is None:
            return None
        facts = seam.facts_ahead(num_samples)
        if facts is None:
            return None
        return running.engine.moment(running.capture_ahead(facts, num_samples))

    def _wait_for_loop(self) -> None:
        if self._breakpoints is not None:
            self._breakpoints.note(
                None, "the loop evaluates or saves the state, or ends with it, which is not over"
            )

    def end_iteration(self, ended: EndedIteration) -> None:
        """Take the record of the new state, and start the snapshots that are due.

        A repair may have recovered it: then there is nothing to take.
        """
        running, seam = self._running, self._seam
        if running and seam and ended.iteration > running.outcome.iteration:
            seam.end_iteration(ended)

    def after_iteration(self, ended: EndedIteration) -> None:
        """Write what the threads of the engine have reported."""
        if self._running is not None:
            self._running.engine.drain(self._write_report)

    def _write_report(self, report: EngineEvent) -> None:
        fields = report.fields
        if not self._config.observability.router_log:  # nobody compares them with the loads
            fields = {name: value for name, value in fields.items() if name != "experts"}
        self._log.write(report.event, report.iteration, time_s=report.time_s, **fields)
        numbers = {
            f"{report.event}/{name}": float(value)
            for name, value in report.fields.items()
            if isinstance(value, int | float)
        }
        self._training.write_numbers(numbers, iteration=report.iteration)

    def suspend(self, iteration: int) -> None:
        """Leave a breakpoint, and end checkpointing of this start. The next one recovers from memory."""
        self._breakpoint_writer.on_repair(iteration)
        if self._facts is None:  # a replacement, which has not trained
            self._facts = self._training.job_facts(self._began_with)
        self._facts = replace(self._facts, iteration=0)  # a loaded state does not compete
        running, self._running = self._running, None
        self._breakpoints = self._resumption = self._seam = None
        if running is not None:
            running.close()

    def end_training(self) -> None:
        """Bring the last state to storage. Called by all ranks."""
        loop = self._loop
        if self._resumption is not None:
            self._resumption.restore_rng()  # nothing was left to train
        # An exit in the middle of an iteration leaves half of it in the buffers: that is no state.
        if self._running is not None and self._seam is not None and not loop.is_in_iteration:
            self._seam.pass_postponed()
            facts = self._seam.last_facts()
            train_iterations = self._training.train_iterations
            is_complete = train_iterations is not None and loop.iteration >= train_iterations
            ending = self._running.finish(
                loop.iteration, facts, self._write_report, is_complete=is_complete
            )
            loop.is_saved = ending.is_saved
            self._may_lose_memory = ending.may_lose_memory(is_complete=is_complete)
            self._is_kept = ending.is_kept

    def end(self, reason: str, exit_code: int) -> None:
        """Learn whether all ranks have ended: if not, the job is started again, and finds the last state."""
        running = self._running
        if running is None or exit_code != 0 or self._loop.is_in_iteration:
            return
        self._is_over = self._may_lose_memory and running.have_all_ended()
        if not self._is_over and not self._is_kept:
            self._breakpoint_writer.on_end()

    def failed(self, error: Exception) -> None:
        """Leave a breakpoint, and remember a failure that speaks against what was recovered."""
        self._breakpoint_writer.on_failure(error)
        is_recovering = self._seam is None or self._loop.is_replaying
        if self._running is not None and (is_recovering or is_rejected(error)):
            self._running.note_failure(self._loop.place, error)

    def reject(self, rejected: RejectedResult) -> None:
        """Remember that the state leads there, and leave no breakpoint of it, if that ends training."""
        if rejected.exit_code:
            self._breakpoint_writer.refuse_rejected()
            if self._running is not None:
                self._running.note_failure(self._loop.place, RejectedResultError(str(rejected)))

    @override
    def close(self) -> None:
        if self._running is not None:
            self._running.close(removes_memory=self._is_over)
        self._mappings.close()


class PipelineLog(LoopListener):
    """Logs what crosses stage boundaries while iterations run; evaluation and replays leave no trace.

    Owned by the training thread. Does nothing without --moe-ft-upstream-log.
    """

    def __init__(self, checkpoints: Checkpoints, training: TrainingLoop, loop: LoopState) -> None:
        self._checkpoints = checkpoints
        self._training = training
        self._loop = loop
        self._log: BoundaryLog | None = None
        self._tap = ExitStack()

    def after_recovery(self) -> None:
        """Tap the links, if there is a log."""
        self._log = self._checkpoints.boundary_log
        if self._log is not None:
            self._tap.enter_context(self._training.recording(self._log.record))

    def begin_attempt(self) -> None:
        """Begin the log of the iteration, or begin it again."""
        is_usual = self._loop.is_in_iteration and not self._loop.is_replaying
        # Peers receive a part of what a stage receives then: without a log it is not replayed alone.
        if self._log is not None and is_usual and not self._loop.shared:
            self._log.begin(self._loop.iteration, self._checkpoints.last_numbers())

    def before_capture(self) -> None:
        """Wait for the copies of snapshots and of what was sent, which other threads have the device make."""
        if (running := self._checkpoints._running) is not None:
            running.engine.wait_for_copy()
        if self._log is not None:
            self._log.flush()

    def before_step(self) -> None:
        """Have the log of the iteration committed: nothing is sent once gradients are ready.

        A rank that dies in its step may leave other stages with the state after it, which need this log.
        """
        if self._log is not None:
            self._log.end()

    def end_iteration(self, ended: EndedIteration) -> None:
        """Have the log committed of an iteration whose step was skipped."""
        if self._log is not None:
            self._log.end()

    def suspend(self, iteration: int) -> None:
        """Leave the links alone until there is another log."""
        self._log = None
        self._tap.close()

    def close(self) -> None:
        """Leave Megatron's links as they were."""
        self._tap.close()


def met_of(own: Checkpoints) -> Met | None:
    """Return what this rank knows of the others and their memory; None before the setup."""
    return None if own._running is None else own._running.met


def site_of(own: Checkpoints) -> Site | None:
    """Return the place of this rank among those that take checkpoints; None before the setup."""
    return None if (met := met_of(own)) is None else met.site


def _attempt(take: Callable[[], Moment | None]) -> tuple[Moment | None, str]:
    """Return the live state, and why it is not known if it is not: that costs a breakpoint, not the run."""
    problem = "the record of the state is not known"
    try:
        return take(), f"{problem} before the iteration ends"
    except Exception as error:  # whatever it is, training continues
        return None, f"{problem}: {describe(error)}"


def _node_of(site: Site) -> LostNode:
    pids = tuple(info.pid for info in site.topology.on_node(site.node))
    return LostNode(pids=pids, directory=site.node_dir)


def _warn_of_load(training: TrainingLoop, rank: int, resumption: Resumption | None) -> None:
    """Print what differs where the loop continues from its own checkpoint."""
    for line in training.lines_on_load() if rank == 0 and resumption is None else ():
        warn(line)
