"""Cells have the samples of the global batch, each once, on any ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from moe_ft.errors import PlanError
from moe_ft.planning.cells import Fit, Replica, cell_sizes, fit_ranks, samples_of

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


def fit(
    num_ranks: int,
    ep: int = 1,
    tp: int = 1,
    stages: int = 1,
    *,
    is_even: bool = True,
    num_experts: int = 0,
    num_slots: int = 0,
) -> Fit:
    return fit_ranks(
        num_ranks,
        num_stages=stages,
        tensor_ranks=tp,
        expert_ranks=tp,
        ep=ep,
        batch=(16, 2),
        is_even=is_even,
        num_experts=num_experts,
        num_slots=num_slots,
    )


def test_ranks_that_do_not_divide_the_batch_train_only_if_cells_may_differ() -> None:
    assert fit(3) == Fit(ep=1, sizes=cell_sizes(16, 2, 2), num_waiting=1)
    assert fit(3, is_even=False) == Fit(ep=1, sizes=cell_sizes(16, 2, 3), num_waiting=0)


def test_data_parallelism_shrinks_before_experts_come_to_fewer_ranks() -> None:
    found = {num: fit(num, ep=4) for num in range(1, 9)}
    assert {num: each.ep for num, each in found.items()} == {
        1: 1,
        2: 2,
        3: 2,
        4: 4,
        5: 4,
        6: 4,
        7: 4,
        8: 4,
    }
    assert [each.num_waiting for each in found.values()] == [0, 0, 1, 0, 1, 2, 3, 0]


def test_stages_and_tensors_stay_together() -> None:
    found = fit(7, ep=2, tp=2, stages=2)  # experts take 8 ranks
    assert (found.ep, found.num_waiting, len(found.sizes[0])) == (1, 3, 1)
    with pytest.raises(PlanError, match="3 ranks are too few: a whole model takes at least 4"):
        fit(3, ep=2, tp=2, stages=2)


def test_refusal_of_a_layout_names_the_ranks_or_the_batch() -> None:
    def refused(num_ranks: int, batch: tuple[int, int]) -> str:
        with pytest.raises(PlanError) as refusal:
            fit_ranks(
                num_ranks, num_stages=1, tensor_ranks=1, expert_ranks=4, batch=batch, is_even=True
            )
        return str(refusal.value)

    with pytest.raises(PlanError, match="1 ranks are too few: a whole model takes at least 4"):
        fit(1, stages=2, num_experts=5, num_slots=3)
    assert fit(5, stages=2, num_experts=5, num_slots=3).num_waiting == 1
    assert refused(3, (16, 2)) == "3 ranks are too few: a whole model takes at least 4"
    assert "64 ranks or fewer, 4 at least, cannot share a global batch of 12" in refused(
        64, (12, 2)
    )
