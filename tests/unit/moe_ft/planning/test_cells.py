"""Cells have the samples of the global batch, each once, on any ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from moe_ft.errors import PlanError
from moe_ft.planning.cells import Replica, cell_sizes, samples_of

BATCHES = st.tuples(st.integers(1, 200), st.integers(1, 8), st.integers(1, 9))


@given(BATCHES, st.integers(0, 10**6))
def test_cells_have_every_sample_once_and_are_as_equal_as_can_be(
    batch: tuple[int, int, int], consumed: int
) -> None:
    size, micro, ranks = batch
    if size < ranks * -(-size // (micro * ranks)):
        with pytest.raises(PlanError, match=f"global batch of {size} .* {ranks} data-parallel"):
            cell_sizes(size, micro, ranks)
        return
    sizes = cell_sizes(size, micro, ranks)
    cells = [each for row in sizes for each in row]
    assert max(cells) <= micro
    assert max(cells) - min(cells) <= 1
    assert len(sizes) == -(-size // (micro * ranks))
    samples = [
        sample
        for number, row in enumerate(sizes)
        for rank in range(len(row))
        for sample in samples_of(sizes, consumed, number, rank)
    ]
    assert samples == list(range(consumed, consumed + size))


def test_cells_of_ranks_that_divide_the_batch_are_those_of_megatrons_sampler() -> None:
    sizes = cell_sizes(24, 2, 3)
    for rank in range(3):
        stock = iter(MegatronPretrainingSampler(100, 48, 2, rank, 3))
        assert [list(samples_of(sizes, 48, number, rank)) for number in range(4)] == [
            next(stock) for _ in range(4)
        ]


def test_cells_of_three_ranks_are_those_that_were_seen_to_train() -> None:
    assert cell_sizes(16, 2, 3) == ((2, 2, 2), (2, 2, 2), (2, 1, 1))


def test_ranks_that_no_whole_model_fits_on_are_left_over() -> None:
    replica = Replica(num_ranks=4, num_experts=8, num_slots=4, batch=(16, 4))
    assert replica.fit(11) == (((4, 4), (4, 4)), 3)
    assert replica.fewest_ranks() == 8
    with pytest.raises(PlanError, match=r"7 ranks are too few: .* takes 4, 8 experts .* 8$"):
        replica.fit(7)


def test_ranks_without_samples_are_left_over() -> None:
    # 6 ranks would have 11 micro-batches of 1 sample, and 5 ranks 13.
    replica = Replica(num_ranks=1, batch=(64, 1))
    sizes, left = replica.fit(6)
    assert (len(sizes), len(sizes[0]), left) == (16, 4, 2)
    assert replica.fewest_ranks() == 1


def test_expert_parallel_ranks_stay_together() -> None:
    sizes, left = Replica(num_ranks=8, num_readers=4, batch=(32, 2)).fit(29)
    assert (len(sizes[0]), left) == (12, 5)
