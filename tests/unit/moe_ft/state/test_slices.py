"""The tensors behind parameters, for each kind of optimizer, and how files keep them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.format.packings import Packing
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import describe, live_tensor, make_state
from moe_ft.state.tensors import inverse_scale, state_scales
from moe_ft.units import Level, UnitId, UnitKind, UnitPart
from tests.few_bits_adam import FewBitsAdam
from tests.unit.moe_ft.builders import make_optimizer, make_parameter

UNIT = UnitId(kind=UnitKind.EXPERT, layer=0, expert=0)
SIZE = 129
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
MOMENTS = [("exp_avg", "F32"), ("exp_avg_sq", "F32")]
LOSSY = [each for each in Packing if each.is_lossy]

Pairs = list[tuple[str, str]]


def parameter_of(optimizer: Any, dtype: torch.dtype = BF16) -> LocalParameter:
    """Return a parameter whose masters are Megatron's."""
    return make_parameter(
        UNIT,
        "w",
        parameter=torch.zeros(SIZE, dtype=dtype),
        optimizer=optimizer,
        master=torch.zeros(SIZE),
    )


def few_bits_parameter(
    dtype: torch.dtype = BF16,
    *,
    master: torch.dtype = FP32,
    exp_avg: torch.dtype = FP32,
    exp_avg_sq: torch.dtype = FP32,
    remainders: bool = True,
) -> LocalParameter:
    """Return a parameter of an optimizer that keeps its masters itself, as the flags say in few bits."""
    weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=dtype))
    adam = FewBitsAdam(
        [weight],
        exp_avg_dtype=exp_avg,
        exp_avg_sq_dtype=exp_avg_sq,
        master_weights=True,
        master_weight_dtype=master,
        store_param_remainders=remainders,
    )
    config = SimpleNamespace(
        optimizer="adam",
        use_precision_aware_optimizer=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
        main_params_dtype=master,
        exp_avg_dtype=exp_avg,
        exp_avg_sq_dtype=exp_avg_sq,
        store_param_remainders=remainders,
    )
    optimizer = SimpleNamespace(optimizer=adam, config=config)
    return make_parameter(UNIT, "w", parameter=weight, optimizer=optimizer, master=weight)


def native_optimizer(exp_avg: torch.dtype, exp_avg_sq: torch.dtype) -> Any:
    """Return an optimizer with Megatron's masters and moments in few bits, as with some FP8 recipes."""
    optimizer = make_optimizer()
    optimizer.config.use_precision_aware_optimizer = True
    optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    optimizer.config.main_params_dtype = FP32
    optimizer.config.exp_avg_dtype, optimizer.config.exp_avg_sq_dtype = exp_avg, exp_avg_sq
    return optimizer


def described(
    local: LocalParameter, level: Level = Level.FULL, part: UnitPart = UnitPart.WHOLE
) -> Pairs:
    """Return keys and types of what a snapshot holds of a parameter."""
    return [(each.key, each.dtype) for each in describe(local, level, part)]


# What there is of a parameter


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_adam_has_an_fp32_master_and_two_moments_whatever_forward_uses(dtype: torch.dtype) -> None:
    assert described(parameter_of(make_optimizer(), dtype)) == [("param", "F32"), *MOMENTS]


@pytest.mark.parametrize(("momentum", "moments"), [(0.0, []), (0.9, [("momentum_buffer", "F32")])])
def test_sgd_has_a_buffer_only_with_momentum(momentum: float, moments: Pairs) -> None:
    optimizer = make_optimizer(kind="sgd")
    optimizer.config.sgd_momentum = momentum
    assert described(parameter_of(optimizer)) == [("param", "F32"), *moments]


@pytest.mark.parametrize(("dtype", "name"), [(BF16, "BF16"), (FP16, "F16"), (FP32, "F32")])
def test_parameter_that_is_not_trained_has_its_weight_only(dtype: torch.dtype, name: str) -> None:
    local = make_parameter(UNIT, parameter=torch.zeros(SIZE, dtype=dtype))
    assert described(local) == [("weight", name)]


