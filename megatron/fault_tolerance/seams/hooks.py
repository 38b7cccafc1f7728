"""Seams into Megatron's training loop: wrapped functions that call the listeners of the run.

stack.py lists the functions, and what else stands around them. `installed` puts the originals back on exit.
iteration_seams.py wraps the optimizer's step. moe_ft/loop/listeners.py has the order of listeners.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args

from megatron.fault_tolerance.seams.iteration_seams import IterationSeams
from megatron.fault_tolerance.seams.megatron_loop import timeout_of_groups_s
from megatron.fault_tolerance.seams.pipeline_tap import IdleTime
from megatron.fault_tolerance.seams.reruns import rejected_result, without_save_to_nothing
from megatron.fault_tolerance.seams.stack import FINALIZE, Function, Layer, Layers
from megatron.fault_tolerance.seams.uneven_batches import (
    excess_samples,
    load_cells,
    samples_of_iteration,
    stepping_by_samples,
)
from moe_ft.elastic.slot_layer import SlotMoELayer, slot_layers
from moe_ft.faults import Section
from moe_ft.files.progress import note_progress, waiting
from moe_ft.loop.listeners import Built, Listeners
from moe_ft.loop.training_loop import LoopParts

_READ_S = 120.0  # a batch that takes longer hangs


@contextmanager
def installed(
    listeners: Listeners, after_setup: Callable[[Built, int], None] | None = None
) -> Iterator[None]:
    """Wrap the seams for one call of `megatron.training.pretrain`.

    Args:
        after_setup: called with what was built instead of the listeners' own, which needs all ranks.
    """
    with Layers() as layers:
        seams = _Seams(listeners, layers, after_setup or listeners.after_setup)
        functions: dict[str, Function] = {
            "setup_model_and_optimizer": seams.set_up,
            "train_step": seams.train_step,
            "dummy_train_step": seams.skip,
            "train": seams.train,
            "evaluate": seams.evaluate,
            "save_checkpoint": seams.save,
            "training_log": seams.log,
            "_set_capture_start": seams.begin_capture,
            "build_pretraining_data_loader": load_cells,
            "RerunDataIterator.__next__": _read,
        }
        layers.put(Layer.LISTENERS, functions)
        try:
            yield
            listeners.end("finished")
        except SystemExit as end:  # --exit-* flags, and results that fail validation
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            listeners.end(f"exit code {code}" if code else "exit flag", code)
            raise
        except Exception as error:
            listeners.failed(error)
            raise


class _Seams:
    """Functions around Megatron's own, each of which comes as the first argument."""

    def __init__(
        self, listeners: Listeners, layers: Layers, after_setup: Callable[[Built, int], None]
    ) -> None:
        self._listeners = listeners
        self._loop = listeners.loop
        self._layers = layers
        self._after_setup = after_setup
        self._iteration = IterationSeams(listeners, listeners.before_step)
        self.begin_capture = self._iteration.begin_capture
        self._idle = IdleTime()

    def set_up(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._listeners.before_setup()
        model, optimizer, scheduler = original(*args, **kwargs)
        connect_slots(model, optimizer, self._layers)
        if optimizer is not None:  # --skip-train builds none
            seam = {"ChainedOptimizer.zero_grad": self._zero_grad}
            self._layers.put(Layer.LISTENERS, seam, of=optimizer)
            self._iteration.install(optimizer, self._layers)
        self._after_setup((model, optimizer, scheduler), get_args().iteration)
        return model, optimizer, scheduler

    def train_step(
        self, original: Function, forward_step: Function, *args: Any, **kwargs: Any
    ) -> Any:
        if self._loop.is_left_out:  # nothing is read, computed or changed
            self._uncount_excess()
            return original(forward_step, *args, **kwargs)
        # data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func
        scheduler, config, forward_backward = args[3:6]
        self._listeners.replay_if_due(forward_backward)  # `train` may have wrapped it
        self._listeners.begin_iteration(kwargs["iteration"])
        noting = self._noting_num_tokens(config)
        timing = self._idle.timing(config, kwargs["iteration"])
        with noting, timing, stepping_by_samples(scheduler):
            result = original(partial(self._forward, forward_step), *args, **kwargs)
        self._loop.idle_s = self._idle.seconds()
        self._loop.exchange_s = self._idle.exchange_seconds()
        losses, is_skipped, _, should_exit, exit_code, *_ = result
        rejected = rejected_result(exit_code)
        if rejected is not None:
            self._listeners.reject(rejected)
        if should_exit:  # the rerun state machine ends the job before the optimizer step
            result = without_save_to_nothing(result)
        else:
            num_samples = samples_of_iteration(get_args())
            self._listeners.end_iteration(
                losses, is_skipped=bool(is_skipped), num_samples=num_samples
            )
            self._uncount_excess()
        return result

    def skip(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Read a batch instead of running an iteration (--iterations-to-skip)."""
        self._listeners.replay_if_due()
        self._listeners.before_batch()
        self._uncount_excess()
        get_args().skipped_train_samples -= excess_samples(get_args())
        return original(*args, **kwargs)

    def _uncount_excess(self) -> None:
        """Take off in advance what the loop is about to count too much."""
        args = get_args()
        args.consumed_train_samples -= excess_samples(args)

    def train(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        forward_step, model, optimizer, _, data_iterator, _, _, config, *_ = args
        self._listeners.begin_training(
            LoopParts(
                forward_step=forward_step,
                data_iterator=data_iterator,
                model=model,
                optimizer=optimizer,
                config=config,
                forward_backward=get_forward_backward_func(),
            )
        )
        try:
            result = original(*args, **kwargs)
        except SystemExit:  # --exit-interval, --exit-duration-in-mins, --exit-signal-handler
            self._listeners.end_training()
            raise
        self._listeners.replay_if_due()  # no iteration was left to train
        self._listeners.end_training()
        return result

    def evaluate(
        self, original: Function, forward_step: Function, *args: Any, **kwargs: Any
    ) -> Any:
        with self._listeners.in_section(Section.EVALUATION):
            return original(partial(_after_progress, forward_step), *args, **kwargs)

    def save(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self._listeners.in_section(Section.CHECKPOINT):
            return original(*args, **kwargs)

    def log(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Log the first iteration of a start like any other, if a line is due: it is not part of the next."""
        if self._loop.iteration % get_args().log_interval == 0:
            kwargs["is_first_iteration"] = False
        return original(*args, **kwargs)

    def _forward(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._iteration.begin_forward()
        output, loss_function = original(*args, **kwargs)
        self._iteration.watch(output)
        return output, loss_function

    @contextmanager
    def _noting_num_tokens(self, config: Any) -> Iterator[None]:
        """Keep the number of tokens by which --calculate-per-token-loss divides: a replay needs it."""

        def finalize(
            original: Function, model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            result = original(model, num_tokens, *args, **kwargs)  # sums it up in place
            self._loop.num_tokens = num_tokens
            return result

        with Layers() as layers:
            if config.calculate_per_token_loss and config.finalize_model_grads_func is not None:
                layers.put(Layer.LISTENERS, {FINALIZE: finalize}, of=config)
            yield

    def _zero_grad(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        # Megatron repeats forward and backward where results are rejected (its rerun state machine) and where
        # a paged stash overflows.
        self._listeners.begin_attempt()
        return original(*args, **kwargs)


def _after_progress(original: Function, *args: Any, **kwargs: Any) -> Any:
    note_progress()
    return original(*args, **kwargs)


def _read(original: Function, iterator: Any) -> Any:
    """Read a batch: a wait that other ranks do not explain."""
    with waiting(min(_READ_S, timeout_of_groups_s(get_args()))):
        return original(iterator)


def connect_slots(model: Sequence[Any], optimizer: Any, stack: Layers) -> None:
    """Connect slots and homes of a model that has them. Called by all ranks.

    Args:
        model: chunks as DDP wraps them.
        optimizer: Megatron's outermost; None with --skip-train.
    """
    layers = [layer for _, layer in slot_layers(model)]
    if not layers or optimizer is None:
        return
    for layer in layers:
        layer.start()
    optimizer.reload_model_params()
    for chunk in model:
        own = [layer for _, layer in slot_layers([chunk])]
        # Virtual stages may start to reduce gradients before they finish; DDP scales them then.
        functions = {
            "DistributedDataParallel.zero_grad_buffer": partial(_first, own, SlotMoELayer.begin),
            "DistributedDataParallel.start_grad_sync": partial(_first, own, SlotMoELayer.reduce),
            "DistributedDataParallel.finish_grad_sync": partial(_first, own, SlotMoELayer.reduce),
        }
        stack.put(Layer.SLOTS, functions, of=chunk)
    end = partial(_first, layers, SlotMoELayer.end)
    stack.put(Layer.SLOTS, {"ChainedOptimizer.step": end}, of=optimizer)


def _first(
    layers: Sequence[SlotMoELayer],
    act: Callable[[SlotMoELayer], None],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    for layer in layers:
        act(layer)
    return original(*args, **kwargs)
