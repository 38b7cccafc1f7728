"""Training data after a repair begin after the samples that are counted, in the same iterator."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.training import training
from megatron.training.datasets.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)

from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.stack import Layers


@pytest.fixture
def loop(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """Yield the arguments of a loop whose loaders are the rest of their data sets."""
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    loop_args.sampler = MegatronPretrainingSampler

    class Loader(list[int]):
        batch_sampler: Any

    def build(data_set: list[int], consumed: int) -> Loader:
        loader = Loader(data_set[consumed:])
        loader.batch_sampler = object.__new__(loop_args.sampler)
        return loader

    monkeypatch.setattr(training, "build_pretraining_data_loader", build)
    yield loop_args
    destroy_rerun_state_machine()


def noted(monkeypatch: pytest.MonkeyPatch, built: Sequence[Any]) -> DataSets:
    """Have these loaders be built, once for each virtual stage."""
    loaders = iter(built)
    monkeypatch.setattr(training, "build_train_valid_test_data_loaders", lambda: next(loaders))
    data_sets = DataSets()
    with Layers() as layers:
        data_sets.install(layers)
        for _ in built:
            training.build_train_valid_test_data_loaders()
    return data_sets


def of_training(data_set: list[int] | None) -> Any:
    return (data_set and Namespace(dataset=data_set, collate_fn=list), None, None)


@pytest.mark.parametrize(
    ("sampler", "following"),
    [(MegatronPretrainingSampler, [6, 7]), (MegatronPretrainingRandomSampler, [6, 7, 6])],
)
def test_iterator_of_the_loop_continues_with_the_counted_samples(
    sampler: type, following: list[int], loop: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.sampler = sampler
    data_sets = noted(monkeypatch, [of_training(list(range(8)))])
    iterator = RerunDataIterator(iter(range(8)))
    assert [next(iterator), next(iterator)] == [0, 1]
    loop.consumed_train_samples = 6
    data_sets.renew_training(iterator)
    assert [next(iterator) for _ in following] == following
    assert iterator.saved_microbatches == following, "nothing of the broken iteration is left"


def test_each_virtual_stage_continues_with_its_own_data_if_it_reads_any(
    loop: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.consumed_train_samples = 2
    built = [of_training([0, 1, 2]), of_training(None), of_training([10, 11, 12])]
    iterators = [RerunDataIterator(iter([])), None, RerunDataIterator(iter([]))]
    noted(monkeypatch, built).renew_training(iterators)
    assert [next(each) for each in iterators if each is not None] == [2, 12]


@pytest.mark.parametrize("loaders", [None, [None]])
def test_validation_continues_with_its_own_count_on_ranks_that_read_it(
    loaders: list[None] | None, loop: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.consumed_train_samples, loop.consumed_valid_samples = 2, 3
    built = [
        (None, each, None) for each in (loaders, [Namespace(dataset=[0, 1, 2, 3], collate_fn=list)])
    ]
    iterator = RerunDataIterator(iter([]))
    noted(monkeypatch, built).renew_validation([None, iterator])
    assert next(iterator) == 3
