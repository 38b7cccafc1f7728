"""Recovery of a state in processes that live on, and of the data that follow it.

A repair is a start of checkpointing: the listeners set up again. Data are read by new loaders over the data
sets that are there, in the loop's iterators.
"""

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

from megatron.training import get_args, training

from megatron.fault_tolerance.repair.meet import Position
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import ConfigError, RepairError, UnrecoverableError
from moe_ft.loop.listeners import Built, Listeners
from moe_ft.loop.training_loop import LoopParts

# With these flags an iteration gives, or writes, more than is kept of it.
_NEEDING_MORE = (
    "dsa_indexer_loss_coeff",
    "log_max_attention_logit",
    "log_num_zeros_in_grad",
    "moe_ft_router_log",
    "mtp_num_layers",
    "optimizer_cuda_graph",
    "qk_clip",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "save_activations_interval",
    "save_dgrads_interval",
    "save_params_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "vision_pretraining",
)


class Batches:
    """The data sets of one part of the loop, kept from when they are built. Owned by the training thread."""

    def __init__(self, loader_of: Callable[[Any], Any], counter: str) -> None:
        """Know no data set yet.

        Args:
            loader_of: picks the loader of this part; None on a rank that reads nothing.
            counter: Megatron's argument that counts its samples.
        """
        self._loader_of, self._counter = loader_of, counter
        self._data_sets: list[Any] = []  # [virtual stage]

    def install(self, patches: Patches) -> None:
        """Watch the loop build its loaders, once for each virtual stage."""
        patches.wrap(training, "build_train_valid_test_data_loaders", self._note)

    def _note(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loaders = original(*args, **kwargs)
        loader = self._loader_of(loaders)
        self._data_sets.append(None if loader is None else loader.dataset)
        return loaders

    def renew(self, iterators: Any) -> None:
        """Have the loop's iterators, one a virtual stage, continue after the samples that Megatron counts."""
        found = iterators if isinstance(iterators, list) else [iterators]
        for data_set, iterator in zip(self._data_sets, found, strict=True):
            if iterator is not None:
                _renew(iterator, data_set, getattr(get_args(), self._counter))


def training_batches() -> Batches:
    """Return the data of training."""
    return Batches(lambda loaders: loaders[0], "consumed_train_samples")


def validation_batches() -> Batches:
    """Return the data of evaluations during training."""
    # Megatron's are a list, of which --full-validation alone has more than one.
    return Batches(lambda loaders: next(iter(loaders[1] or ()), None), "consumed_valid_samples")


def _renew(iterator: Any, data_set: Any, num_consumed: int) -> None:
    """Have a RerunDataIterator continue after some samples, which all ranks together have consumed."""
    iterator.advance()
    iterator.iterable = None  # ends the workers of the old one
    loader = training.build_pretraining_data_loader(data_set, num_consumed)
    is_cyclic = get_args().dataloader_type == "cyclic"
    iterator.iterable = chain.from_iterable(repeat(loader)) if is_cyclic else iter(loader)


def recover(
    listeners: Listeners,
    batches: Batches,
    built: Built,
    parts: LoopParts,
    positions: Sequence[Position],
    *,
    may_keep: bool = True,
) -> int:
    """Recover a state, renew the data, and return the iteration that runs next. Called by all ranks.

    Args:
        may_keep: whether the state after the broken iteration may be recovered.

    Raises:
        RepairError: if there is no state, or it cannot be taken up.
    """
    args = get_args()
    most = most_iteration(positions, args)
    listeners.loop.most_iteration = most if may_keep else min(each.iteration for each in positions)
    try:
        listeners.after_setup(built, args.iteration)
    except (ConfigError, UnrecoverableError) as error:
        # This is no refusal of the job: another start may do better.
        what = "a repair cannot take up the state"
        if isinstance(error, UnrecoverableError):
            what = "a repair found no state to continue from"
        raise RepairError(f"{what}: {error}") from error
    batches.renew(parts.data_iterator)
    listeners.begin_training(parts)
    return int(args.iteration)


def most_iteration(positions: Sequence[Position], args: Any) -> int:
    """Return the latest iteration that can be recovered: the broken one, or the one after it.

    The state after the broken iteration will do if all survivors were in that iteration, and each can still
    make its result.
    """
    iterations = {each.iteration for each in positions}
    is_returned = any(each.done for each in positions)
    is_kept = not any(getattr(args, name, None) for name in _NEEDING_MORE)
    return min(iterations) + (len(iterations) == 1 and is_kept and not is_returned)
