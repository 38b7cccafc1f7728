"""The seams into Megatron's training loop: which functions are wrapped, and when they call the run.

`installed` wraps `setup_model_and_optimizer`, `train_step`, `dummy_train_step` and `train` of
megatron.training.training and `zero_grad`, `step_with_ready_grads` and `get_grad_norm` of the outermost
optimizer, and restores the originals on exit. What happens at a seam is run.py; which versions fit is
validation.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import training

from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.replay import LoopParts
from megatron.fault_tolerance.watch.run import TrainingRun
from moe_ft.faults import Phase
from moe_ft.state.tensors import inner_optimizers


@contextmanager
def installed(run: TrainingRun) -> Iterator[None]:
    """Wrap the seams for one call of `megatron.training.pretrain`."""
    patches = Patches()
    _wrap(patches, training, "setup_model_and_optimizer", _setup_seam(run, patches))
    _wrap(patches, training, "train_step", _train_step_seam(run))
    _wrap(patches, training, "dummy_train_step", _skip_seam(run))
    _wrap(patches, training, "train", _train_seam(run))
    try:
        yield
        run.end("finished")
    except (
        SystemExit
    ) as exit_:  # all of Megatron's --exit-* flags, and a failed validation of results
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        run.end(f"exit code {code}" if code else "exit flag", code)
        raise
    except Exception as error:
        run.note_failure(error)
        raise
    finally:
        patches.restore()


Seam = Callable[[Callable[..., Any]], Callable[..., Any]]


def _wrap(patches: Patches, owner: Any, name: str, seam: Seam) -> None:
    original = getattr(owner, name)
    patches.set(owner, name, wraps(original)(seam(original)))


def _setup_seam(run: TrainingRun, patches: Patches) -> Seam:
    def seam(original: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            run.before_setup()
            model, optimizer, scheduler = original(*args, **kwargs)
            if optimizer is not None:  # --skip-train builds none
                _mark_torn(run, optimizer, patches)
                _wrap(patches, optimizer, "zero_grad", _attempt_seam(run))
                _wrap(patches, optimizer, "step_with_ready_grads", _optimizer_seam(run, optimizer))
                if hasattr(optimizer, "get_grad_norm"):
                    _wrap(patches, optimizer, "get_grad_norm", _grad_norm_seam(run))
            run.after_setup(model, optimizer, scheduler)
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    return seam


def _train_step_seam(run: TrainingRun) -> Seam:
    def seam(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(forward_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func
            config, forward_backward = args[4:6]
            run.replay_if_due(forward_backward)  # `train` may have wrapped it
            run.begin_iteration(kwargs["iteration"])
            with _noting_num_tokens(run, config):
                result = original(run.watch_forward_step(forward_step), *args, **kwargs)
            losses, is_skipped, _, should_exit, *_ = result
            if not should_exit:  # the rerun state machine ends the job before the optimizer step
                run.end_iteration(losses, is_skipped=bool(is_skipped))
            return result

        return train_step

    return seam


def _skip_seam(run: TrainingRun) -> Seam:
    """--iterations-to-skip reads a batch instead of an iteration."""

    def seam(original: Callable[..., Any]) -> Callable[..., Any]:
        def dummy_train_step(*args: Any, **kwargs: Any) -> Any:
            run.replay_if_due()
            run.skip_iteration()
            return original(*args, **kwargs)

        return dummy_train_step

    return seam


@contextmanager
def _noting_num_tokens(run: TrainingRun, config: Any) -> Iterator[None]:
    """Keep the number of tokens by which --calculate-per-token-loss divides: a replay needs it."""
    patches = Patches()
    original = getattr(config, "finalize_model_grads_func", None)
    if run.checkpoints and config.calculate_per_token_loss and original is not None:

        def finalize(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = original(model, num_tokens, *args, **kwargs)  # sums it up in place
            run.num_tokens = num_tokens
            return result

        patches.set(config, "finalize_model_grads_func", finalize)
    try:
        yield
    finally:
        patches.restore()


def _mark_torn(run: TrainingRun, optimizer: Any, patches: Patches) -> None:
    """Mark the rank torn from its first inner step until the last copy into its own parameter slice."""
    inner = inner_optimizers(optimizer)

    def torn_from(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            run.is_torn = True
            return original(*args, **kwargs)

        return step

    def torn_until(original: Callable[..., Any]) -> Callable[..., Any]:
        def copy(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            run.is_torn = False
            return result

        return copy

    if inner:
        _wrap(patches, inner[0].optimizer, "step", torn_from)
        if hasattr(inner[-1], "_copy_main_params_to_model_params"):
            _wrap(patches, inner[-1], "_copy_main_params_to_model_params", torn_until)


def _train_seam(run: TrainingRun) -> Seam:
    def seam(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **kwargs: Any) -> Any:
            forward_step, model, optimizer, _, data_iterator, _, _, config, *_ = args
            run.begin_training(
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
                run.end_training()
                raise
            run.replay_if_due()  # no iteration was left to train
            run.end_training()
            return result

        return train

    return seam


def _attempt_seam(run: TrainingRun) -> Seam:
    """Wrap zero_grad, with which each attempt at an iteration begins, also where Megatron repeats one.

    It repeats forward and backward where results are rejected (its rerun state machine) and where a paged
    stash overflows.
    """

    def seam(original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            run.begin_attempt()
            return original(*args, **kwargs)

        return zero_grad

    return seam


def _optimizer_seam(run: TrainingRun, optimizer: Any) -> Seam:
    def seam(original: Callable[..., Any]) -> Callable[..., Any]:
        def step_with_ready_grads() -> Any:
            if run.is_replaying:
                result = original()
                run.is_torn = False
                return result
            run.before_step()
            with _noting_inner_step(run, optimizer):
                result = original()
            run.is_torn = False
            run.enter(Phase.AFTER_STEP)
            return result

        return step_with_ready_grads

    return seam


def _grad_norm_seam(run: TrainingRun) -> Seam:
    """Note what clipping uses: what train_step returns was rounded on its way through a reduction."""

    def seam(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_grad_norm() -> Any:
            norm = original()
            run.grad_norm = None if norm is None else float(norm)
            return norm

        return get_grad_norm

    return seam


@contextmanager
def _noting_inner_step(run: TrainingRun, optimizer: Any) -> Iterator[None]:
    """While a fault waits in the inner step, stop between it and the copy to the model weights."""
    patches = Patches()
    inner = inner_optimizers(optimizer)
    if inner and run.faults.is_armed(run.iteration, Phase.IN_STEP):
        # The last of the chain: the state is as torn as it gets.
        torch_optimizer = inner[-1].optimizer
        original = torch_optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            run.enter(Phase.IN_STEP)
            return result

        patches.set(torch_optimizer, "step", step)
    try:
        yield
    finally:
        patches.restore()
