"""Units are frozen for as long as they should be; parameters that other gradients depend on never are."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.state.freezing import Freezing, grouped_layers
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.builders import make_parameter

EMBEDDING, OTHER = UnitId(kind=UnitKind.EMBEDDING), UnitId(kind=UnitKind.OTHER)
OUTPUT, NORM = UnitId(kind=UnitKind.OUTPUT), UnitId(kind=UnitKind.FINAL_NORM)
LAYER, ROUTER = UnitId(kind=UnitKind.NON_EXPERT, layer=0), UnitId(kind=UnitKind.ROUTER, layer=0)
EXPERTS = [UnitId(kind=UnitKind.EXPERT, layer=0, expert=each) for each in range(3)]
MARKS = [
    "sequence_parallel",
    "average_gradients_across_tp_domain",
    "shared_embedding",
    "pipeline_parallel",
    "flextron_router_pp_sync",
]


def freezing(parameters: Iterable[LocalParameter], *, tp_size: int = 1) -> Freezing:
    return Freezing(list(parameters), tp_size=tp_size, is_possible=lambda _: True)


def frozen_names(found: Freezing, parameters: list[LocalParameter], *units: UnitId) -> list[str]:
    """Return the names of the parameters that need no gradients while units are frozen."""
    with found.frozen(frozenset(units)):
        return [each.name for each in parameters if not each.parameter.requires_grad]


def grouped(layer: int, num_experts: int = 3) -> list[LocalParameter]:
    """Return experts as Transformer Engine's grouped layers have them."""
    return [
        make_parameter(
            UnitId(kind=UnitKind.EXPERT, layer=layer, expert=each),
            f"decoder.layers.{layer}.mlp.experts.linear_fc{part}.{kind}{each}",
        )
        for part in (1, 2)
        for kind in ("weight", "bias")
        for each in range(num_experts)
    ]


@pytest.mark.parametrize("unit", [OUTPUT, NORM, LAYER, ROUTER, EXPERTS[0]])
def test_units_of_these_kinds_are_frozen_and_no_others(unit: UnitId) -> None:
    parameters = [make_parameter(each) for each in (OUTPUT, NORM, LAYER, ROUTER, *EXPERTS)]
    assert frozen_names(freezing(parameters), parameters, unit) == [f"{unit}.weight"]


@pytest.mark.parametrize("unit", [EMBEDDING, OTHER])
def test_units_that_the_graph_or_a_reduction_depends_on_are_never_frozen(unit: UnitId) -> None:
    parameters = [make_parameter(unit)]
    assert frozen_names(freezing(parameters), parameters, unit) == []


@pytest.mark.parametrize("mark", MARKS)
def test_parameter_whose_gradient_is_reduced_with_others_is_never_frozen(mark: str) -> None:
    coupled, free = make_parameter(LAYER, "a"), make_parameter(LAYER, "b")
    setattr(coupled.parameter, mark, True)
    assert frozen_names(freezing([coupled, free]), [coupled, free], LAYER) == ["b"]


@pytest.mark.parametrize(("tp_size", "is_frozen"), [(1, True), (2, False)])
@pytest.mark.parametrize("which", ["q", "k"])
def test_norm_of_queries_or_keys_is_frozen_only_without_tensor_parallelism(
    which: str, tp_size: int, is_frozen: bool
) -> None:
    norm = make_parameter(LAYER, f"decoder.layers.0.self_attention.{which}_layernorm.weight")
    found = freezing([norm], tp_size=tp_size)
    assert bool(frozen_names(found, [norm], LAYER)) is is_frozen


@settings(max_examples=60)
@given(st.sets(st.sampled_from([(layer, each) for layer in (0, 1) for each in range(3)])))
def test_grouped_experts_of_a_layer_are_frozen_all_or_none(chosen: set[tuple[int, int]]) -> None:
    parameters = [*grouped(0), *grouped(1)]
    units = [UnitId(kind=UnitKind.EXPERT, layer=layer, expert=each) for layer, each in chosen]
    found = set(frozen_names(freezing(parameters), parameters, *units))
    for layer in (0, 1):
        names = {each.name for each in grouped(layer)}
        is_whole = {(layer, each) for each in range(3)} <= chosen
        assert found & names == (names if is_whole else set())


def test_layers_whose_experts_freeze_together_are_known_by_the_names_of_their_parameters() -> None:
    alone = "decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.weight"
    unit = UnitId(kind=UnitKind.EXPERT, layer=2, expert=0)
    mtp = UnitId(kind=UnitKind.EXPERT, block="mtp", layer=0, expert=0)
    name = "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight0"
    parameters = [*grouped(1), make_parameter(unit, alone), make_parameter(mtp, name)]
    assert grouped_layers([*parameters, make_parameter(NORM)]) == {"layer.1", "mtp.0"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_parameters_are_trained_again_after_an_exception_too(error: type[BaseException]) -> None:
    parameters = [make_parameter(unit) for unit in EXPERTS]
    with pytest.raises(error), freezing(parameters).frozen(frozenset(EXPERTS)):
        raise error
    assert all(each.parameter.requires_grad for each in parameters)


def test_no_unit_is_frozen_whose_weight_gradients_are_computed_elsewhere() -> None:
    parameters = [make_parameter(unit) for unit in (*EXPERTS, NORM)]
    found = Freezing(parameters, tp_size=1, is_possible=lambda unit: unit == EXPERTS[1])
    assert frozen_names(found, parameters, *EXPERTS, NORM) == [f"{EXPERTS[1]}.weight"]


# Gradients that were computed although their unit is frozen


def with_gradient(unit: UnitId) -> LocalParameter:
    master = torch.zeros(4)
    master.grad = torch.ones(4)
    return make_parameter(unit, master=master)


def gradients(parameters: list[LocalParameter]) -> list[bool]:
    """Return of each master whether it has a gradient."""
    return [each.master is not None and each.master.grad is not None for each in parameters]


@pytest.mark.parametrize("is_possible", [False, True])
def test_gradients_of_frozen_units_are_dropped_also_of_what_is_never_frozen(
    is_possible: bool,
) -> None:
    parameters = [with_gradient(unit) for unit in (EMBEDDING, EXPERTS[0], NORM)]
    found = Freezing(parameters, tp_size=1, is_possible=lambda _: is_possible)
    found.drop_gradients({EMBEDDING, EXPERTS[0]})
    assert gradients(parameters) == [False, False, True]


def test_gradient_that_the_optimizer_keeps_beside_is_dropped_too() -> None:
    local = with_gradient(NORM)
    local.master.decoupled_grad = torch.ones(4)  # type: ignore[union-attr]
    freezing([local]).drop_gradients({NORM})
    assert local.master.decoupled_grad is None  # type: ignore[union-attr]
