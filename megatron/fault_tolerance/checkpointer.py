"""Checkpoints and recoveries for a training loop on `megatron.core` that is not Megatron's own.

The loop makes five calls, on all ranks: `recover`, then `before_step` and `end_iteration` in each iteration,
then `finish` and `close`. docs/custom_loops.md explains them, and examples/custom_loop.py is a loop that
runs. `megatron.training` is not used. Megatron's own loop has seams instead of these calls: seams/hooks.py.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron.fault_tolerance.custom_loop import (
    CustomLoop,
    Position,
    RunFacts,
    checked_config,
    checked_groups,
    copy_of_json,
    megatron_settings,
)
from megatron.fault_tolerance.seams.iteration_seams import IterationSeams
from megatron.fault_tolerance.seams.settings import lines_on_gpus
from megatron.fault_tolerance.seams.stack import Layer, Layers
from moe_ft.errors import CallOrderError, ConfigError
from moe_ft.loop.listener_order import listeners_of
from moe_ft.loop.training_loop import LoopParts
from moe_ft.saying import choose_format, warn
from moe_ft.strategies.registry import kind_of, kinds

__all__ = ["Checkpointer", "Position", "RunFacts"]

Replay = Callable[[Position, int], None]


class _CallStage(Enum):
    """Place of the loop among its calls."""

    NEW = "recover() has not been called"
    RECOVERING = "recover() has not returned"
    TRAINING = "an iteration is running"
    STEPPING = "before_step() was called and end_iteration() was not"
    FINISHED = "finish() was called"
    CLOSED = "close() was called"


# Every call, with the stages in which it is allowed.
_ALLOWED: Mapping[str, tuple[_CallStage, ...]] = {
    "recover": (_CallStage.NEW,),
    "restore_random_numbers": (_CallStage.TRAINING,),
    "before_step": (_CallStage.TRAINING,),
    "end_iteration": (_CallStage.TRAINING, _CallStage.STEPPING),
    "finish": (_CallStage.TRAINING,),
}
_ORDER = "recover, then for each iteration before_step and end_iteration, then finish and close"


class Checkpointer:
    """Takes checkpoints of a loop on one rank, and recovers. Owned by the thread that trains.

    All ranks make the same calls in the same order: each is collective, except for `close`. A call out of
    turn raises CallOrderError.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        run: RunFacts,
        groups: Any = None,
        reports_sigterm: bool = True,
    ) -> None:
        """Check the settings; nothing is started or written yet.

        torch.distributed is initialized and the process groups exist.

        Args:
            settings: by name of a flag of docs/flags.md, without --moe-ft- and with underscores, such as
                ``{"job_id": "run-1", "persist_interval": 10}``.
            model: ``[chunk]``, each in Megatron's DistributedDataParallel.
            optimizer: result of `get_megatron_optimizer`, its state not loaded from anywhere else later on.
            groups: ProcessGroupCollection with at least dp, dp_cp, expt_dp, tp, expt_tp, ep and pp; None for
                that of `megatron.core.parallel_state`.
            reports_sigterm: whether SIGTERM, which launchers send when a rank has died, is answered with a
                report and the end of the process. Then `recover` must run in the main thread.

        Raises:
            ConfigError: names the setting as a flag, its value, the rule and the remedy.
        """
        run.check()
        if not dist.is_initialized():
            raise ConfigError(
                "Checkpointer needs torch.distributed, which is not initialized. Call init_process_group and "
                "megatron.core.parallel_state.initialize_model_parallel first."
            )
        rank, model = dist.get_rank(), list(model)
        megatron = megatron_settings(model, optimizer, scheduler)
        config = checked_config(settings, megatron, dist.get_world_size(), run.train_iterations)
        choose_format(config.observability.log_format)
        for line in config.warnings(run.train_iterations, settings) if rank == 0 else ():
            warn(line)
        # The loop has made its layers itself: `transformer_impl` is a default that says nothing of them.
        graphs = Namespace(cuda_graph_impl=megatron.cuda_graph_impl)
        for line in lines_on_gpus(config, graphs, dist.get_world_size()) if rank == 0 else ():
            warn(line)
        self._kind = kind_of(config.strategy.strategy)
        self._built = (model, optimizer, scheduler)
        self._training = CustomLoop(run, megatron, checked_groups(groups))
        self._listeners = listeners_of(config, self._training, rank, on_sigterm=reports_sigterm)
        self._loop = self._listeners.loop
        self._seams = IterationSeams(self._listeners, self._note_step)
        self._train_iterations = run.train_iterations
        self._stage = _CallStage.NEW
        self._has_stepped = False
        self._opened = ExitStack()

    def recover(self, replay: Replay | None = None) -> Position:
        """Recover what can be recovered, and start to take checkpoints.

        Weights, moments, the scheduler and the random numbers are then those of the position that is
        returned. Nothing may draw random numbers between this and the next iteration; if making the data
        iterators does, call `restore_random_numbers` after it.

        Args:
            replay: runs forward and backward of one iteration again, and leaves the gradients ready for
                `optimizer.step`, which it does not call. It gets the position before the iteration and the
                number of micro-batches that the iteration had. Gradients are zero when it is called.
                Strategies that replay need it; it is called before this returns.

        Raises:
            ConfigError: if the settings do not fit this machine, the model or the state that is there.
            UnrecoverableError: if there is state and none of it is usable, or there is none and the setting
                on_missing is "fail".
        """
        self._check_turn("recover")
        if self._kind is not None and self._kind.replays and replay is None:
            others = " or ".join(each.name for each in kinds() if not each.replays)
            raise ConfigError(
                f"--moe-ft-strategy={self._kind.name} runs iterations again after a failure, and recover() "
                "was given nothing that runs them. Pass replay=, a function that runs forward and backward "
                f"of an iteration, or use {others}."
            )
        listeners, (model, optimizer, _) = self._listeners, self._built
        self._stage = _CallStage.RECOVERING
        self._opened.enter_context(listeners)
        layers = self._opened.enter_context(Layers())
        listeners.before_setup()
        self._seams.install(optimizer, layers)
        layers.put(Layer.LISTENERS, {"_set_capture_start": self._seams.begin_capture})
        for chunk in model:
            self._opened.callback(chunk.register_forward_pre_hook(self._begin_forward).remove)
            self._opened.callback(chunk.register_forward_hook(self._watch_output).remove)
        listeners.after_setup(self._built, self._training.position.iteration)
        parts = LoopParts(
            model=model,
            optimizer=optimizer,
            config=get_model_config(model[0]),
            forward_backward=replay or _run_nothing,
        )
        listeners.begin_training(parts)
        listeners.replay_if_due()
        self._begin_iteration()
        return self._training.position

    def restore_random_numbers(self) -> None:
        """Put the random numbers of the recovered state back once more, before the first iteration.

        Not collective. Needed only if something has drawn some since `recover`, such as a DataLoader when it
        is iterated. Does nothing if nothing was recovered.
        """
        self._check_turn("restore_random_numbers")
        if self._loop.iteration != self._training.first_iteration:
            raise CallOrderError(
                f"restore_random_numbers() was called after iteration {self._loop.iteration - 1}: random "
                "numbers have moved on. Call it before the first iteration."
            )
        self._training.restore_random_numbers()

    def before_step(self) -> None:
        """Wait until no copy reads weights any more. Called by all ranks before `optimizer.step`.

        Gradients are ready, and no weight has changed in this iteration. A loop that skips the optimizer step
        of an iteration leaves this out too.
        """
        self._check_turn("before_step")
        self._stage = _CallStage.STEPPING
        self._listeners.before_step()

    def end_iteration(
        self,
        iteration: int,
        *,
        consumed_samples: int,
        num_microbatches: int = 1,
        loss: float | torch.Tensor | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Position:
        """Take the record of the new state, and start the snapshots that are due. Called by all ranks.

        Optimizer and scheduler have stepped, and the next forward pass has not begun. Evaluate the state
        before this call: a recovery does not repeat what an evaluation after it has drawn.

        Args:
            iteration: of the state now, one more than before this iteration.
            consumed_samples: training samples of all ranks so far, those of this iteration included.
            loss: for the event log, on the ranks that know it. A tensor is read only if there is a log.
            state: of the loop itself on this rank, as JSON values; a recovery gives it back. It is copied.

        Returns:
            The position after the iteration, as `recover` would return it.

        Raises:
            ConfigError: if `state` is no JSON.
            CallOrderError: if an iteration is left out or counted twice, or samples decrease.
            DegradedError: with the setting on_error "raise", if a background part has failed.
        """
        self._check_turn("end_iteration")
        before = self._training.position
        if iteration != self._loop.iteration + 1:
            raise CallOrderError(
                f"end_iteration({iteration}) was called after iteration {self._loop.iteration}: iterations "
                f"are counted one by one, so this is {self._loop.iteration + 1}. Pass the number of "
                "iterations that are done, not the index of the last one."
            )
        if consumed_samples < before.consumed_samples:
            raise CallOrderError(
                f"end_iteration(consumed_samples={consumed_samples}) is less than "
                f"{before.consumed_samples}, as of iteration {self._loop.iteration}. Pass the samples since "
                "the beginning of the run."
            )
        position = Position(
            iteration=iteration,
            consumed_samples=consumed_samples,
            state=copy_of_json("end_iteration(state=...)", state or {}),
        )
        self._training.end_iteration(position, num_microbatches)
        self._listeners.end_iteration(
            {} if loss is None else {"lm loss": torch.as_tensor(loss)},
            is_skipped=not self._has_stepped,
            num_samples=consumed_samples - before.consumed_samples,
        )
        self._begin_iteration()
        return position

    def finish(self) -> bool:
        """Bring the last state to storage, if there is a persist directory. Called by all ranks.

        Before the planned number of iterations it leaves what the job needs to continue.

        Returns:
            False if the last state should be on storage and is not: end the process with an error then, so
            that the launcher starts it again, and it recovers from memory.
        """
        self._check_turn("finish")
        self._stage = _CallStage.FINISHED
        self._loop.is_in_iteration = False
        self._listeners.end_training()
        is_complete = self._loop.iteration >= self._train_iterations
        self._listeners.end("finished" if is_complete else "exit")
        return self._loop.is_saved

    def close(self) -> None:
        """End everything that `recover` has started; a second call does nothing.

        Without `finish` before it, what is in memory stays there for the next start.
        """
        self._stage = _CallStage.CLOSED
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Report an exception that ends training, and close; the process ends some seconds later."""
        if isinstance(error, Exception) and self._stage not in (_CallStage.NEW, _CallStage.CLOSED):
            self._listeners.failed(error)
        self.close()

    def _check_turn(self, call: str) -> None:
        if self._stage not in _ALLOWED[call]:
            raise CallOrderError(
                f"{call}() was called, and {self._stage.value}. The order is {_ORDER}."
            )

    def _begin_iteration(self) -> None:
        self._stage = _CallStage.TRAINING
        self._has_stepped = False
        self._listeners.begin_iteration(self._loop.iteration)
        self._listeners.begin_attempt()

    def _note_step(self) -> None:
        """Refuse a step that nothing has prepared, or that a replay would not do."""
        if self._stage is not _CallStage.STEPPING or self._has_stepped:
            reason = "it has stepped in this iteration" if self._has_stepped else self._stage.value
            raise CallOrderError(
                f"optimizer.step() was called, and {reason}. Call before_step() once before every "
                "optimizer.step(): a snapshot may still be reading the weights."
            )
        self._has_stepped = True

    def _begin_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._stage is _CallStage.TRAINING and torch.is_grad_enabled():
            self._seams.begin_forward()

    def _watch_output(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._seams.watch(output)


def _run_nothing(position: Position, num_microbatches: int) -> None:
    raise AssertionError("a strategy that does not replay asks for a replay")
