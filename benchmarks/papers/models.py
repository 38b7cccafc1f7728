"""Models of the papers, the parts of a model that MoC-System divides, and the bytes that it counts for each.

Sizes follow from the shape alone. plan builds the models that are trained: megatron/fault_tolerance/program.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.errors import PlanError
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Hyper-parameters of a GPT with experts, as GPT-3 has them: tied embeddings, plain FFNs.

    Attributes:
        num_experts: of each MoE layer, over all ranks.
        moe_layers: layers that have experts instead of a dense FFN, ascending, from 0.
        ffn_hidden_size: inner width of FFNs and experts; 0: 4 x hidden_size.
        has_bias: whether linear layers and norms have biases.
    """

    num_layers: int
    hidden_size: int
    num_experts: int
    moe_layers: tuple[int, ...]
    ffn_hidden_size: int = 0
    vocab_size: int = 50257
    num_positions: int = 2048
    has_bias: bool = True

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return len(self.moe_layers)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden_size * (1 + self.has_bias)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention without its norm."""
        return 4 * self.hidden_size * (self.hidden_size + self.has_bias)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer, or of a dense FFN without its norm."""
        width = self.ffn_hidden_size or 4 * self.hidden_size
        return 2 * self.hidden_size * width + self.has_bias * (width + self.hidden_size)

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router."""
        return self.hidden_size * self.num_experts

    @property
    def num_expert_parameters(self) -> int:
        """P_e: parameters of all experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_parameters

    @property
    def num_non_expert_parameters(self) -> int:
        """P_ne: all other parameters."""
        return sum(non_expert_modules(self).values())

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return self.num_non_expert_parameters + self.num_expert_parameters


class Sharding(StrEnum):
    """Division of replicated state among the ranks that hold it."""

    NONE = "none"  # rank 0 all non-experts, the first expert-parallel group all experts
    EQUAL = "equal"  # experts and non-experts in equal parts
    ADAPTIVE = "adaptive"  # experts in equal parts; non-experts where there are fewer experts


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
        else:
            modules[f"layer {layer} ffn"] = shape.expert_parameters + norm
    modules["final norm"] = norm
    return {name: count for name, count in modules.items() if count}


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        # MoC-System, Table 1; vocabulary and positions of GPT-3 like models in Megatron-DeepSpeed.
        "gpt-125m-8e": ModelShape(
            num_layers=12,
            hidden_size=768,
            num_experts=8,
            moe_layers=evenly_spaced_layers(12, 6),
        ),
        "gpt-350m-16e": ModelShape(
            num_layers=24,
            hidden_size=1024,
            num_experts=16,
            moe_layers=evenly_spaced_layers(24, 12),
        ),
    }
)


def planned_preset(shape: ModelShape, *flags: str, dp: int, ep: int) -> PlannedJob:
    """Return the job that trains a model of the papers, as plan builds it.

    Args:
        flags: further ones, of Megatron and of moe_ft.
    """
    layers = ",".join(str(int(layer in shape.moe_layers)) for layer in range(shape.num_layers))
    experts = ("--num-experts", f"{shape.num_experts}", "--moe-layer-freq", f"[{layers}]")
    words = [
        *("--num-layers", f"{shape.num_layers}", "--hidden-size", f"{shape.hidden_size}"),
        *("--num-attention-heads", f"{shape.hidden_size // 64}", "--bf16"),
        *("--padded-vocab-size", f"{shape.vocab_size}"),
        *("--max-position-embeddings", f"{shape.num_positions}"),
        *(experts if shape.moe_layers else ()),
        *("--expert-model-parallel-size", f"{ep}", *flags),
    ]
    job, _ = plan_job(read_command(words), MeasuredTimes(), world_size=dp, ranks_per_node=dp)
    return job
