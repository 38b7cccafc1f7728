"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with a lightning indexer, which chooses the keys that a query sees.

Megatron has it as `--experimental-attention-variant dsa`. It also rotates queries and keys of the indexer by
a Hadamard matrix before it scores them, which changes no score and which transformers leaves out: with or
without --no-dsa-indexer-rotate-activation it is the same model. Layers of GLM-5.2 share the choice of an
earlier layer (`indexer_types`), and then have no indexer.
"""

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any, override

from moe_ft.convert.huggingface.deepseek import DeepseekV3
from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
    expect,
    expect_config,
    same,
)
from moe_ft.errors import ConfigError

_SIZES = {
    "index_n_heads": "--dsa-indexer-n-heads",
    "index_head_dim": "--dsa-indexer-head-dim",
    "index_topk": "--dsa-indexer-topk",
}
_PERIOD, _OFFSET = "--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset"
_FULL, _SHARED = "full", "shared"


class DeepseekV32(DeepseekV3):
    """An indexer in each layer, which rotates the halves of its heads."""

    architecture = "DeepseekV32ForCausalLM"
    model_type = "deepseek_v32"
    latent = MappingProxyType({"variant": "dsa"})
    rotates_pairs = False
    can_share = False

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        expect(settings, self.model_type, self._indexer())
        has_indexer = _layers_with_indexer(settings)
        if not self.can_share:
            expect({_PERIOD: settings.get(_PERIOD) or 1}, self.model_type, {_PERIOD: 1})
        types = [_FULL if each else _SHARED for each in has_indexer]
        return {
            **super().config(settings),
            **{key: settings[flag] for key, flag in _SIZES.items()},
            **({"indexer_types": types} if self.can_share else {}),
            **({"indexer_rope_interleave": True} if self.rotates_pairs else {}),
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        num_layers, num_dense = config["num_hidden_layers"], config["first_k_dense_replace"]
        kinds = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
        expected = {
            "mlp_layer_types": (kinds, None),
            "layer_types": (["indexed_attention"] * num_layers, None),
            "indexer_rope_interleave": (self.rotates_pairs, None),
        }
        expect_config(config, self.model_type, expected)
        settings = {
            **super().settings(config),
            **{flag: config[key] for key, flag in _SIZES.items()},
            **self._indexer(),
            **(_shared_choices(config) if self.can_share else {}),
            "--dsa-indexer-rotate-activation": False,
        }
        _layers_with_indexer(settings)
        return settings

    def _indexer(self) -> dict[str, Any]:
        """Return the settings that transformers has for the indexer of the family."""
        return {
            "--dsa-indexer-rope-interleaved": self.rotates_pairs,
            "--dsa-indexer-scoring-relu": True,
            "--dsa-indexer-k-norm-epsilon": 1e-6,
        }

    @override
    def layer(
        self, settings: Settings, ours: str, theirs: str, number: int | None, *, has_experts: bool
    ) -> Iterator[Mapped]:
        yield from super().layer(settings, ours, theirs, number, has_experts=has_experts)
        if number is not None and not _layers_with_indexer(settings)[number]:
            return
        ours = f"{ours}.self_attention.core_attention.indexer"
        theirs = f"{theirs}.self_attn.indexer"
        heads, size = settings["--dsa-indexer-n-heads"], settings["--dsa-indexer-head-dim"]
        hidden = settings["--hidden-size"]
        shape = (heads * size, settings["--q-lora-rank"])
        yield same(f"{ours}.linear_wq_b.weight", f"{theirs}.wq_b.weight", shape)
        yield same(f"{ours}.linear_wk.weight", f"{theirs}.wk.weight", (size, hidden))
        for kind in ("weight", "bias"):
            yield same(f"{ours}.k_norm.{kind}", f"{theirs}.k_norm.{kind}", (size,))
        weights = f"{theirs}.weights_proj.weight"
        yield same(f"{ours}.linear_weights_proj.weight", weights, (heads, hidden))


class GlmMoeDsa(DeepseekV32):
    """Indexers that rotate pairs, and layers that share the choice of an earlier one.

    The norms of compressed queries, keys and values have `rms_norm_eps` in Megatron, as the others; those of
    transformers have 1e-6 whatever it is.
    """

    architecture = "GlmMoeDsaForCausalLM"
    model_type = "glm_moe_dsa"
    latent = MappingProxyType({"variant": "dsa", "epsilon": None})
    rotates_pairs = True
    can_share = True


def _layers_with_indexer(settings: Settings) -> Sequence[bool]:
    """Return for each layer of the decoder whether it has an indexer; the others share a choice."""
    period, offset = settings.get(_PERIOD) or 1, max(settings.get(_OFFSET) or 0, 1)
    if period > 1 and (settings.get("--mtp-num-layers") or 0) > 1:
        raise ConfigError(
            f"--mtp-num-layers={settings['--mtp-num-layers']} must be at most 1 with {_PERIOD}={period}: "
            "Megatron lets later ones share the choice of a layer of the decoder, and published models do "
            "not. Convert to torch_dist or safetensors."
        )
    numbers = range(1, settings["--num-layers"] + 1)
    return [max(number - offset, 0) % period == 0 for number in numbers]


def _shared_choices(config: Config) -> dict[str, int]:
    """Return Megatron's settings for `indexer_types`, or for what transformers derives them from."""
    num_layers, pattern = config["num_hidden_layers"], config.get("index_topk_pattern")
    types = config.get("indexer_types")
    if types is None and pattern is not None:
        types = [{"F": _FULL, "S": _SHARED}.get(each, each) for each in pattern]
    if types is None:
        given = {_PERIOD: config.get("index_topk_freq", 1), "--num-layers": num_layers}
        offset = config.get("index_skip_topk_offset", 2)
        has_indexer = _layers_with_indexer({**given, _OFFSET: offset})
    else:
        has_indexer = [each == _FULL for each in types]
    first = has_indexer.index(False) if False in has_indexer else 0
    later = [layer for layer, has in enumerate(has_indexer) if has and layer > first]
    period = (later[0] - first + 1 if later else num_layers) if first else 1
    settings = {_PERIOD: period, _OFFSET: first}
    known = {_FULL, _SHARED}.issuperset(types or ())
    if not known or _layers_with_indexer({**settings, "--num-layers": num_layers}) != has_indexer:
        raise ConfigError(
            f"config.json has indexer_types={types!r:.100}, and Megatron can express only {_FULL} layers and "
            f"then one of them after each so many {_SHARED} ones. There is no conversion of this model."
        )
    return settings