@pytest.mark.parametrize(
    ("master", "remainders", "name"),
    [(FP32, True, "I16"), (FP32, False, "F32"), (FP16, True, "F16"), (FP16, False, "F16")],
)
def test_optimizer_has_masters_of_its_own_beside_bf16_weights(
    master: torch.dtype, remainders: bool, name: str
) -> None:
    local = few_bits_parameter(master=master, remainders=remainders)
    assert described(local) == [("weight", "BF16"), ("master_param", name), *MOMENTS]


@pytest.mark.parametrize(
    ("exp_avg", "exp_avg_sq", "names"),
    [(BF16, FP16, ("BF16", "F16")), (FP8, BF16, ("U8", "BF16")), (FP32, FP8, ("F32", "U8"))],
)
def test_moments_are_of_the_types_that_the_flags_say(
    exp_avg: torch.dtype, exp_avg_sq: torch.dtype, names: tuple[str, str]
) -> None:
    moments = list(zip(("exp_avg", "exp_avg_sq"), names, strict=True))
    few_bits = few_bits_parameter(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    assert described(few_bits)[2:] == moments
    native = parameter_of(native_optimizer(exp_avg, exp_avg_sq))
    assert described(native) == [("param", "F32"), *moments]


@pytest.mark.parametrize(
    ("local", "weights"),
    [
        (parameter_of(make_optimizer()), ["param"]),
        (few_bits_parameter(), ["weight", "master_param"]),
        (make_parameter(UNIT), ["weight"]),
    ],
    ids=["adam", "few-bits", "not-trained"],
)
def test_parts_of_a_unit_are_its_weights_and_its_moments(
    local: LocalParameter, weights: list[str]
) -> None:
    moments = [] if local.optimizer is None else ["exp_avg", "exp_avg_sq"]
    assert [key for key, _ in described(local, part=UnitPart.WEIGHTS)] == weights
    assert [key for key, _ in described(local, part=UnitPart.MOMENTS)] == moments


# What is live


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize(
    ("master", "exp_avg", "exp_avg_sq"),
    [(FP32, FP32, FP32), (FP16, FP8, FP16), (FP32, BF16, FP8)],
)
def test_live_tensors_are_of_the_types_and_sizes_that_are_described(
    dtype: torch.dtype,
    remainders: bool,
    master: torch.dtype,
    exp_avg: torch.dtype,
    exp_avg_sq: torch.dtype,
) -> None:
    local = few_bits_parameter(
        dtype, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, remainders=remainders
    )
    names = {BF16: "BF16", FP16: "F16", FP32: "F32", FP8: "U8", torch.int16: "I16"}
    for key, name in described(local):
        if key != "weight":
            make_state(local, key, FP32)
        live = live_tensor(local, key)
        assert live is not None
        assert (names[live.dtype], live.shape) == (name, (SIZE,))


@pytest.mark.parametrize(("exp_avg", "exp_avg_sq"), [(FP8, FP16), (BF16, FP8)])
def test_moments_in_few_bits_beside_masters_of_megatron_are_made_with_their_scales(
    exp_avg: torch.dtype, exp_avg_sq: torch.dtype
) -> None:
    optimizer, master = native_optimizer(exp_avg, exp_avg_sq), torch.zeros(SIZE)
    optimizer.optimizer = FewBitsAdam([master], exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq)
    local = make_parameter(
        UNIT, parameter=torch.zeros(SIZE, dtype=BF16), optimizer=optimizer, master=master
    )
    scales = set()
    for key, dtype in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        make_state(local, key, dtype)
        live = live_tensor(local, key)
        assert live is not None
        assert live.dtype is dtype
        scales |= {key, f"{key}._scale_inv"} if dtype is FP8 else {key}
    assert set(state_scales(optimizer.optimizer, master)) == scales


def test_state_that_does_not_exist_yet_is_not_made_by_looking() -> None:
    local = few_bits_parameter()
    assert [live_tensor(local, key) for key in ("master_param", "exp_avg")] == [None, None]
    assert dict(local.optimizer.optimizer.state) == {}


def test_slice_is_cut_from_what_all_ranks_hold_alike_and_not_from_what_is_sharded() -> None:
    master = torch.arange(4.0)
    whole = make_parameter(UNIT, slice_=(1, 3), optimizer=make_optimizer(master), master=master)
    shard = make_parameter(
        UNIT,
        parameter=torch.arange(9.0),
        slice_=(5, 9),
        optimizer=make_optimizer(master),
        master=master,
        is_sharded=True,
    )
    for local, key, expected in (
        (whole, "param", [1.0, 2.0]),
        (shard, "param", [0.0, 1.0, 2.0, 3.0]),
        (shard, "weight", [5.0, 6.0, 7.0, 8.0]),
    ):
        live = live_tensor(local, key)
        assert live is not None
        assert live.tolist() == expected


# Tensors in few bits and their scales


def stand_in(scale: float) -> torch.Tensor:
    """Return a tensor that pretends to be fp32 and has bytes and a scale, as Transformer Engine's."""
    found: Any = torch.zeros(4)
    found._data = torch.arange(4, dtype=torch.uint8)
    found._scale_inv = torch.tensor([scale])
    return found  # type: ignore[no-any-return]


def test_scales_are_those_of_the_optimizer_and_those_of_fp8_tensors() -> None:
    master, other, of_optimizer = torch.zeros(4), torch.zeros(4), torch.tensor([2.0])
    first, second = stand_in(0.5), stand_in(0.25)
    optimizer = SimpleNamespace(
        _scales={master: {"exp_avg": of_optimizer}, other: {"exp_avg": torch.tensor([9.0])}},
        state={master: {"exp_avg": first, "exp_avg_sq": second, "step": 3, "extra": torch.ones(4)}},
    )
    found = state_scales(optimizer, master)
    assert {key: id(scale) for key, scale in found.items()} == {
        "exp_avg": id(of_optimizer),
        "exp_avg._scale_inv": id(inverse_scale(first)),
        "exp_avg_sq._scale_inv": id(inverse_scale(second)),
    }


# How files keep them


def ways(local: LocalParameter, level: Level = Level.FULL, **packings: Packing) -> Pairs:
    """Return keys of what a snapshot holds of a parameter, and how."""
    catalog = UnitCatalog([local], leaves_out_frozen=False, packings=packings)
    return [(each.key, each.packing) for each in catalog.tensors(UNIT, level)]


def test_each_part_of_the_state_is_kept_in_its_own_format() -> None:
    assert ways(
        parameter_of(make_optimizer()),
        master=Packing.SPLIT,
        exp_avg=Packing.BF16,
        exp_avg_sq=Packing.E5M2_BLOCKS,
    ) == [("param", "split"), ("exp_avg", "bf16"), ("exp_avg_sq", "fp8-e5m2-block")]


@pytest.mark.parametrize(("dtype", "packing"), [(BF16, "split"), (FP16, "exact"), (FP32, "exact")])
def test_masters_are_split_only_beside_bf16_weights(dtype: torch.dtype, packing: str) -> None:
    local = parameter_of(make_optimizer(), dtype)
    assert ways(local, master=Packing.SPLIT)[0] == ("param", packing)


@given(
    packing=st.sampled_from(LOSSY),
    exp_avg=st.sampled_from([FP32, BF16, FP16, FP8]),
    exp_avg_sq=st.sampled_from([FP32, BF16, FP16, FP8]),
)
def test_moments_are_packed_only_where_they_are_fp32(
    packing: Packing, exp_avg: torch.dtype, exp_avg_sq: torch.dtype
) -> None:
    local = parameter_of(native_optimizer(exp_avg, exp_avg_sq))
    found = ways(local, exp_avg=packing, exp_avg_sq=packing)
    assert [name for _, name in found] == [
        "exact",
        *(packing.value if dtype is FP32 else "exact" for dtype in (exp_avg, exp_avg_sq)),
    ]
