"""Listeners of the training loop, and the order in which they are called.

A driver of a training loop calls `Listeners` at its seams. At each seam the listeners are called in the
order of their list; `close` goes through it backwards. The seams of a run, in their order:

    start, before_setup, after_setup, after_recovery, begin_training, replay_if_due
    each batch: replay_if_due, before_batch, and unless the batch is skipped
        begin_iteration, begin_attempt (each time), note_reduced_gradients, before_step,
        note_final_gradients, begin_update, end_update, end_iteration, after_iteration; an optimizer that
        does not step leaves out both updates, and perhaps the two before them
    end_training, after_training, end or failed, close

A repair in place calls suspend, after_setup, after_recovery and begin_training again in between. Between
them, `enter_phase` is called as the iteration passes through its phases, and `enter_section` as the loop
passes through its sections.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, Self

import torch

from moe_ft.faults import Phase, Section
from moe_ft.files.progress import note_progress
from moe_ft.loop.training_loop import LoopParts
from moe_ft.verdicts import Failure

Built = tuple[Any, Any, Any]  # model chunks, optimizer (None with --skip-train), scheduler


@dataclass(kw_only=True, slots=True)
class LoopState:
    """Position and results of the training loop on one rank.

    Owned by the training thread. The thread that reports a SIGTERM reads it.

    Attributes:
        num_passes: how often each section has come to its end.
        is_first: whether no iteration has ended since the start, or since a repair began.
        is_torn: whether the weights and moments of this rank are a mixture of two iterations.
        is_replaying: whether an iteration of a recovered window is running again.
        is_left_out: whether the loop passes over an iteration whose batch makes a rank fail.
        num_tokens: of the batch, with --calculate-per-token-loss.
        grad_norm: as clipping used it; None if gradients were not finite.
        stall_s: how long training has stood still for checkpoints since the last `after_iteration`.
        idle_s: how long this rank has waited for others in the last iteration; None if nobody knows.
        exchange_s: how long it was in other collectives then, and waited in them too; None likewise.
        is_saved: False if training has ended and its last state should be on storage, but is not.
        most_iteration: the latest that may be recovered, in a repair; None for any.
        stages_alone: pipeline stages that ran iterations again without the others in the last recovery.
        num_replayed: iterations that this rank ran again in it.
        replay_s: their time.
        shared: ranks without a device of their own, whose micro-batches peers run.
        without_spare: value of --moe-ft-without-spare that counts, where dead ranks are replaced in place;
            else empty.
        no_repair: why they are not, if that was asked for.
    """

    iteration: int = 0
    phase: Phase = Phase.SETUP
    section: Section = Section.SETUP
    num_passes: Counter[Section] = field(default_factory=Counter)
    is_first: bool = True
    is_in_iteration: bool = False
    is_torn: bool = False
    is_replaying: bool = False
    is_left_out: bool = False
    num_tokens: torch.Tensor | None = None
    grad_norm: float | None = None
    stall_s: float = 0.0
    idle_s: float | None = None
    exchange_s: float | None = None
    is_saved: bool = True
    most_iteration: int | None = None
    stages_alone: Sequence[int] = ()
    num_replayed: int = 0
    replay_s: float = 0.0
    shared: tuple[int, ...] = ()
    without_spare: str = ""
    no_repair: str = ""

    @property
    def place(self) -> str:
        """Part of the run that the loop is in, the same in each start."""
        return "recovery" if self.phase is Phase.SETUP else f"iteration {self.iteration}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedIteration:
    """Results of an iteration that has just ended.

    Attributes:
        iteration: of the state that it made.
        losses: on the last stage the loss by name, elsewhere empty.
        is_skipped: whether the optimizer did not step because of infinite gradients.
        num_samples: of its global batch; the loop's counters do not include them yet.
    """

    iteration: int
    losses: Mapping[str, torch.Tensor]
    is_skipped: bool
    num_samples: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedResult:
    """Loss or gradients that Megatron's checks have rejected in the running iteration, on some rank.

    Attributes:
        exit_code: with which Megatron ends on all ranks; 0 if it continues.
        result: of this rank, as text; empty if another rank's was rejected.
        check: Megatron's name for what is wrong with it.
    """

    exit_code: int
    result: str = ""
    check: str = ""

    def __str__(self) -> str:
        rejected = f"the result {self.result} was rejected ({self.check})"
        return rejected if self.check else "the result of another rank was rejected"


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """Repair in place, on one rank.

    Attributes:
        number: of the round, from 1.
        iteration: that was broken off, and is finished now.
        recovered: the iteration that was recovered, from which training was run again.
        hung_s: by rank, of those that were killed because they hung: for how long.
        taken_over: lost nodes, each with the spare that has its ranks now.
        shared: ranks that have no device of their own after it, ascending: peers run their micro-batches.
        left_out: the failure that its batch has led to twice, if that iteration is left out.
    """

    number: int
    iteration: int
    recovered: int
    dead_ranks: Sequence[int]
    hung_s: Mapping[int, float]
    is_replacement: bool
    phases_s: Mapping[str, float]
    taken_over: Mapping[str, str]
    shared: tuple[int, ...] = ()
    left_out: Failure | None = None


class LoopListener:
    """Base of what acts at the seams of the loop. Does nothing by default."""

    def start(self) -> None:
        """Act before Megatron is initialized."""

    def before_setup(self) -> None:
        """Act before model and optimizer are built, and before --load is read."""

    def after_setup(self, built: Built) -> None:
        """Act on the built model and optimizer; a recovery happens here. Called by all ranks."""

    def after_recovery(self) -> None:
        """Act on the counters that the loop begins with. A window may still have to be replayed."""

    def begin_training(self, parts: LoopParts) -> None:
        """Act at the beginning of `train`; the data iterators exist."""

    def replay_if_due(self, forward_backward: Callable[..., Any] | None = None) -> None:
        """Run the iterations of a recovered window again, if any are left. Called by all ranks.

        Args:
            forward_backward: the loop's own, if it is about to call it.
        """

    def before_batch(self) -> None:
        """Act before the loop trains on the next batch, or skips it."""

    def begin_iteration(self) -> None:
        """Act before an iteration runs; no random number is drawn between this and its forward pass."""

    def begin_attempt(self) -> None:
        """Act before forward and backward run, perhaps not for the first time in this iteration."""

    def waits_for(self, iteration: int, phase: Phase) -> bool:
        """Return whether a phase that is noticed only on request must be noticed."""
        return False

    def enter_phase(self, iteration: int, phase: Phase) -> None:
        """Act on the phase that the running iteration enters."""

    def enter_section(self, section: Section) -> None:
        """Act on the section that the loop enters."""

    def before_step(self) -> None:
        """Act when gradients are ready and no weight has changed."""

    def before_capture(self) -> None:
        """Wait until no other thread uses the device: CUDA graphs of layers are captured next."""

    def note_reduced_gradients(self) -> None:
        """Act when gradients are reduced, and neither scaled nor clipped."""

    def note_final_gradients(self) -> None:
        """Act on gradients as the optimizer's step gets them, which begins next."""

    def begin_update(self) -> None:
        """Act right before the first weight of an iteration changes."""

    def end_update(self) -> None:
        """Act when this rank's weights and moments are those of the next iteration.

        Collectives of the step may follow, in which the rank hangs if another one is gone.
        """

    def end_iteration(self, ended: EndedIteration) -> None:
        """Act on the new state: `train_step` has returned, the next forward pass has not begun."""

    def reject(self, rejected: RejectedResult) -> None:
        """Act on a rejected result. Called by all ranks if training ends, before Megatron saves its state."""

    def after_iteration(self, ended: EndedIteration) -> None:
        """Report the iteration, when all listeners have acted on its state."""

    def suspend(self, iteration: int) -> None:
        """Keep the state, and release what a broken iteration leaves; `after_setup` comes next."""

    def after_repair(self, repair: Repair) -> None:
        """Report a repair: the iteration that was broken off is finished."""

    def end_training(self) -> None:
        """Act on the last state: `train` has returned or exits. Called by all ranks."""

    def after_training(self) -> None:
        """Report the last state, when all listeners have acted on it."""

    def end(self, reason: str, exit_code: int) -> None:
        """Act on the end of the program; if the code is not 0, the job is to be started again."""

    def failed(self, error: Exception) -> None:
        """Act on an exception that ends training."""

    def close(self) -> None:
        """Release what the listener holds, also after a failure."""


