"""Ranks own as much of each expert as Megatron's buffers and our slices say."""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_ft.planning.model_size import ModelShape
from moe_ft.planning.ownership import Owned, SavingLayout, Sharding, owned_experts
from moe_ft.planning.sharding import assign_baseline_slices, assign_equal_slices


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelShape, SavingLayout]:
    """Draw a model whose tensors need no padding in Megatron's buffers, and a layout."""
    ep = draw(st.integers(1, 3))
    num_layers = draw(st.integers(1, 4))
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=128,
        num_experts=ep * draw(st.integers(1, 4)),
        moe_layers=tuple(range(num_layers)),
        moe_ffn_hidden_size=128 * draw(st.integers(1, 3)),
        is_gated=draw(st.booleans()),
        has_bias=draw(st.booleans()),
    )
    layout = SavingLayout(dp=ep * draw(st.sampled_from([1, 2, 4, 8, 16])), ep=ep)
    return shape, layout


def tensors_of(shape: ModelShape, ep: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (layer, local expert) and elements of a rank's tensors, in the order of the model."""
    places = product(range(shape.num_moe_layers), range(shape.num_experts // ep))
    yield from product(places, shape.expert_tensors)


def owned_in_megatron(shape: ModelShape, layout: SavingLayout, bucket_size: int | None) -> Owned:
    """Lay tensors out as the distributed optimizer does and cut every bucket into shards."""
    places = {
        torch.nn.Parameter(torch.empty(count, device="meta")): place
        for place, count in tensors_of(shape, layout.ep)
    }
    found = DistributedOptimizer._compute_per_buffer_param_layout(
        list(places),
        bucket_size,
        layout.num_groups,
        SimpleNamespace(pad_buckets_for_high_nccl_busbw=False),
    )
    num_local = shape.num_experts // layout.ep
    owned = np.zeros((layout.num_groups, shape.num_moe_layers, num_local), np.int64)
    for parameter, (start, end, bucket) in found.param_index_map.items():
        first, last = found.bucket_indices[bucket]
        shard = (last - first) // layout.num_groups
        for group in range(layout.num_groups):
            low = first + group * shard
            piece = min(end, low + shard) - max(start, low)
            owned[group, *places[parameter]] += max(0, piece)
    return owned


@settings(max_examples=30)
@given(models(), st.none() | st.integers(1, 400_000))
def test_distributed_optimizers_slices_are_those_of_megatrons_buffers(
    model: tuple[ModelShape, SavingLayout], bucket_size: int | None
) -> None:
    shape, layout = model
    owned = owned_experts(shape, shape.num_moe_layers, layout, bucket_parameters=bucket_size)
    assert (owned == owned_in_megatron(shape, layout, bucket_size)).all()


@settings(max_examples=30)
@given(models(), st.sampled_from(Sharding))
def test_other_slices_are_those_that_training_assigns(
    model: tuple[ModelShape, SavingLayout], sharding: Sharding
) -> None:
    shape, layout = model
    layout = SavingLayout(
        dp=layout.dp, ep=layout.ep, sharding=sharding, is_optimizer_distributed=False
    )
    assign = assign_baseline_slices if sharding is Sharding.NONE else assign_equal_slices
    places, counts = zip(*tensors_of(shape, layout.ep), strict=True)
    owned = owned_experts(shape, shape.num_moe_layers, layout, bucket_parameters=1)
    for group, slices in enumerate(assign(counts, layout.num_groups)):
        expected = np.zeros_like(owned[group])
        for place, (start, end) in zip(places, slices, strict=True):
            expected[place] += end - start
        assert (owned[group] == expected).all()
