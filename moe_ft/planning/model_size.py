"""Parameters of a GPT with experts, unit by unit, and the bytes that a checkpoint has for each.

Computed from hyper-parameters, for planning before there is a model. The parameters of a real model are
found by state/parameters.py. The share of them that a rank saves is ownership.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ft.units import UnitId, UnitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Sizes of multi-latent attention (DeepSeek-V2), whose keys and values come from a short vector.

    Megatron's local implementation is counted. Transformer Engine has one norm of the hidden size more where
    queries are not compressed and have a norm.

    Attributes:
        query_rank: length of the vector that queries come from; 0: they come from the hidden state.
        key_value_rank: length of the vector that keys and values come from.
        head_width: of a query's and a key's part without positions.
        position_width: of the part with positions, which all heads share for keys.
        value_width: of a head's values.
    """

    query_rank: int
    key_value_rank: int
    head_width: int
    position_width: int
    value_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Hyper-parameters of a GPT with experts. Sizes that are 0 follow from the others, as in Megatron.

    Attributes:
        num_layers: transformer layers.
        hidden_size: width.
        num_experts: of each MoE layer, over all ranks.
        moe_layers: layers that have experts instead of a dense FFN, ascending, from 0.
        ffn_hidden_size: inner width of a dense FFN; 0: 4 x hidden_size.
        moe_ffn_hidden_size: inner width of an expert; 0: ffn_hidden_size.
        shared_expert_hidden_size: inner width of the experts of an MoE layer that see every token; 0:
            there are none.
        num_attention_heads: needed only with one of the next two.
        kv_channels: width of a head; 0: hidden_size / num_attention_heads.
        num_query_groups: heads that keys and values have; 0: as many as queries.
        vocab_size: as padded.
        num_positions: learned position embeddings; 0: none.
        has_output_layer: of its own, that is, not tied to the word embeddings.
        is_gated: whether FFNs have a gate (SwiGLU), that is, twice the width on their way in.
        has_bias: whether linear layers have biases.
        has_qkv_bias: queries, keys and values also have biases where other linear layers have none.
        has_norm_bias: LayerNorm has a bias, RMSNorm has none.
        has_qk_norm: norms of queries and keys.
        has_router_bias: routers have biases, as Megatron's have where linear layers have them.
        has_shared_expert_gate: a gate of the experts that see every token.
        latent_attention: None for attention whose queries, keys and values are projections of their own.
        num_mtp_layers: layers after the last, of its kind, that predict further tokens.
    """

    num_layers: int
    hidden_size: int
    num_experts: int
    moe_layers: tuple[int, ...]
    ffn_hidden_size: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_hidden_size: int = 0
    num_attention_heads: int = 1
    kv_channels: int = 0
    num_query_groups: int = 0
    vocab_size: int = 50257
    num_positions: int = 2048
    has_output_layer: bool = False
    is_gated: bool = False
    has_bias: bool = True
    has_qkv_bias: bool = False
    has_norm_bias: bool = True
    has_qk_norm: bool = False
    has_router_bias: bool = False
    has_shared_expert_gate: bool = False
    latent_attention: LatentAttention | None = None
    num_mtp_layers: int = 0

    @property
    def has_mtp_experts(self) -> bool:
        """True if layers that predict further tokens have experts, as the last layer then has."""
        return self.num_mtp_layers > 0 and self.num_layers - 1 in self.moe_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, those that predict further tokens included."""
        return len(self.moe_layers) + self.has_mtp_experts * self.num_mtp_layers

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden_size * (1 + self.has_norm_bias)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention without its norm."""
        if self.latent_attention is not None:
            return self._latent_parameters(self.latent_attention)
        kv_channels = self.kv_channels or self.hidden_size // self.num_attention_heads
        query = self.num_attention_heads * kv_channels
        key_value = 2 * (self.num_query_groups or self.num_attention_heads) * kv_channels
        biases = (self.has_bias or self.has_qkv_bias) * (query + key_value)
        biases += self.has_bias * self.hidden_size
        norms = self.has_qk_norm * 2 * kv_channels * (1 + self.has_norm_bias)
        return self.hidden_size * (2 * query + key_value) + biases + norms

    def _latent_parameters(self, latent: LatentAttention) -> int:
        heads, hidden = self.num_attention_heads, self.hidden_size
        norm = self.has_qk_norm * (1 + self.has_norm_bias)
        query = heads * (latent.head_width + latent.position_width)
        queries = hidden * query
        if rank := latent.query_rank:
            queries = hidden * rank + rank * norm + rank * query
        rank = latent.key_value_rank
        keys_values = hidden * (rank + latent.position_width) + rank * norm
        keys_values += rank * heads * (latent.head_width + latent.value_width)
        output = heads * latent.value_width * hidden + self.has_bias * hidden
        return queries + keys_values + output

    @property
    def mtp_projection_parameters(self) -> int:
        """Parameters that a layer has only because it predicts further tokens: a projection, three norms."""
        return 2 * self.hidden_size * self.hidden_size + 3 * self.norm_parameters

    @property
    def dense_ffn_parameters(self) -> int:
        """Parameters of the FFN of a layer without experts, without its norm."""
        return self._ffn_parameters(self.ffn_hidden_size or 4 * self.hidden_size)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        return sum(self.expert_tensors)

    @property
    def expert_tensors(self) -> tuple[int, ...]:
        """Elements of one expert's parameters, in the order of the model."""
        return self._ffn_tensors(
            self.moe_ffn_hidden_size or self.ffn_hidden_size or 4 * self.hidden_size
        )

    @property
    def shared_expert_parameters(self) -> int:
        """Parameters of one MoE layer's experts that see every token, and of their gate."""
        width = self.shared_expert_hidden_size
        gate = self.has_shared_expert_gate * self.hidden_size
        return self._ffn_parameters(width) + gate if width else 0

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router."""
        return (self.hidden_size + self.has_router_bias) * self.num_experts

    @property
    def num_expert_parameters(self) -> int:
        """P_e: parameters of all experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_parameters

    @property
    def num_non_expert_parameters(self) -> int:
        """P_ne: all other parameters."""
        units = unit_parameters(self).items()
        return sum(count for unit, count in units if unit.kind is not UnitKind.EXPERT)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return self.num_non_expert_parameters + self.num_expert_parameters

    def _ffn_parameters(self, width: int) -> int:
        return sum(self._ffn_tensors(width))

    def _ffn_tensors(self, width: int) -> tuple[int, ...]:
        inward, hidden = width * (1 + self.is_gated), self.hidden_size
        if not self.has_bias:
            return (hidden * inward, hidden * width)
        return (hidden * inward, inward, hidden * width, hidden)