def _of_each[**Given](
    seam: Callable[Concatenate[LoopListener, Given], None],
) -> Callable[Concatenate["Listeners", Given], None]:
    """Return what calls a seam of all listeners."""

    def call(self: "Listeners", /, *args: Given.args, **kwargs: Given.kwargs) -> None:
        for each in self._listeners:
            getattr(each, seam.__name__)(*args, **kwargs)

    return call


class Listeners:
    """All listeners of one run, with the state of the loop. Owned by the training thread."""

    before_setup = _of_each(LoopListener.before_setup)
    begin_training = _of_each(LoopListener.begin_training)
    replay_if_due = _of_each(LoopListener.replay_if_due)
    before_batch = _of_each(LoopListener.before_batch)
    begin_attempt = _of_each(LoopListener.begin_attempt)
    after_repair = _of_each(LoopListener.after_repair)
    reject = _of_each(LoopListener.reject)
    before_capture = _of_each(LoopListener.before_capture)
    note_reduced_gradients = _of_each(LoopListener.note_reduced_gradients)
    note_final_gradients = _of_each(LoopListener.note_final_gradients)

    def __init__(self, loop: LoopState, listeners: Sequence[LoopListener]) -> None:
        self.loop = loop
        self._listeners = tuple(listeners)
        self._start_s = 0.0

    def __enter__(self) -> Self:
        for each in self._listeners:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        _call_all([each.close for each in reversed(self._listeners)])

    def find[Kind: LoopListener](self, kind: type[Kind]) -> Kind:
        """Return the listener of a kind of which there is one."""
        (found,) = (each for each in self._listeners if isinstance(each, kind))
        return found

    def add(self, last: LoopListener) -> None:
        """Call a further listener after the others. Before the start."""
        self._listeners += (last,)

    def after_setup(self, built: Built, iteration: int) -> None:
        """Recover; without a recovery the loop begins at the given iteration. Called by all ranks."""
        self.loop.iteration = iteration
        for each in self._listeners:
            each.after_setup(built)
        note_progress()
        for each in self._listeners:
            each.after_recovery()

    def begin_iteration(self, iteration: int) -> None:
        """Note that the loop is about to run an iteration."""
        if self.loop.section is Section.BETWEEN:
            self.loop.num_passes[Section.BETWEEN] += 1
        self._enter_section(Section.ITERATION)
        self.before_batch()
        loop = self.loop
        loop.iteration, loop.is_in_iteration = iteration, True
        loop.num_tokens, loop.grad_norm = None, None
        for each in self._listeners:
            each.begin_iteration()
        self._start_s = time.perf_counter()

    def is_awaited(self, phase: Phase) -> bool:
        """Return whether a listener waits for a phase of this iteration."""
        return any(each.waits_for(self.loop.iteration, phase) for each in self._listeners)

    def enter(self, phase: Phase) -> None:
        """Note the phase that the iteration enters.

        Raises:
            InjectedFaultError: if a fault of kind exception waits there.
        """
        self.loop.phase = phase
        note_progress()
        for each in self._listeners:
            each.enter_phase(self.loop.iteration, phase)

    @contextmanager
    def in_section(self, section: Section) -> Iterator[None]:
        """Note that the loop does something else in this context; it is over unless it raises."""
        before = self.loop.section
        self._enter_section(section)
        yield
        self.loop.num_passes[section] += 1
        self._enter_section(before)

    def _enter_section(self, section: Section) -> None:
        self.loop.section = section
        note_progress()
        for each in self._listeners:
            each.enter_section(section)

    def before_step(self) -> None:
        """Note that gradients are ready."""
        self.enter(Phase.BEFORE_STEP)
        for each in self._listeners:
            each.before_step()

    def begin_update(self) -> None:
        """Note that weights are about to change: the state is torn from now on."""
        if not self.loop.is_replaying:
            for each in self._listeners:
                each.begin_update()
        self.loop.is_torn = True

    def end_update(self) -> None:
        """Note that the state is whole again; a second call in an iteration does nothing."""
        if self.loop.is_torn:
            self.loop.is_torn = False
            if not self.loop.is_replaying:
                for each in self._listeners:
                    each.end_update()

    def end_iteration(
        self, losses: Mapping[str, torch.Tensor], *, is_skipped: bool, num_samples: int
    ) -> None:
        """Note that `train_step` has returned; see `EndedIteration` for the arguments."""
        self.enter(Phase.BETWEEN)
        loop = self.loop
        loop.iteration += 1
        loop.is_in_iteration = False
        ended = EndedIteration(
            iteration=loop.iteration,
            losses=losses,
            is_skipped=is_skipped,
            num_samples=num_samples,
            seconds=time.perf_counter() - self._start_s,
        )
        for each in self._listeners:
            each.end_iteration(ended)
        for each in self._listeners:
            each.after_iteration(ended)
        loop.stall_s = 0.0
        loop.num_passes[Section.ITERATION] += 1
        loop.is_first = False
        self._enter_section(Section.BETWEEN)

    def suspend(self, iteration: int) -> None:
        """Note that an iteration was broken off: model and optimizer stay, but not their state."""
        self._enter_section(Section.SETUP)
        for each in reversed(self._listeners):
            each.suspend(iteration)
        loop = self.loop
        loop.phase, loop.is_in_iteration = Phase.SETUP, False
        loop.is_torn = loop.is_replaying = False
        loop.is_first = True
        loop.num_tokens, loop.grad_norm = None, None

    def leave_out(self, iteration: int) -> None:
        """Note that an iteration is not run: its state is the one before it."""
        self.before_batch()
        self.loop.iteration = iteration + 1
        self._enter_section(Section.BETWEEN)

    def end_training(self) -> None:
        """Note that `train` has returned, or exits by one of Megatron's --exit-* flags."""
        self._enter_section(Section.EXIT)
        for each in self._listeners:
            each.end_training()
        for each in self._listeners:
            each.after_training()

    def end(self, reason: str, exit_code: int = 0) -> None:
        """Note that `pretrain` has returned or exited."""
        for each in self._listeners:
            each.end(reason, exit_code)

    def failed(self, error: Exception) -> None:
        """Note an exception that ends training."""
        _call_all([partial(each.failed, error) for each in self._listeners])


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Call all in their order, also those after one that fails; then raise what was raised."""
    with ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)
