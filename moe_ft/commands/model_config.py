"""A decoder with experts as flags of Megatron, from the fields of any config.json of Hugging Face.

`plan` needs sizes, not weights: it reads what the converters refuse too, such as quantized models. Where
Megatron has no flags for the layers of a model, or builds them with Transformer Engine alone, a stand-in with
as many parameters is planned: attention with query groups of the mean size of a layer, and experts of the
same size. Notes say so, and what is left out.

Fields have many names. Every value is checked before anything is computed with it: it decides how much work
there is. Norms are not counted in the weights of attention.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ft.errors import ConfigError

_MOST_SIZE = 1 << 24  # of a dimension, of a vocabulary too
_MOST_HEADS = 1 << 16  # and of what one of them has
_MOST_ITEMS = 10_000  # of a list, which has one for each layer
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
_OUTSIDE = ("quantization_config", "tie_word_embeddings")  # of the text model too
# Ends of names of sizes and of kinds of layers, and those among them that no parameter depends on.
_SIZES = (
    "_size",
    "_dim",
    "_rank",
    "_heads",
    "_experts",
    "_layers",
    "_groups",
    "_mult",
    "_input",
    "_modules",
)
_KINDS = ("_period", "_offset", "_interval", "_frequency", "_pattern", "_types", "_list")
_NO_PARAMETERS = {
    *("chunk_size", "max_window_layers", "sliding_window_size", "attention_chunk_size", "ep_size"),
    *("chunk_size_feed_forward", "qk_head_dim", "rotary_dim", "vocab_size_per_layer_input"),
    *("num_hash_layers", "attn_res_block_size", "qk_rope_head_dim", "full_attention_interval"),
    *("index_skip_topk_offset", "mtp_hybrid_override_pattern"),
}


class Fields:
    """The fields of a decoder, those of a text model inside others, and which of them were asked for.

    Attributes:
        path: of the file, for messages.
    """

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path = path
        self._asked = set(_OUTSIDE)
        self._towers = set[str]()
        while name := next((each for each in _TEXT if isinstance(values.get(each), dict)), None):
            outside = {key: values[key] for key in _OUTSIDE if key in values}
            self._towers |= {key for key, value in values.items() if value} - {name, *_OUTSIDE}
            values = outside | values[name]
            self._towers -= {*values}
        self._values = values

    def get(self, *names: str) -> Any:
        """Return the first value that is there and not null; None without."""
        self._asked.update(names)
        found = (self._values.get(name) for name in names)
        return next((value for value in found if value is not None), None)

    def whole(
        self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST_SIZE
    ) -> int:
        """Return a whole number; raises ConfigError if there is none, nor a default, or it cannot be."""
        value = self.get(*names)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one for each layer
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(
                f"--model={self.path} has no {' or '.join(names)}, which sizes of the model follow from. "
                "Add it as the model has it."
            )
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(names, f"must be a whole number from {least} to {most}")
        return value

    def number(self, *names: str) -> float | None:
        """Return a number above 0, None without; raises ConfigError for anything else."""
        value: float | None = self.get(*names)
        if value is None or (type(value) in (int, float) and 0 < value < 1e15):
            return value
        raise self.refusal(names, "must be a number above 0")

    def items(self, *names: str) -> Sequence[Any]:
        """Return words or numbers, or a text; empty without. Raises ConfigError for another value."""
        value = self.get(*names) or ()
        is_list = isinstance(value, list | str | tuple) and len(value) <= _MOST_ITEMS
        if is_list and all(isinstance(each, str | int) for each in value):
            return value
        raise self.refusal(names, f"must be a list of at most {_MOST_ITEMS} words or whole numbers")

    def inner(self, name: str) -> "Fields":
        """Return the fields of an object, none without; raises ConfigError for another value."""
        if isinstance(value := self.get(name) or {}, dict):
            return Fields(f"{self.path} ({name})", value)
        raise self.refusal((name,), "must be an object")

    def refusal(self, names: Sequence[str], rule: str) -> ConfigError:
        """Return the error on a value that cannot be."""
        name = next(each for each in names if self._values.get(each) is not None)
        return ConfigError(
            f"--model={self.path} has {name}={self._values[name]!r:.100}, and it {rule}. Compare it with "
            "the published file."
        )

    @property
    def towers(self) -> list[str]:
        """Names of other parts of the model, such as a vision tower, and of parts that nobody asked for."""
        own = {key for key, value in self._values.items() if isinstance(value, dict) and value}
        found = self._towers | (own - self._asked)
        return sorted(each for each in found if each.endswith("_config"))

    @property
    def unused(self) -> list[str]:
        """Names of sizes and kinds of layers that nobody asked for."""
        return sorted(
            key
            for key, value in self._values.items()
            if key not in self._asked | _NO_PARAMETERS and value
            if key.endswith(_KINDS) or (key.endswith(_SIZES) and value is not True and value != 1)
        )


def heads(fields: Fields, prefix: str = "") -> tuple[int, int, int, int]:
    """Return the query heads, key heads, and the numbers of a head of keys and of one of values.

    Args:
        prefix: of fields of some layers, such as `swa_`; what they lack is as in the others.
    """
    of_queries = (f"{prefix}num_attention_heads", "num_attention_heads", "n_heads")
    queries = fields.whole(*of_queries, most=_MOST_HEADS)
    of_keys = (
        f"{prefix}num_key_value_heads",
        f"num_{prefix}key_value_heads",
        "num_key_value_heads",
    )
    groups = fields.whole(*of_keys, default=queries)
    if queries % groups:
        raise fields.refusal(of_keys, f"must divide the {queries} attention heads")
    usual = max(1, fields.whole("hidden_size") // queries)
    of_head = (f"{prefix}head_dim", "head_dim", "attention_head_dim")
    dim = fields.whole(*of_head, default=usual, most=_MOST_HEADS)
    of_values = (f"{prefix}v_head_dim", "v_head_dim")
    return queries, groups, dim, fields.whole(*of_values, default=dim, most=_MOST_HEADS)


def has_output_gate(fields: Fields) -> bool:
    """Return whether full attention has a gate: Qwen3-Next's has, beside its linear attention."""
    given = fields.get("attn_output_gate", "attention_output_gate", "mla_use_output_gate")
    return fields.get("linear_num_value_heads") is not None if given is None else bool(given)


