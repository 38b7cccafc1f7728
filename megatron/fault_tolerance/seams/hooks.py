"""Seams into Megatron's training loop: wrapped functions that call the listeners of the run.

`installed` wraps `setup_model_and_optimizer`, `train_step`, `dummy_train_step` and `train` of
megatron.training.training and `zero_grad`, `step_with_ready_grads` and `get_grad_norm` of the outermost
optimizer, and restores the originals on exit. listeners.py says in which order listeners are called,
program/validation.py which versions of Megatron fit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args, training

from megatron.fault_tolerance.seams.listeners import Listeners
from megatron.fault_tolerance.seams.loop_facts import samples_of_iteration
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.replay import LoopParts
from moe_ft.faults import Phase
from moe_ft.state.tensors import inner_optimizers

Function = Callable[..., Any]
Seam = Callable[[Function], Function]


@contextmanager
def installed(listeners: Listeners) -> Iterator[None]:
    """Wrap the seams for one call of `megatron.training.pretrain`."""
    patches = Patches()
    setup = _setup_seam(listeners, patches)
    _wrap(patches, training, "setup_model_and_optimizer", setup)
    _wrap(patches, training, "train_step", _train_step_seam(listeners))
    _wrap(patches, training, "dummy_train_step", _skip_seam(listeners))
    _wrap(patches, training, "train", _train_seam(listeners))
    try:
        yield
        listeners.end("finished")
    except (
        SystemExit
    ) as exit_:  # all of Megatron's --exit-* flags, and results that fail validation
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        listeners.end(f"exit code {code}" if code else "exit flag", code)
        raise
    except Exception as error:
        listeners.failed(error)
        raise
    finally:
        patches.restore()


def _wrap(patches: Patches, owner: Any, name: str, seam: Seam) -> None:
    original = getattr(owner, name)
    patches.set(owner, name, wraps(original)(seam(original)))


def _setup_seam(listeners: Listeners, patches: Patches) -> Seam:
    def seam(original: Function) -> Function:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            listeners.before_setup()
            model, optimizer, scheduler = original(*args, **kwargs)
            if optimizer is not None:  # --skip-train builds none
                _mark_torn(listeners, optimizer, patches)
                _wrap(patches, optimizer, "zero_grad", _attempt_seam(listeners))
                step = _optimizer_seam(listeners, optimizer)
                _wrap(patches, optimizer, "step_with_ready_grads", step)
                if hasattr(optimizer, "get_grad_norm"):
                    _wrap(patches, optimizer, "get_grad_norm", _grad_norm_seam(listeners))
            listeners.after_setup((model, optimizer, scheduler), get_args().iteration)
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    return seam


def _train_step_seam(listeners: Listeners) -> Seam:
    def seam(original: Function) -> Function:
        def train_step(forward_step: Function, *args: Any, **kwargs: Any) -> Any:
            # data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func
            config, forward_backward = args[4:6]
            listeners.replay_if_due(forward_backward)  # `train` may have wrapped it
            listeners.begin_iteration(kwargs["iteration"])
            with _noting_num_tokens(listeners, config):
                result = original(_watched(listeners, forward_step), *args, **kwargs)
            losses, is_skipped, _, should_exit, *_ = result
            if not should_exit:  # the rerun state machine ends the job before the optimizer step
                listeners.end_iteration(
                    losses,
                    is_skipped=bool(is_skipped),
                    num_samples=samples_of_iteration(get_args()),
                )
            return result

        return train_step

    return seam


def _skip_seam(listeners: Listeners) -> Seam:
    """Wrap the function that reads a batch instead of running an iteration (--iterations-to-skip)."""

    def seam(original: Function) -> Function:
        def dummy_train_step(*args: Any, **kwargs: Any) -> Any:
            listeners.replay_if_due()
            listeners.before_batch()
            return original(*args, **kwargs)

        return dummy_train_step

    return seam


def _watched(listeners: Listeners, forward_step: Function) -> Function:
    """Return a forward step that notes when forward and backward of an iteration begin."""
    loop = listeners.loop

    def begin_backward(gradient: torch.Tensor) -> None:
        if loop.phase is Phase.FORWARD:
            listeners.enter(Phase.BACKWARD)

    def watched(*args: Any, **kwargs: Any) -> Any:
        if loop.phase in (Phase.SETUP, Phase.BETWEEN):
            listeners.enter(Phase.FORWARD)
        output, loss_function = forward_step(*args, **kwargs)
        # The schedule decides which micro-batch and chunk goes backward first. The hook changes no value:
        # it returns None.
        may_be_first = loop.phase is Phase.FORWARD and isinstance(output, torch.Tensor)
        if may_be_first and output.requires_grad:
            output.register_hook(begin_backward)
        return output, loss_function

    return watched


@contextmanager
def _noting_num_tokens(listeners: Listeners, config: Any) -> Iterator[None]:
    """Keep the number of tokens by which --calculate-per-token-loss divides: a replay needs it."""
    patches = Patches()
    original = getattr(config, "finalize_model_grads_func", None)
    if config.calculate_per_token_loss and original is not None:

        def finalize(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = original(model, num_tokens, *args, **kwargs)  # sums it up in place
            listeners.loop.num_tokens = num_tokens
            return result

        patches.set(config, "finalize_model_grads_func", finalize)
    try:
        yield
    finally:
        patches.restore()


def _mark_torn(listeners: Listeners, optimizer: Any, patches: Patches) -> None:
    """Mark the rank torn from its first inner step until the last copy into its own parameter slice."""
    inner, loop = inner_optimizers(optimizer), listeners.loop

    def torn_from(original: Function) -> Function:
        def step(*args: Any, **kwargs: Any) -> Any:
            loop.is_torn = True
            return original(*args, **kwargs)

        return step

    def torn_until(original: Function) -> Function:
        def copy(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            loop.is_torn = False
            return result

        return copy

    if inner:
        _wrap(patches, inner[0].optimizer, "step", torn_from)
        if hasattr(inner[-1], "_copy_main_params_to_model_params"):
            _wrap(patches, inner[-1], "_copy_main_params_to_model_params", torn_until)


def _train_seam(listeners: Listeners) -> Seam:
    def seam(original: Function) -> Function:
        def train(*args: Any, **kwargs: Any) -> Any:
            forward_step, model, optimizer, _, data_iterator, _, _, config, *_ = args
            listeners.begin_training(
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
                listeners.end_training()
                raise
            listeners.replay_if_due()  # no iteration was left to train
            listeners.end_training()
            return result

        return train

    return seam


def _attempt_seam(listeners: Listeners) -> Seam:
    """Wrap `zero_grad`, which begins each attempt at an iteration.

    Megatron repeats forward and backward where results are rejected (its rerun state machine) and where a
    paged stash overflows.
    """

    def seam(original: Function) -> Function:
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            listeners.begin_attempt()
            return original(*args, **kwargs)

        return zero_grad

    return seam


def _optimizer_seam(listeners: Listeners, optimizer: Any) -> Seam:
    loop = listeners.loop

    def seam(original: Function) -> Function:
        def step_with_ready_grads() -> Any:
            if loop.is_replaying:
                result = original()
                loop.is_torn = False
                return result
            listeners.before_step()
            with _noting_inner_step(listeners, optimizer):
                result = original()
            loop.is_torn = False
            listeners.enter(Phase.AFTER_STEP)
            return result

        return step_with_ready_grads

    return seam


def _grad_norm_seam(listeners: Listeners) -> Seam:
    """Note the norm that clipping uses: the one that train_step returns was rounded in a reduction."""

    def seam(original: Function) -> Function:
        def get_grad_norm() -> Any:
            norm = original()
            listeners.loop.grad_norm = None if norm is None else float(norm)
            return norm

        return get_grad_norm

    return seam


@contextmanager
def _noting_inner_step(listeners: Listeners, optimizer: Any) -> Iterator[None]:
    """Stop between the inner step and the copy to the model weights, if a fault waits there."""
    patches = Patches()
    inner = inner_optimizers(optimizer)
    if inner and listeners.is_awaited(Phase.IN_STEP):
        # The last one of the chain: the state is then as torn as it gets.
        torch_optimizer = inner[-1].optimizer
        original = torch_optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            listeners.enter(Phase.IN_STEP)
            return result

        patches.set(torch_optimizer, "step", step)
    try:
        yield
    finally:
        patches.restore()
