"""Sums cover each bit that rests between steps, and nothing that changes rightly."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ft.errors import ConfigError
from moe_ft.state.parameters import mark_slot
from moe_ft.state.rest import bit_sums, check_kind, copies, tensors_at_rest

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 5, 4097])
def test_every_single_bit_changes_the_sum(dtype: torch.dtype, length: int) -> None:
    tensor = torch.arange(length).to(dtype)
    words = tensor.view(_WORDS[tensor.element_size()])
    before = bit_sums([("w", tensor)])["w"]
    places = range(length) if length < 10 else (0, length // 2, length - 2, length - 1)
    for place in places:
        for bit in range(8 * tensor.element_size()):
            mask = torch.tensor([0], dtype=words.dtype)
            mask.view(torch.uint8)[bit // 8] = 1 << bit % 8
            words[place] ^= mask[0]
            assert bit_sums([("w", tensor)])["w"] != before, (place, bit)
            words[place] ^= mask[0]
    assert bit_sums([("w", tensor)])["w"] == before


def test_sum_is_of_the_numbers_wherever_they_lie() -> None:
    whole = torch.randn(5000)
    own = bit_sums([("w", whole[3:4500])])
    assert own == bit_sums([("w", whole[3:4500].clone())])
    assert own != bit_sums([("w", whole[4:4501])])
    table = torch.randn(64, 96)
    assert bit_sums([("w", table.t())]) == bit_sums([("w", table.t().contiguous())])
    assert bit_sums([("w", torch.empty(0)), ("v", torch.zeros(()))]) == {"w": 0, "v": 0}
    assert bit_sums([]) == {}


class Rank:
    """A rank with two weights, of which it owns a slice of the first, as it is after a step."""

    def __init__(self, *, overlap: bool) -> None:
        chunk: Any = torch.nn.Linear(4, 2)
        self.chunk = chunk
        self.chunk.extra = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.chunk.slot = torch.nn.Parameter(torch.zeros(3))
        mark_slot(self.chunk.slot)
        self.chunk.ddp_config = SimpleNamespace(overlap_param_gather=overlap)
        self.chunk.config, self.chunk.bucket_groups = SimpleNamespace(), []
        master = torch.nn.Parameter(self.chunk.weight.detach().reshape(-1)[2:5].clone())
        adam = torch.optim.Adam([master])
        master.grad = torch.ones(3)
        adam.step()
        self.optimizer = SimpleNamespace(
            optimizer=adam,
            config=SimpleNamespace(),
            model_param_group_index_map={self.chunk.weight: (0, 0)},
            _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=2, end=5)},
        )

    def names(self) -> dict[str, torch.Tensor]:
        return dict(tensors_at_rest([self.chunk], self.optimizer))


def test_masters_moments_and_all_weights_rest() -> None:
    rank = Rank(overlap=False)
    keys = ("param", "exp_avg", "exp_avg_sq", "step")
    assert set(rank.names()) == {
        *("chunk0.weight", "chunk0.bias", "chunk0.extra"),
        *(f"chunk0.weight/{key}" for key in keys),
    }


def test_only_the_own_slice_rests_where_other_weights_come_after_the_step() -> None:
    rank = Rank(overlap=True)
    found = rank.names()
    assert "chunk0.weight" not in found and "chunk0.bias" not in found and "chunk0.extra" in found
    assert torch.equal(found["chunk0.weight/own"], rank.chunk.weight.detach().reshape(-1)[2:5])


def test_copies_are_of_the_group_that_megatron_marks() -> None:
    chunk: Any = Rank(overlap=False).chunk
    chunk.bias.allreduce = False
    chunk.weight.tensor_model_parallel = True
    chunk.weight.shared_embedding = True
    found = {key: [name for name, _ in each] for key, each in copies([chunk]).items()}
    assert found == {
        "dp_cp": ["chunk0.weight", "chunk0.extra"],
        "embd": ["chunk0.weight"],
        "expt_dp": ["chunk0.bias"],
        "tp": ["chunk0.extra"],
    }


def test_tensor_parallel_ranks_that_add_up_nothing_are_compared_only_where_bits_repeat() -> None:
    chunk: Any = Rank(overlap=False).chunk.to("meta")
    mark_slot(chunk.slot)
    assert "tp" not in copies([chunk])
    chunk.bias.sequence_parallel = True
    assert [name for name, _ in copies([chunk])["tp"]] == ["chunk0.bias"]
    chunk.config.deterministic_mode = True
    assert len(copies([chunk])["tp"]) == 3


def test_state_that_moves_between_steps_is_refused() -> None:
    rank = Rank(overlap=False)
    check_kind([rank.chunk], rank.optimizer)
    rank.optimizer._state_offloader = SimpleNamespace()
    with pytest.raises(ConfigError, match="--moe-ft-check-weights cannot be used with optimizer"):
        check_kind([rank.chunk], rank.optimizer)
    with pytest.raises(ConfigError, match="needs Megatron's DistributedDataParallel"):
        check_kind([torch.nn.Linear(1, 1)], rank.optimizer)