def attention(fields: Fields, prefix: str = "") -> int:
    """Return the weights of attention: multi-latent (arXiv 2405.04434), else with query groups."""
    size, (queries, groups, dim, value_dim) = fields.whole("hidden_size"), heads(fields, prefix)
    gate = size * queries * value_dim if has_output_gate(fields) else 0
    if fields.get("kv_lora_rank") is None:
        shares = prefix == "global_" and fields.get("attention_k_eq_v")  # as in Gemma 4
        keys = groups * (dim if shares else dim + value_dim)
        return size * (queries * (dim + value_dim) + keys) + gate
    q_rank, rank, nope, rope, value_dim = latent_sizes(fields)
    width = queries * (nope + rope)
    down_and_up = q_rank * (size + width) if q_rank else size * width
    keys = size * (rank + rope) + rank * queries * (nope + value_dim)
    return down_and_up + keys + queries * value_dim * size + gate


def latent_sizes(fields: Fields) -> tuple[int, int, int, int, int]:
    """Return the ranks of queries (0 for none) and of keys, and the three sizes of a head."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, nope, rope, value_dim = (fields.whole(name, most=_MOST_HEADS) for name in names)
    return fields.whole("q_lora_rank", default=0), rank, nope, rope, value_dim


def compressed_attention(fields: Fields, ratio: str) -> int:
    """Return the weights of DeepSeek-V4's attention: one head of keys, and outputs of a low rank in groups.

    Args:
        ratio: of the layer: its compressor makes one key of so many; after 4, an indexer chooses among them.
    """
    size, (queries, _, dim, _) = fields.whole("hidden_size"), heads(fields)
    rank, out_rank = fields.whole("q_lora_rank"), fields.whole("o_lora_rank")
    weights = rank * (size + queries * dim) + size * dim
    weights += out_rank * (queries * dim + fields.whole("o_groups") * size)
    if ratio == "4":  # its compressors overlap, that of the indexer too
        weights += indexer(fields) + 3 * size * fields.whole("index_head_dim") + 2 * size * dim
    return weights + (2 * size * dim if ratio != "0" else 0)


def indexer(fields: Fields) -> int:
    """Return the weights of an indexer of sparse attention (DeepSeek-V3.2); 0 without."""
    if fields.get("index_n_heads") is None:
        return 0
    num_heads, dim = fields.whole("index_n_heads"), fields.whole("index_head_dim")
    queries = fields.whole("q_lora_rank") * num_heads * dim
    return queries + fields.whole("hidden_size") * (dim + num_heads)


def linear_attention(fields: Fields) -> int:
    """Return the weights of Kimi's linear attention (arXiv 2510.26692), else of a gated delta net's."""
    size, kimi = fields.whole("hidden_size"), fields.inner("linear_attn_config")
    if kimi.get("num_heads") is not None:
        num_heads, dim = kimi.whole("num_heads"), kimi.whole("head_dim")
        low_rank = dim * (size + num_heads * dim)
        gate = size * num_heads * dim if kimi.get("use_full_rank_gate") else low_rank
        convolution = 3 * kimi.whole("short_conv_kernel_size", default=4)
        return num_heads * (dim * (4 * size + convolution) + size) + low_rank + gate
    keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
    num_values = fields.whole("linear_num_value_heads")
    values = num_values * fields.whole("linear_value_head_dim")
    convolution = fields.whole("linear_conv_kernel_dim") * (2 * keys + values)
    return size * (2 * keys + 3 * values + 2 * num_values) + convolution


def state_space(fields: Fields) -> int:
    """Return the weights of a layer of Mamba-2 (arXiv 2405.21060)."""
    num_heads = fields.whole("mamba_num_heads", "mamba_n_heads")
    width = num_heads * fields.whole("mamba_head_dim", "mamba_d_head")
    states = fields.whole("ssm_state_size", "mamba_d_state")
    states *= 2 * fields.whole("n_groups", "mamba_n_groups")
    convolution = fields.whole("conv_kernel", "mamba_d_conv", default=4) * (width + states)
    return fields.whole("hidden_size") * (3 * width + states + num_heads) + convolution


_MOST_PARAMETERS = 1e15
_MOST_EXPERTS = 1_000_000  # of all layers: each is built
_LAYERS, _BLOCKS = "num_hidden_layers", ("layers_block_type", "hybrid_override_pattern")
_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
# The names that a value has in different families.
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k", "num_selected_experts"),
)
_EXPERT_SIZE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_DENSE_SIZE = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
_LATENT_SIZE = ("moe_latent_size", "routed_expert_hidden_size")
_GATED_SIZE = "shared_expert_intermediate_size"
_SHARED_SIZE = (
    *(_GATED_SIZE, "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "share_expert_dim"),
)
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_STEP = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation")
# Families that have what their files do not say: norms of heads, biases of queries, of all linear layers, and
# an expert that all tokens pass.
_HAS_NORMS, _HAS_BIAS, _HAS_BIASES = ("qwen3", "gemma4"), ("qwen2_moe",), ("gpt_oss",)
_HAS_SHARED = ("llama4",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlags:
    """A model as a command line of Megatron.

    Attributes:
        flags: of the model, its training and its layout.
        nodes: of 8 GPUs, of this layout; None where it has none.
        parameters, active: as published, or counted from a config.json; None if nobody says. Without layers
            for further tokens (MTP).
        notes: on what the flags leave out or approximate.
    """

    flags: tuple[str, ...]
    source: str
    nodes: int | None = None
    parameters: float | None = None
    active: float | None = None
    notes: tuple[str, ...] = ()


def model_of(path: str, config: dict[str, Any]) -> ModelFlags:
    """Return the model that a config.json describes, with the flags of the model alone.

    Args:
        path: of the file, for messages.
        config: its content.

    Raises:
        ConfigError: if it is no decoder with experts, or a value is missing or cannot be.
    """
    found = _Description(path, Fields(path, config))
    words: list[str] = []
    for flag, value in found.settings().items():
        if value not in (None, False):
            words += [flag] if value is True else [flag, f"{value}"]
    return ModelFlags(
        flags=tuple(words),
        source=path,
        parameters=found.parameters,
        active=found.active,
        notes=tuple(found.notes()),
    )


class _Description:
    """The sizes of a model, and what each of its layers has."""

    def __init__(self, path: str, fields: Fields) -> None:
        self._fields = fields
        self._type = str(fields.get("model_type"))
        if fields.get(*_EXPERTS) is None:
            raise ConfigError(
                f"--model={path} has none of {', '.join(_EXPERTS)} (model_type={self._type:.40}): it is no "
                "decoder with experts, or counts them otherwise. Name another, or give Megatron's flags "
                "after the --."
            )
        self._num_experts = fields.whole(*_EXPERTS, most=100_000)
        self._top_k = fields.whole(*_TOP_K, most=self._num_experts)
        self._size = fields.whole("hidden_size")
        self._vocabulary = fields.whole("vocab_size")
        self._is_tied = fields.get("tie_word_embeddings") is True
        self._mixers, self._has_experts = self._layers()
        self._num_layers = len(self._has_experts)
        self._num_moe = sum(self._has_experts)
        self._is_gated = fields.get(*_ACTIVATION) != "relu2"
        self._expert_size = fields.whole(*_EXPERT_SIZE)
        self._dense_size = fields.whole(*_DENSE_SIZE, default=self._expert_size)
        self._latent = fields.whole(*_LATENT_SIZE, default=self._size)
        self._shared_size = self._shared()
        self._is_latent = fields.get("kv_lora_rank") is not None
        of_kind = {kind: self._mixer(kind) for kind in dict.fromkeys(self._mixers)}
        latents = 2 * self._size * self._latent if self._latent != self._size else 0
        # All but experts and MLPs, and what is left out.
        self._others = sum(of_kind[each] for each in self._mixers) + self._num_moe * latents
        self._period = fields.whole("index_topk_freq", default=1)
        self._offset = fields.whole("index_skip_topk_offset", default=2, least=0)
        self._indexers = self._num_indexers() * indexer(fields)
        of_one = attention(fields)
        self._is_exact = (
            {*of_kind.values()} == {of_one}
            and self._others == of_one * self._num_layers
            and not has_output_gate(fields)
            and (self._is_latent or len({*heads(fields)[2:]}) == 1)
        )
        self.parameters, self.active = self._count()
        num_experts = self._num_moe * self._num_experts
        if not 0 < num_experts <= _MOST_EXPERTS or self.parameters > _MOST_PARAMETERS:
            raise ConfigError(
                f"--model={path} describes {num_experts:.3g} experts and {self.parameters:.3g} parameters, "
                f"which must be from 1 to {_MOST_EXPERTS} and at most {_MOST_PARAMETERS:g}: a plan lists "
                "each expert. Compare it with the published file."
            )

    def _count(self) -> tuple[int, int]:
        """Return the parameters of the model, and of them those that a token passes through."""
        matrices = 3 if self._is_gated else 2
        expert, mlp = (matrices * size for size in (self._latent, self._size))
        of_layer = self._num_experts * self._size + mlp * self._shared_size
        dense = (self._num_layers - self._num_moe) * mlp * self._dense_size
        outside = (1 if self._is_tied else 2) * self._vocabulary + 2 * self._num_layers + 1
        every = (
            outside * self._size + self._others + self._indexers + self._num_moe * of_layer + dense
        )
        of_all = self._num_moe * expert * self._expert_size
        return every + of_all * self._num_experts, every + of_all * self._top_k

    def _layers(self) -> tuple[list[str], list[bool]]:
        """Return what mixes the tokens in each layer, and which layers of MLPs have experts."""
        fields = self._fields
        blocks = [_LETTERS.get(each, f"{each}") for each in fields.items(*_BLOCKS)]
        if {"moe", "mlp"} & {*blocks}:  # each block is a layer, and MLPs are blocks
            num_layers, lengths = fields.whole(_LAYERS, default=len(blocks)), {len(blocks)}
            mixers = [each for each in blocks if each not in ("moe", "mlp")]
            has_experts = [each == "moe" for each in blocks if each in ("moe", "mlp")]
        else:
            num_layers = fields.whole(_LAYERS, most=10_000)
            mixers, has_experts = blocks or self._kinds(num_layers), self._moe_layers(num_layers)
            lengths = {len(mixers), len(has_experts)}
        if lengths != {num_layers}:
            raise fields.refusal(
                (_LAYERS,), f"must be the length of each list of layers: {lengths}"
            )
        return mixers, has_experts

    def _kinds(self, num_layers: int) -> list[str]:
        """Return the kind of attention of each layer."""
        fields = self._fields
        if given := fields.items("layer_types"):
            return [f"{each}" for each in given]
        if is_sliding := fields.items("hybrid_layer_pattern"):
            return ["sliding" if each else "full" for each in is_sliding]
        if is_full := fields.items("attn_type_list"):
            return ["full" if each else "lightning" for each in is_full]
        if ratios := fields.items("compress_ratios"):  # those of further layers follow
            return [f"compressed {each}" for each in ratios[:num_layers]]
        linear = {*fields.inner("linear_attn_config").items("kda_layers")}
        step = fields.whole("full_attention_interval", default=1)
        numbers = range(1, num_layers + 1)
        return ["linear" if each in linear or each % step else "full" for each in numbers]

    def _moe_layers(self, num_layers: int) -> list[bool]:
        """Return which layers have experts."""
        fields = self._fields
        if kinds := fields.items("mlp_layer_types"):
            return [each == "sparse" for each in kinds]
        if isinstance(fields.get("moe_layer_freq"), list):
            return [bool(each) for each in fields.items("moe_layer_freq")]
        first, dense = fields.whole(*_FIRST, default=0, least=0), {*fields.items("mlp_only_layers")}
        every, step = fields.whole("moe_layer_freq", default=1), fields.whole(*_STEP, default=1)
        return [
            each >= first and each % every == 0 and (each + 1) % step == 0 and each not in dense
            for each in range(num_layers)
        ]

    def _shared(self) -> int:
        """Return the size of the MLP that every token passes through beside its experts; 0 without."""
        fields = self._fields
        if fields.get("enable_moe_block"):  # Gemma 4 keeps its dense MLP
            return self._dense_size
        default = int(self._type.startswith(_HAS_SHARED))
        number = fields.whole(*_NUM_SHARED, default=default, least=0)
        return fields.whole(*_SHARED_SIZE, default=number * self._expert_size, least=0)

    def _num_indexers(self) -> int:
        """Return the layers with an indexer of their own; those of compressed attention count with it."""
        if self._fields.get("compress_ratios") is not None:
            return 0
        if kinds := self._fields.items("indexer_types"):
            return kinds.count("full")
        after = (max(0, n - max(1, self._offset)) for n in range(1, self._num_layers + 1))
        return sum(each % self._period == 0 for each in after)

    def _mixer(self, kind: str) -> int:
        """Return the weights of what mixes the tokens in a layer."""
        if kind.startswith("compressed"):
            return compressed_attention(self._fields, kind.partition(" ")[2])
        if "linear" in kind:
            return linear_attention(self._fields)
        if "mamba" in kind:
            return state_space(self._fields)
        if "attention" not in kind and kind not in ("full", "sliding"):
            raise ConfigError(
                f"--model={self._fields.path} has layers of {kind!r:.40}, and plan knows attention, linear "
                "attention and mamba. Give the flags of a model of this size after the --."
            )
        return attention(self._fields, "swa_" if "sliding" in kind else "global_")

    def settings(self) -> dict[str, Any]:
        """Return the settings of Megatron; those that are None or False need no flag."""
        fields, layers = self._fields, [int(each) for each in self._has_experts]
        frequency = 1 if all(layers) else json.dumps(layers, separators=(",", ":"))
        base = fields.number("rope_theta") or fields.inner("rope_parameters").number("rope_theta")
        further = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        positions = ("max_position_embeddings", "model_max_length")
        return {
            "--num-layers": self._num_layers,
            "--hidden-size": self._size,
            "--ffn-hidden-size": self._dense_size,
            "--num-experts": self._num_experts,
            "--moe-ffn-hidden-size": max(1, round(self._expert_size * self._latent / self._size)),
            "--moe-layer-freq": frequency,
            "--moe-router-topk": self._top_k,
            "--moe-shared-expert-intermediate-size": self._shared_size or None,
            "--moe-shared-expert-gate": bool(self._shared_size and fields.get(_GATED_SIZE)),
            "--mtp-num-layers": fields.whole(*further, default=0, least=0, most=16) or None,
            "--padded-vocab-size": self._vocabulary,
            "--untie-embeddings-and-output-weights": not self._is_tied,
            "--max-position-embeddings": fields.whole(*positions, default=4096, most=1 << 40),
            "--position-embedding-type": "rope",
            "--rotary-base": int(base or 10_000),
            "--normalization": "RMSNorm",
            "--norm-epsilon": fields.number("rms_norm_eps", "layernorm_epsilon", "norm_eps"),
            "--disable-bias-linear": self._type not in _HAS_BIASES,
            "--swiglu" if self._is_gated else "--squared-relu": True,
            **(self._latent_attention() if self._is_latent and self._is_exact else self._grouped()),
            **self._router(),
        }

    def _grouped(self) -> dict[str, Any]:
        """Return the settings of attention with query groups, which may stand for another."""
        fields, (queries, groups, dim, _) = self._fields, heads(self._fields)
        if not self._is_exact:
            weights = 2 * self._size * (queries + groups)
            # An even number, for rotary embeddings.
            dim = 2 * max(1, round(self._others / self._num_layers / weights / 2))
        norms = fields.get("use_qk_norm")
        norms = self._type.startswith(_HAS_NORMS) if norms is None else bool(norms)
        bias = False if self._type in _HAS_BIASES else fields.get("qkv_bias", "attention_bias")
        return {
            "--num-attention-heads": queries,
            "--kv-channels": dim,
            "--group-query-attention": True,
            "--num-query-groups": groups,
            "--qk-layernorm": norms,
            "--add-qkv-bias": self._type in _HAS_BIAS if bias is None else bool(bias),
        }

    def _latent_attention(self) -> dict[str, Any]:
        q_rank, rank, nope, rope, value_dim = latent_sizes(self._fields)
        scaling = self._fields.inner("rope_scaling")
        is_yarn = "yarn" in (scaling.get("rope_type"), scaling.get("type"))
        return {
            "--multi-latent-attention": True,
            "--num-attention-heads": heads(self._fields)[0],
            "--qk-layernorm": True,
            "--q-lora-rank": q_rank or None,
            "--kv-lora-rank": rank,
            "--qk-head-dim": nope,
            "--qk-pos-emb-head-dim": rope,
            "--v-head-dim": value_dim,
            "--rope-type": "yarn" if is_yarn else "rope",
            "--rotary-scaling-factor": scaling.number("factor") if is_yarn else None,
            "--mscale": scaling.number("mscale") if is_yarn else None,
            "--mscale-all-dim": scaling.number("mscale_all_dim") if is_yarn else None,
            **(self._sparse() if self._indexers else {}),
        }

    def _sparse(self) -> dict[str, Any]:
        fields = self._fields
        return {
            "--experimental-attention-variant": "dsa",
            "--dsa-indexer-n-heads": fields.whole("index_n_heads"),
            "--dsa-indexer-head-dim": fields.whole("index_head_dim"),
            "--dsa-indexer-topk": fields.whole("index_topk", default=2048),
            "--dsa-indexer-topk-freq": self._period,
            "--dsa-indexer-skip-topk-offset": self._offset if self._period > 1 else None,
        }

    def _router(self) -> dict[str, Any]:
        fields = self._fields
        is_corrected = fields.get("topk_method") == "noaux_tc"  # by biases, as in DeepSeek-V3
        function = fields.get("scoring_func", "moe_router_activation_func")
        function = "sigmoid" if function is None and is_corrected else function
        is_known = function in ("sigmoid", "sqrtsoftplus")
        has_bias = is_corrected or fields.get("use_routing_bias", "use_moe_router_bias")
        groups = fields.whole("n_group", "num_expert_group", default=1, least=0)
        chosen = fields.whole("topk_group", default=1, least=0)
        has_groups = 0 < chosen < groups and self._num_experts % groups == 0
        is_before = self._top_k == 1 or fields.get("norm_topk_prob") is False
        factor = fields.number("routed_scaling_factor", "moe_router_scaling_factor")
        return {
            "--moe-router-score-function": function if is_known else None,
            "--moe-router-pre-softmax": is_before and not is_known,
            "--moe-router-enable-expert-bias": bool(is_known and has_bias),
            "--moe-router-num-groups": groups if has_groups else None,
            "--moe-router-group-topk": chosen if has_groups else None,
            "--moe-router-topk-scaling-factor": factor,
        }

    def notes(self) -> list[str]:
        """Return what the settings leave out or approximate; called after them: they ask for fields."""
        fields, kinds = self._fields, Counter(self._mixers)
        found = [
            f"{fields.path}: {self.parameters / 1e9:,.2f} billion parameters, {self.active / 1e9:,.2f} of "
            "them active, without layers for further tokens (MTP)"
        ]
        if not self._is_exact:
            number = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
            found.append(f"stand-in: attention of the mean size of its layers ({number})")
        if self._latent != self._size:
            found.append(
                f"stand-in: experts of as many parameters as those in its latent space of {self._latent}, "
                "whose projections are counted with attention"
            )
        if self._indexers and not (self._is_latent and self._is_exact):
            found.append(f"left out: indexers of attention, {self._indexers / 1e9:,.2f} billion")
        if isinstance(method := fields.get("quantization_config"), dict):
            name = f"{method.get('quant_method')}"[:40]
            found.append(
                f"its weights are quantized ({name}): planned in the precision of training"
            )
        found += [f"left out: {name}" for name in fields.towers]
        if unused := fields.unused:
            found.append(f"not counted, as plan does not know them: {', '.join(unused)}")
        other = ["sliding windows"] * any("sliding" in each for each in kinds)
        activation = fields.get(*_ACTIVATION)
        other += [f"{activation!s:.40}"] * (self._is_gated and activation not in (None, "silu"))
        if not (self._is_latent and self._is_exact):
            names = ("rope_scaling", "partial_rotary_factor", "rotary_dim")
            other += [name for name in names if fields.get(name) not in (None, 1)]
        if other:
            found.append(f"not in the flags, as no size depends on them: {', '.join(other)}")
        return found