def unit_parameters(shape: ModelShape) -> dict[UnitId, int]:
    """Return the parameters of every unit of a model."""
    hidden, norm = shape.hidden_size, shape.norm_parameters
    tables = (shape.vocab_size + shape.num_positions) * hidden
    units = {UnitId(kind=UnitKind.EMBEDDING): tables}
    for layer in range(shape.num_layers):
        units |= _layer_units(shape, "layer", layer, has_experts=layer in shape.moe_layers)
    units[UnitId(kind=UnitKind.FINAL_NORM)] = norm
    for layer in range(shape.num_mtp_layers):
        further = _layer_units(shape, "mtp", layer, has_experts=shape.has_mtp_experts)
        further[UnitId(kind=UnitKind.NON_EXPERT, block="mtp", layer=layer)] += (
            shape.mtp_projection_parameters
        )
        units |= further
    if shape.has_output_layer:
        units[UnitId(kind=UnitKind.OUTPUT)] = shape.vocab_size * hidden
    return units


def _layer_units(
    shape: ModelShape, block: str, layer: int, *, has_experts: bool
) -> dict[UnitId, int]:
    """Return the parameters of the units of one layer."""
    ffn = shape.shared_expert_parameters if has_experts else shape.dense_ffn_parameters
    non_expert = UnitId(kind=UnitKind.NON_EXPERT, block=block, layer=layer)
    units = {non_expert: shape.attention_parameters + ffn + 2 * shape.norm_parameters}
    if has_experts:
        units[UnitId(kind=UnitKind.ROUTER, block=block, layer=layer)] = shape.router_parameters
        for expert in range(shape.num_experts):
            unit = UnitId(kind=UnitKind.EXPERT, block=block, layer=layer, expert=expert)
            units[unit] = shape.expert_parameters
    return units


def stage_units(
    shape: ModelShape, num_stages: int, layers: Sequence[Sequence[int]] | None = None
) -> list[dict[UnitId, int]]:
    """Return ``[stage]`` the parameters of its units, in the order of the model.

    Tied word embeddings are on the first stage and again on the last. Layers that predict further tokens are
    on the last stage, and so is a copy of the embeddings for them.

    Args:
        layers: ``[stage]`` its layers; None divides them equally.
    """
    layers_each = shape.num_layers // num_stages
    stage_of = {layer: layer // layers_each for layer in range(shape.num_layers) if layers is None}
    for number, own in enumerate(layers or ()):
        stage_of |= dict.fromkeys(own, number)
    stages: list[dict[UnitId, int]] = [{} for _ in range(num_stages)]
    units = unit_parameters(shape)
    embedding = UnitId(kind=UnitKind.EMBEDDING)
    if num_stages > 1:
        units.setdefault(UnitId(kind=UnitKind.OUTPUT), shape.vocab_size * shape.hidden_size)
        if shape.num_mtp_layers:
            stages[-1][embedding] = units[embedding]
    for unit, count in units.items():
        is_first = unit == embedding
        in_decoder = unit.block == "layer" and unit.layer >= 0
        stages[stage_of[unit.layer] if in_decoder else 0 if is_first else -1][unit] = count
    return stages


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteModel:
    """Bytes per parameter that a checkpoint holds, by class, and which classes leave experts out.

    The default is MoC-System's equation 6: experts that are not selected are left out altogether. Its
    measurements (Fig. 10a, Table 3) follow only if the master weights of all experts are saved. Snapshots of
    training hold masters instead of the weights of the forward pass, so 12 bytes instead of 14.

    Attributes:
        weights: of the weights that the forward pass uses.
        master: of the optimizer's own weights.
        moments: of its first and second moments.
        master_always_full: whether experts that are not selected save their master weights too.
    """

    weights: int = 2
    master: int = 4
    moments: int = 8
    master_always_full: bool = False

    @property
    def optimizer(self) -> int:
        """B_o: bytes of the optimizer's state for a parameter."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        """Bytes of everything for a parameter."""
        return self.weights + self.optimizer

    @property
    def optimizer_by_rule(self) -> tuple[int, int]:
        """Bytes of the optimizer's state that (only selected, all) experts save."""
        always = self.master * self.master_always_full
        return self.optimizer - always, always
