"""Rules for the values of `config.json`, which hold for the keys that a family reads.

Types and sizes are checked before any of them decides how much work there is: no count is greater than the
number of tensors in the files, and no size greater than their longest dimension. Published files have keys of
other families too, whose values mean nothing, such as `shared_expert_intermediate_size` 0 in models of
qwen3_moe: what a family does not read is not checked. Values that Megatron cannot express are refused by the
families.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from types import MappingProxyType
from typing import Any, override

from moe_ft.convert.safetensors_set import StoredTensor
from moe_ft.errors import ConfigError

_MOST = 1 << 40
_MOST_COMPARED = 1 << 20  # of what lists are made, where no files limit it
COUNTED, LONGEST = "the number of tensors", "the longest dimension of the tensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRule:
    """The values that a key may have.

    Attributes:
        types: of the value.
        least: of a whole number; None for other values.
        limit: of the files, that a whole number may not exceed; None for none.
        is_optional: whether it may be null; a family knows what that means, or names the key that it lacks.
    """

    types: tuple[type, ...] = (int,)
    least: int | None = None
    limit: str | None = None
    is_optional: bool = False

    def broken_by(self, value: Any, limits: Mapping[str, int]) -> str:
        """Return what a value must be and is not; empty if it is.

        Args:
            limits: by `limit`; empty without files.
        """
        if value is None and self.is_optional:
            return ""
        if self.least is not None:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not self.least <= value <= _MOST:
                return f"a whole number from {self.least} to {_MOST}"
            most = limits.get(self.limit or "", _MOST)
            return "" if value <= most else f"at most {most}, {self.limit} in the files"
        types = (*self.types, type(None)) if self.is_optional else self.types
        is_other = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if not is_other and not (isinstance(value, float) and not isfinite(value)):
            return ""
        names = (each.__name__ for each in self.types)
        return f"a value of the type {' or '.join([*names, 'null'][: len(types)])}"


_COUNT = ValueRule(least=1, limit=COUNTED)
_SIZE = ValueRule(least=1, limit=LONGEST)
_NUMBER = ValueRule(types=(int, float))


def _optional(rule: ValueRule, **changes: Any) -> ValueRule:
    return replace(rule, is_optional=True, **changes)


# Of a family whose experts are stacked: they are no tensors of their own.
STACKED: Mapping[str, ValueRule] = MappingProxyType(
    dict.fromkeys(("num_local_experts", "num_experts"), _optional(_SIZE))
)
RULES: Mapping[str, ValueRule] = MappingProxyType(
    {
        **dict.fromkeys(("num_hidden_layers", "num_experts_per_tok"), _COUNT),
        **dict.fromkeys(("n_routed_experts", "decoder_sparse_step", "moe_layer_freq"), _COUNT),
        **dict.fromkeys(("num_local_experts", "num_experts"), _optional(_COUNT)),
        # 0 is none of them.
        "first_k_dense_replace": replace(_COUNT, least=0),
        **dict.fromkeys(
            ("num_nextn_predict_layers", "n_shared_experts"), _optional(_COUNT, least=0)
        ),
        **dict.fromkeys(("n_group", "topk_group"), _optional(_COUNT, least=0)),
        **dict.fromkeys(("vocab_size", "hidden_size", "moe_intermediate_size"), _SIZE),
        **dict.fromkeys(("shared_expert_intermediate_size", "num_attention_heads"), _SIZE),
        **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), _SIZE),
        **dict.fromkeys(("v_head_dim", "index_n_heads", "index_head_dim"), _SIZE),
        **dict.fromkeys(
            ("index_topk", "index_topk_freq", "full_attention_interval"), ValueRule(least=1)
        ),
        **dict.fromkeys(("linear_conv_kernel_dim", "linear_key_head_dim"), _SIZE),
        **dict.fromkeys(("linear_value_head_dim", "linear_num_key_heads"), _SIZE),
        "linear_num_value_heads": _SIZE,
        "index_skip_topk_offset": ValueRule(least=0),
        **dict.fromkeys(("num_key_value_heads", "head_dim"), _optional(_SIZE)),
        "q_lora_rank": _optional(_SIZE, least=0),
        # No tensor needs to have these, as dense layers of a model without such layers.
        **dict.fromkeys(("max_position_embeddings", "intermediate_size"), ValueRule(least=1)),
        **dict.fromkeys(("rms_norm_eps", "attention_dropout", "routed_scaling_factor"), _NUMBER),
        **dict.fromkeys(("rope_theta", "aux_loss_alpha"), _optional(_NUMBER)),
        **dict.fromkeys(
            ("tie_word_embeddings", "norm_topk_prob"), _optional(ValueRule(types=(bool,)))
        ),
        "seq_aux": _optional(ValueRule(types=(bool,))),
        **dict.fromkeys(("qkv_bias", "use_qk_norm"), ValueRule(types=(bool,))),
        "text_config": ValueRule(types=(dict,)),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), _optional(ValueRule(types=(dict,)))),
        **dict.fromkeys(("mlp_only_layers", "architectures"), _optional(ValueRule(types=(list,)))),
        **dict.fromkeys(("indexer_types", "layer_types"), _optional(ValueRule(types=(list,)))),
        "index_topk_pattern": _optional(ValueRule(types=(str, list))),
    }
)


class CheckedConfig(Mapping[str, Any]):
    """Content of `config.json`. A value is checked when it is read.

    Attributes:
        read: keys that were asked for, whether they are there or not.
    """

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        places: Collection[StoredTensor] | None,
        rules: Mapping[str, ValueRule] = RULES,
    ) -> None:
        """Take the content.

        Args:
            path: for messages.
            places: of the tensors in the files; None if there are none.
        """
        self._path = path
        self._config = config
        self._rules = rules
        self._limits: dict[str, int] = {}
        self.read: set[str] = set()
        if places is not None:
            longest = max((length for each in places for length in each.shape), default=0)
            self._limits = {COUNTED: len(places), LONGEST: longest}

    @override
    def __getitem__(self, key: str) -> Any:
        """Return a value; raises ConfigError if it breaks the rule of its key."""
        self.read.add(key)
        value = self._config[key]
        rule = self._rules.get(key)
        broken = rule.broken_by(value, self._limits) if rule else ""
        if key == "num_key_value_heads" and not broken and value:
            heads = self["num_attention_heads"]
            broken = f"a divisor of num_attention_heads={heads}" if heads % value else ""
        if broken:
            raise ConfigError(
                f"{self._path} has {key}={value!r:.100}, and it must be {broken}. Compare it with the "
                "published file."
            )
        return value

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    @override
    def __len__(self) -> int:
        return len(self._config)


class ComparedConfig(CheckedConfig):
    """A configuration that no family has to accept: what keeps one from it is noted, not raised.

    Attributes:
        differences: from the models of the family, for people.
    """

    def __init__(self, config: Mapping[str, Any], rules: Mapping[str, ValueRule] = RULES) -> None:
        super().__init__("", config, None, rules)
        self._limits = {COUNTED: _MOST_COMPARED, LONGEST: _MOST_COMPARED}
        self.differences: list[str] = []

    @override
    def __getitem__(self, key: str) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            self.differences.append(f"no {key}")
        except ConfigError:
            self.differences.append(f"{key}={self._config[key]!r:.60}")
        return 1

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._config

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        if key not in self:  # not missing, as in `self[key]`
            return default
        return self[key]
