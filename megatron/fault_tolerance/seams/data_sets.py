"""The data sets of Megatron's loop, for loaders that begin elsewhere and for samples of dead ranks."""

from collections.abc import Callable
from itertools import chain, repeat
from typing import Any, NamedTuple

from megatron.training import get_args

from megatron.fault_tolerance.seams.stack import Layer, Layers, loop_functions

_OF_CIRCLES = (
    "MegatronPretrainingRandomSampler"  # of the loader that `--dataloader-type cyclic` asks for
)


class Loaded(NamedTuple):
    """A data set, and what makes a batch of its samples."""

    data_set: Any
    collate: Any


class DataSets:
    """Data sets of one rank, kept from when the loop builds its loaders. Owned by the training thread."""

    def __init__(self) -> None:
        self._of_training: list[Loaded | None] = []  # [virtual stage]
        self._of_validation: list[Loaded | None] = []

    def install(self, layers: Layers) -> None:
        """Watch the loop build its loaders, once for each virtual stage."""
        layers.put(Layer.DATA, {"build_train_valid_test_data_loaders": self._note})

    def _note(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loaders = original(*args, **kwargs)
        self._of_training.append(_loaded(loaders[0]))
        # Megatron's are a list, of which --full-validation alone has more than one.
        self._of_validation.append(_loaded(next(iter(loaders[1] or ()), None)))
        return loaders

    @property
    def of_training(self) -> Loaded | None:
        """Data of training where there are no virtual stages; None on a rank that reads nothing."""
        return next(filter(None, reversed(self._of_training)), None)

    def renew_training(self, iterators: Any, num_more: int = 0) -> None:
        """Have the loop's iterators, one a virtual stage, continue after the samples that Megatron counts.

        Args:
            num_more: samples that are left out after those.
        """
        _renew(iterators, self._of_training, get_args().consumed_train_samples + num_more)

    def renew_validation(self, iterators: Any) -> None:
        """Do the same with the iterators of evaluations during training."""
        _renew(iterators, self._of_validation, get_args().consumed_valid_samples)


def _loaded(loader: Any) -> Loaded | None:
    return None if loader is None else Loaded(loader.dataset, getattr(loader, "collate_fn", None))


def _renew(iterators: Any, kept: list[Loaded | None], num_consumed: int) -> None:
    """Have RerunDataIterators continue after some samples, which all ranks together have consumed."""
    found = iterators if isinstance(iterators, list) else [iterators]
    for loaded, iterator in zip(kept, found, strict=True):
        if iterator is None:
            continue
        iterator.advance()
        iterator.iterable = None  # ends the workers of the old one
        data_set = None if loaded is None else loaded.data_set
        loader = loop_functions().build_pretraining_data_loader(data_set, num_consumed)
        # Another loop than Megatron-LM's may read one of its data sets in a circle, and the other not.
        sampler = getattr(loader, "batch_sampler", None)  # a script's own loader has none
        is_cyclic = type(sampler).__name__ == _OF_CIRCLES
        iterator.iterable = chain.from_iterable(repeat(loader)) if is_cyclic else iter(loader)
