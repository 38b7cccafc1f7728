"""State of optimizers of matrices: what is cut with a parameter, what is not, and who has whole matrices."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon
from emerging_optimizers.soap import SOAP

from moe_ft.state.parameters import LocalParameter, _owners
from moe_ft.state.record import _apply_soap
from moe_ft.state.slices import describe, live_tensor, make_state, uncut_shapes
from moe_ft.state.tensors import inner_optimizers, kind_of
from moe_ft.units import Level, UnitId, UnitKind, UnitPart
from tests.unit.moe_ft.builders import make_parameter

UNIT = UnitId(kind=UnitKind.NON_EXPERT, layer=0)
ROWS, COLUMNS = 4, 6


def parameter_of(kind: Any, **options: Any) -> LocalParameter:
    """Return a matrix after one step of an optimizer, as Megatron wraps it where all parameters are FP32."""
    weight = torch.nn.Parameter(torch.randn(ROWS, COLUMNS))
    optimizer = kind([weight], lr=0.1, **options)
    weight.grad = torch.randn(ROWS, COLUMNS)
    optimizer.step()
    inner = SimpleNamespace(optimizer=optimizer, config=SimpleNamespace(optimizer="muon"))
    return make_parameter(UNIT, "w", parameter=weight, optimizer=inner, master=weight)


def keys_of(local: LocalParameter, part: UnitPart = UnitPart.WHOLE) -> list[tuple[str, int, int]]:
    return [(each.key, each.start, each.end) for each in describe(local, Level.FULL, part)]


def test_factors_of_soap_are_saved_whole_by_the_rank_that_saves_the_first_number() -> None:
    local = parameter_of(SOAP)
    cut = [("param", 0, 10), ("exp_avg", 0, 10), ("exp_avg_sq", 0, 10)]
    factors = [("L", ROWS), ("Q_L", ROWS), ("R", COLUMNS), ("Q_R", COLUMNS)]
    first = replace(local, start=0, end=10)
    assert keys_of(first) == [*cut, *((f"whole.{key}", 0, n * n) for key, n in factors)]
    assert keys_of(first, UnitPart.WEIGHTS) == cut[:1]
    assert keys_of(replace(local, start=10, end=24)) == [(key, 10, 24) for key, *_ in cut]
    assert [each.key for each in describe(local, Level.COMPUTE)] == ["weight"]


def test_tensors_that_soap_stores_by_columns_are_read_by_rows_and_put_back_by_columns() -> None:
    local = parameter_of(SOAP)
    state = local.optimizer.optimizer.state[local.master]
    bases = {key: state[key].clone() for key in ("Q_L", "Q_R")}
    assert not state["Q_R"].is_contiguous()
    saved = {}
    for each in describe(local, Level.FULL):
        tensor = live_tensor(local, each.key)
        assert tensor is not None
        saved[each.key] = tensor.clone()
    torch.testing.assert_close(saved["whole.Q_R"], bases["Q_R"].reshape(-1), rtol=0, atol=0)
    for key, tensor in saved.items():
        if key != "param":
            make_state(local, key, torch.float32)  # in place of what a survivor of a repair has
            target = live_tensor(local, key)
            assert target is not None
            target.copy_(tensor)
    assert state["Q_R"].is_contiguous()
    _apply_soap(state, 1)
    assert type(state["step"]) is int
    for key, base in bases.items():
        assert state[key].stride() == base.stride() == (1, len(base))
        assert torch.equal(state[key], base)


@pytest.mark.parametrize(
    ("method", "whole", "shape"),
    [
        ("adamuon", [], None),
        ("normuon", ["whole.moment2_buffer"], (1, 6)),
        ("namo", ["whole.moment2_buffer"], (1,)),
    ],
)
def test_second_moment_of_muon_is_cut_only_where_it_has_a_number_for_each_weight(
    method: str, whole: list[str], shape: tuple[int, ...] | None
) -> None:
    local = parameter_of(AdaptiveMuon, momentum=0.9, weight_decay=0.0, moment2_method=method)
    assert kind_of(local.optimizer) == "muon"
    assert [*uncut_shapes(local)] == whole
    keys = [key for key, *_ in keys_of(local)]
    assert keys == ["param", "momentum_buffer", *(whole or ["moment2_buffer"])]
    live = local.optimizer.optimizer.state[local.master]["moment2_buffer"]
    assert tuple(live.shape) == (shape or (ROWS, COLUMNS))


def test_adam_beside_muon_keeps_its_own_moments_whatever_its_configuration_names() -> None:
    local = parameter_of(torch.optim.AdamW)
    assert [key for key, *_ in keys_of(local)] == ["param", "exp_avg", "exp_avg_sq"]


def test_layer_wise_optimizer_gives_whole_matrices_to_one_rank_and_nothing_to_others() -> None:
    own, other, rest = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3))

    def inner(parameters: Sequence[torch.nn.Parameter]) -> Any:
        return SimpleNamespace(optimizer=torch.optim.SGD(parameters, lr=0.1))

    muon, adam = inner([own]), inner([rest])
    chain = SimpleNamespace(
        chained_optimizers=[muon], dp_cp_params_list=[[other], [own]], expt_dp_params_list=None
    )
    outermost = SimpleNamespace(chained_optimizers=[chain, adam])
    assert inner_optimizers(outermost) == [muon, adam]
    assert _owners(outermost) == {
        own: (muon, own, (0, 6)),
        other: (muon, None, (0, 0)),
        rest: (adam, rest, None),
    }
