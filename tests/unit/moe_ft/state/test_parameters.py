"""The units of the parameters that Megatron's own MoE layer has."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_ft.errors import ConfigError
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.state.parameters import GroupPlace, LocalParameter, StatePlaces, local_parameters
from moe_ft.units import UnitKind

ALONE = GroupPlace(rank=0, size=1)
PLACES = StatePlaces(dp=ALONE, expt_dp=ALONE, tp=ALONE, expt_tp=ALONE)


class Model(torch.nn.Module):
    """One layer of one of Megatron's MoE layers, which believes in two expert-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            num_moe_experts=2,
            expert_model_parallel_size=2,
            moe_router_topk=2,
            moe_ffn_hidden_size=8,
            moe_shared_expert_intermediate_size=8,
            moe_token_dispatcher_type="allgather",  # the only one that needs no GPU
            add_bias_linear=False,
            use_cpu_initialization=True,
        )
        group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        names = ("tp", "cp", "ep", "dp", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp")
        self.groups: Any = SimpleNamespace(**dict.fromkeys(names, group))
        build: Any = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
        layer: Any = torch.nn.Module()
        layer.layer_number = 1
        layer.mlp = build(self.config, layer_number=1, pg_collection=self.groups)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])
        self.layer = [layer]  # not a second name of its parameters

    def add(self, name: str) -> None:
        """Add one of Megatron's linear layers for experts under a name."""
        linear = ColumnParallelLinear(
            8,
            8,
            config=self.config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            is_expert=True,
            tp_group=self.groups.expt_tp,
        )
        self.layer[0].mlp.add_module(name, linear)

    def parameters_found(self) -> list[LocalParameter]:
        """Return the parameters with their units."""
        return local_parameters([self], None, PLACES, assign_equal_slices)


def test_units_of_an_moe_layer_agree_with_megatrons_marks() -> None:
    found = {each.name: each for each in Model().parameters_found()}
    layer = "decoder.layers.0.mlp"
    experts = {
        f"{layer}.experts.local_experts.{n}.linear_fc{m}.weight" for n in (0, 1) for m in (1, 2)
    }
    assert {name for name, each in found.items() if each.is_expert} == experts
    assert {each.unit.kind for name, each in found.items() if name in experts} == {UnitKind.EXPERT}
    assert found[f"{layer}.router.weight"].unit.kind is UnitKind.ROUTER
    assert found[f"{layer}.shared_experts.linear_fc1.weight"].unit.kind is UnitKind.NON_EXPERT


def test_parameter_of_experts_without_the_name_of_one_is_refused() -> None:
    model = Model()
    model.add("extra_experts")
    with pytest.raises(
        ConfigError,
        match=r"parameter decoder\.layers\.0\.mlp\.extra_experts\.weight is an expert's .*"
        r"must have the name of one.*or use --moe-ft-strategy none",
    ):
        model.parameters_found()


@pytest.mark.parametrize("name", ["bias", "weight"])
def test_one_parameter_of_all_experts_of_a_rank_is_refused(name: str) -> None:
    # As --moe-single-grouped-bias has it, with Transformer Engine.
    model = Model()
    grouped: Any = torch.nn.Module()
    grouped.linear_fc1 = torch.nn.Module()
    parameter: Any = torch.nn.Parameter(torch.zeros(2, 8))
    parameter.allreduce = False
    grouped.linear_fc1.register_parameter(name, parameter)
    model.layer[0].mlp.experts = grouped
    with pytest.raises(ConfigError, match=rf"experts\.linear_fc1\.{name} is an expert's"):
        model.parameters_found()


def test_last_norm_of_a_hybrid_model_is_the_unit_that_a_gpt_has() -> None:
    model = Model()
    model.decoder.final_norm = torch.nn.LayerNorm(8)
    kinds = {each.name: each.unit.kind for each in model.parameters_found()}
    assert kinds["decoder.final_norm.weight"] is UnitKind.FINAL_NORM


def test_model_with_several_stacks_of_layers_is_refused() -> None:
    model = Model()
    model.vision_model = torch.nn.Module()
    model.vision_model.decoder = torch.nn.Module()
    layer: Any = torch.nn.Module()
    layer.layer_number, layer.mlp = 1, torch.nn.Module()
    layer.mlp.router = torch.nn.Linear(8, 2, bias=False)
    model.vision_model.decoder.layers = torch.nn.ModuleList([layer])
    with pytest.raises(
        ConfigError,
        match=r"two parameters would be called decoder\.layers\.0\.mlp\.router\.weight .* several stacks",
    ):
        model.parameters_found()


def test_layer_without_a_number_is_refused() -> None:
    model = Model()
    del model.layer[0].layer_number
    with pytest.raises(ConfigError, match=r"decoder\.layers\.0 is a layer without a layer_number"):
        model.parameters_found()
