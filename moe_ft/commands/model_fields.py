"""Fields of somebody else's config.json, by their many names, and the weights of attention in a layer.

Every value is checked before anything is computed with it: it decides how much work there is. Norms are not
counted. model_config.py makes flags of Megatron from both.
"""

from collections.abc import Mapping, Sequence
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
