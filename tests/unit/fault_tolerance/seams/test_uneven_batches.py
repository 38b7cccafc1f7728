"""Uneven batches: what Megatron counts too much, and the samples that its sampler reads."""

import argparse

import pytest
from megatron.core import num_microbatches_calculator as calculators

from megatron.fault_tolerance.seams import uneven_batches
from megatron.fault_tolerance.seams.uneven_batches import (
    CellSampler,
    UnevenBatches,
    excess_samples,
    samples_of_iteration,
    stepping_by_samples,
)

BATCH, MICRO = 16, 2


class Scheduler:
    """Scheduler that counts."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment


def use(monkeypatch: pytest.MonkeyPatch, kind: type, num_ranks: int) -> argparse.Namespace:
    calculator = kind(BATCH, MICRO, num_ranks, False, 0)
    monkeypatch.setattr(calculators, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
    args = argparse.Namespace(micro_batch_size=MICRO, data_parallel_size=num_ranks)
    monkeypatch.setattr(uneven_batches, "get_args", lambda: args)
    return args


@pytest.mark.parametrize(
    ("kind", "num_ranks", "excess"),
    [
        (UnevenBatches, 3, 2),
        (UnevenBatches, 4, 0),
        (calculators.ConstantNumMicroBatchesCalculator, 4, 0),
    ],
)
def test_samples_of_an_iteration_are_those_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, kind: type, num_ranks: int, excess: int
) -> None:
    args = use(monkeypatch, kind, num_ranks)
    assert (samples_of_iteration(args), excess_samples(args)) == (BATCH, excess)
    scheduler = Scheduler()
    with stepping_by_samples(scheduler):
        scheduler.step(increment=BATCH + excess)
    scheduler.step(increment=5)
    assert scheduler.num_steps == BATCH + 5


@pytest.mark.parametrize("num_ranks", [1, 3, 4, 5])
def test_ranks_read_the_batch_of_an_iteration_and_no_sample_twice(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    use(monkeypatch, UnevenBatches, num_ranks)
    count = calculators.get_num_microbatches()
    readers = [
        iter(CellSampler(3 * BATCH - 1, BATCH, MICRO, rank, num_ranks)) for rank in range(num_ranks)
    ]
    cells = [next(reader) for _ in range(count) for reader in readers]
    assert [sample for cell in cells for sample in cell] == [*range(BATCH, 2 * BATCH)]
    assert all(next(reader, None) is None for reader in readers), "a part of a batch is left"
