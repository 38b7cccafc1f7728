"""Models of the papers, and the parts of a model that MoC-System divides."""

from collections.abc import Mapping
from types import MappingProxyType

from moe_ft.errors import PlanError
from moe_ft.planning.model_size import ModelShape


def evenly_spaced_layers(num_layers: int, num_moe_layers: int) -> tuple[int, ...]:
    """Return the layers that have experts; half of them are every second one, from layer 1.

    Raises:
        PlanError: if there are more MoE layers than layers.
    """
    if not 0 <= num_moe_layers <= num_layers:
        raise PlanError(
            f"num_moe_layers={num_moe_layers} must be between 0 and {num_layers} layers"
        )
    return tuple((index + 1) * num_layers // num_moe_layers - 1 for index in range(num_moe_layers))


def non_expert_modules(shape: ModelShape) -> dict[str, int]:
    """Return the parameters of the modules that are not experts.

    These are the smallest parts that MoC-System's coarse sharding assigns (section 4.2): attention and
    FFN of each layer, each with its norm; tables, router and final norm by themselves.
    """
    norm = shape.norm_parameters
    modules = {
        "word embeddings": shape.vocab_size * shape.hidden_size,
        "position embeddings": shape.num_positions * shape.hidden_size,
    }
    for layer in range(shape.num_layers):
        is_moe = layer in shape.moe_layers
        modules[f"layer {layer} attention"] = shape.attention_parameters + norm
        if is_moe:
            modules[f"layer {layer} router"] = shape.router_parameters + norm
            modules[f"layer {layer} shared experts"] = shape.shared_expert_parameters
        else:
            modules[f"layer {layer} ffn"] = shape.dense_ffn_parameters + norm
    modules["final norm"] = norm
    modules["output"] = shape.has_output_layer * shape.vocab_size * shape.hidden_size
    return {name: count for name, count in modules.items() if count}


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        # MoC-System, Table 1; vocabulary and positions of GPT-3 like models in Megatron-DeepSpeed.
        "gpt-125m-8e": ModelShape(
            num_layers=12,
            hidden_size=768,
            num_attention_heads=12,
            num_experts=8,
            moe_layers=evenly_spaced_layers(12, 6),
        ),
        "gpt-350m-16e": ModelShape(
            num_layers=24,
            hidden_size=1024,
            num_attention_heads=16,
            num_experts=16,
            moe_layers=evenly_spaced_layers(24, 12),
        ),
    }
)
