"""Training data after a repair: new loaders over the data sets that are there, in the loop's iterators."""

from collections.abc import Callable, Iterator
from typing import Any

from megatron.training import get_args, training

from megatron.fault_tolerance.seams.patching import Patches


class Batches:
    """The data sets of training, kept from when the loop has built them. Owned by the training thread."""

    def __init__(self) -> None:
        self._data_sets: list[Any] = []  # [virtual stage]

    def install(self, patches: Patches) -> None:
        """Watch the loop build its loaders, once for each virtual stage."""
        patches.wrap(training, "build_train_valid_test_data_loaders", self._note)

    def _note(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loaders = original(*args, **kwargs)
        self._data_sets.append(None if loaders[0] is None else loaders[0].dataset)
        return loaders

    def renew(self, iterators: Any) -> None:
        """Have the loop's iterators continue after the samples that Megatron's arguments count.

        Args:
            iterators: Megatron's RerunDataIterator, or a list of one a virtual stage; None where nothing is
                read.
        """
        found = iterators if isinstance(iterators, list) else [iterators]
        for data_set, iterator in zip(self._data_sets, found, strict=True):
            if iterator is not None:
                renew(iterator, data_set, get_args().consumed_train_samples)


def renew(iterator: Any, data_set: Any, num_consumed: int) -> None:
    """Have an iterator of Megatron continue after some samples of a data set.

    Args:
        iterator: a RerunDataIterator.
        data_set: that it reads.
        num_consumed: samples, on all ranks together.
    """
    iterator.advance()
    iterator.iterable = None  # ends the workers of the old one
    loader = training.build_pretraining_data_loader(data_set, num_consumed)
    is_cyclic = get_args().dataloader_type == "cyclic"
    iterator.iterable = _cycle(loader) if is_cyclic else iter(loader)


def _cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
