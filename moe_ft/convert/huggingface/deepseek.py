"""DeepSeek-V2 and V3: dense first layers, then experts with shared ones; V3 also predicts further tokens.

Queries of the multi-latent attention need not be compressed (`q_lora_rank`): then one projection makes them,
as in V2-Lite. Both sides rotate pairs of neighbouring elements, so weights are the same. They differ in how
`mscale` and `mscale_all_dim` become two numbers: a factor of sine and cosine, and one of the softmax. Only
settings that give the same numbers are translated.

DeepSeek-V3.2 and GLM-5 are V3 with a lightning indexer, which chooses the keys that a query sees. Megatron
has it as `--experimental-attention-variant dsa`. It also rotates queries and keys of the indexer by a
Hadamard matrix before it scores them, which changes no score and which transformers leaves out: with or
without --no-dsa-indexer-rotate-activation it is the same model. Layers of GLM-5.2 share the choice of an
earlier layer (`indexer_types`), and then have no indexer.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import log
from types import MappingProxyType
from typing import Any, override

from moe_ft.convert.huggingface import decoder, shared_experts
from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
    expect,
    expect_config,
    same,
    with_values,
)
from moe_ft.errors import ConfigError

# transformers takes this for the norms of compressed queries, keys and values, whatever rms_norm_eps is.
_EPSILON = 1e-6
_ATTENTION_SIZES = {
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_nope_head_dim": "--qk-head-dim",
    "qk_rope_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
}
# Megatron 0.19.2 reads these flags without multi-latent attention alone, and has its defaults with it. The
# layers of shared_experts.SPEC read them.
_YARN: Mapping[str, tuple[str, int]] = {
    "original_max_position_embeddings": ("--yarn-original-max-position-embeddings", 4096),
    "beta_fast": ("--yarn-beta-fast", 32),
    "beta_slow": ("--yarn-beta-slow", 1),
}
_THETA = 10000
_PLAIN = "default"
_FEATURES = {
    **decoder.without(
        decoder.PLAIN,
        *("--multi-latent-attention", "--qk-layernorm", "--experimental-attention-variant"),
        *("--moe-router-enable-expert-bias", "--moe-router-score-function"),
        *("--moe-router-topk-scaling-factor", "--moe-router-num-groups"),
        *("--moe-shared-expert-intermediate-size", "--mtp-num-layers"),
    ),
    "--spec": (None, shared_experts.SPEC),
    "--mtp-use-repeated-layer": None,
}
_INDEXER_SIZES = {
    "index_n_heads": "--dsa-indexer-n-heads",
    "index_head_dim": "--dsa-indexer-head-dim",
    "index_topk": "--dsa-indexer-topk",
}
_PERIOD, _OFFSET = "--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset"
_FULL, _SHARED = "full", "shared"
_V2_ROUTER = {
    "--moe-router-score-function": "softmax",
    "--moe-router-pre-softmax": True,
    "--moe-router-enable-expert-bias": False,
    "--mtp-num-layers": None,
}


class _Deepseek(shared_experts.SharedExperts):
    """Tensors of both."""

    @override
    def attention(
        self, settings: Settings, ours: str, theirs: str, number: int | None
    ) -> Iterator[Mapped]:
        norm, hidden = "input_layernorm.weight", settings["--hidden-size"]
        yield same(f"{ours}.{norm}", f"{theirs}.{norm}", (hidden,))
        yield from latent_attention(settings, f"{ours}.self_attention", f"{theirs}.self_attn")

    @override
    def norm_before_mlp(
        self, settings: Settings, ours: str, theirs: str, *, has_experts: bool
    ) -> Mapped:
        # Transformer Engine has the norm before a dense MLP in its first projection.
        fused = () if has_experts else (f"{ours}.mlp.linear_fc1.layer_norm_weight",)
        name = f"{theirs}.post_attention_layernorm.weight"
        shape = (settings["--hidden-size"],)
        return same(f"{ours}.pre_mlp_layernorm.weight", name, shape, others=fused)


class DeepseekV2(_Deepseek):
    """Softmax over all experts before the choice; the score of a group is that of its best expert."""

    architecture = "DeepseekV2ForCausalLM"
    model_type = "deepseek_v2"

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        expect(settings, self.model_type, _V2_ROUTER)
        groups = shared_experts.groups_config(settings, self.model_type, best=1)
        is_limited = groups["topk_group"] < groups["n_group"]
        return {
            **common_config(settings, self.model_type),
            **groups,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy" if is_limited else "greedy",
            "norm_topk_prob": False,
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        methods = ("greedy", "group_limited_greedy")
        router = {"scoring_func": "softmax", "topk_method": methods, "norm_topk_prob": False}
        expect_config(config, self.model_type, router)
        is_limited = config.get("topk_method") == "group_limited_greedy"
        groups = config if is_limited else with_values(config, {"n_group": 1, "topk_group": 1})
        return {
            **common_settings(config, self.model_type),
            **shared_experts.groups_settings(groups, self.model_type, best=1),
            **_V2_ROUTER,
        }


class DeepseekV3(_Deepseek):
    """Sigmoid scores with a bias for the choice; the score of a group is that of its best two experts."""

    architecture = "DeepseekV3ForCausalLM"
    model_type = "deepseek_v3"
    latent: Mapping[str, Any] = MappingProxyType({})  # options of `attention_config`

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        return {
            **common_config(settings, self.model_type, **self.latent),
            **shared_experts.sigmoid_config(settings, self.model_type),
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        return {
            **common_settings(config, self.model_type, **self.latent),
            **shared_experts.sigmoid_settings(config, self.model_type),
        }


class KimiK2(DeepseekV3):
    """DeepSeek-V3 with another name, of which transformers has no code and published files have their own."""

    model_type = "kimi_k2"
    is_by_name = True


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
            **{key: settings[flag] for key, flag in _INDEXER_SIZES.items()},
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
            **{flag: config[key] for key, flag in _INDEXER_SIZES.items()},
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


def common_config(settings: Settings, family: str, **attention: Any) -> dict[str, Any]:
    """Return the keys of `config.json` that V2 and V3 have; the options are those of `attention_config`."""
    attention_and_rope = {
        **attention_config(settings, family, **attention),
        **rope_config(settings, family),
    }
    decoder.check_decoder(settings, family, _FEATURES)
    return {
        **decoder.shared_config(settings),
        **shared_experts.experts_config(settings, family),
        **attention_and_rope,
    }


def common_settings(config: Config, family: str, **attention: Any) -> dict[str, Any]:
    """Return Megatron's settings that V2 and V3 have; the options are those of `attention_config`."""
    expect_config(config, family, decoder.PLAIN_CONFIG)
    return {
        **decoder.shared_settings(config, _FEATURES),
        **shared_experts.experts_settings(config, family),
        **attention_settings(config, family, **attention),
        **rope_settings(config, family, has_own_layers=not attention.get("variant")),
    }


def latent_attention(settings: Settings, megatron: str, hub: str) -> Iterator[Mapped]:
    """Yield the tensors of a layer's multi-latent attention; `megatron` and `hub` are its names there."""
    hidden, heads = settings["--hidden-size"], settings["--num-attention-heads"]
    queries, latent = settings.get("--q-lora-rank"), settings["--kv-lora-rank"]
    plain, rotary = settings["--qk-head-dim"], settings["--qk-pos-emb-head-dim"]
    values = settings["--v-head-dim"]

    def weight(ours: str, theirs: str, *shape: int) -> Mapped:
        return same(f"{megatron}.{ours}.weight", f"{hub}.{theirs}.weight", shape)

    def norm(ours: str, fused: str, theirs: str, size: int) -> Mapped:
        others = (f"{megatron}.{fused}.layer_norm_weight",)  # with Transformer Engine
        return same(f"{megatron}.{ours}.weight", f"{hub}.{theirs}.weight", (size,), others=others)

    query_rows = heads * (plain + rotary)
    if queries:
        yield weight("linear_q_down_proj", "q_a_proj", queries, hidden)
        yield norm("q_layernorm", "linear_q_up_proj", "q_a_layernorm", queries)
        yield weight("linear_q_up_proj", "q_b_proj", query_rows, queries)
    else:
        yield weight("linear_q_proj", "q_proj", query_rows, hidden)
    yield weight("linear_kv_down_proj", "kv_a_proj_with_mqa", latent + rotary, hidden)
    yield norm("kv_layernorm", "linear_kv_up_proj", "kv_a_layernorm", latent)
    yield weight("linear_kv_up_proj", "kv_b_proj", heads * (plain + values), latent)
    yield weight("linear_proj", "o_proj", hidden, heads * values)


def attention_config(
    settings: Settings,
    family: str,
    *,
    epsilon: float | None = _EPSILON,
    variant: str | None = None,
) -> dict[str, Any]:
    """Return the keys of `config.json`.

    Args:
        epsilon: of all norms; None for any.
        variant: --experimental-attention-variant of the family.
    """
    features = {"--multi-latent-attention": True, "--qk-layernorm": True}
    expect(settings, family, {**features, "--experimental-attention-variant": variant})
    if epsilon is not None and settings["--layernorm-epsilon"] != epsilon:
        raise ConfigError(
            f"--norm-epsilon={settings['--layernorm-epsilon']} must be {epsilon} for a model of {family}: "
            "transformers has this number for the norms of compressed queries, keys and values. Convert "
            "to torch_dist or safetensors."
        )
    if not settings.get("--q-lora-rank") and not _leaves_queries_alone(settings):
        raise ConfigError(
            f"--q-lora-rank={settings.get('--q-lora-rank')} must be a number with --transformer-impl="
            f"{settings.get('--transformer-impl')}, --spec={settings.get('--spec')}, --mtp-num-layers="
            f"{settings.get('--mtp-num-layers')} and --mla-down-proj-fusion="
            f"{bool(settings.get('--mla-down-proj-fusion'))}: Megatron 0.19.2 then normalizes the input of "
            f"the queries a second time, and a model of {family} does not. Convert to torch_dist or "
            "safetensors."
        )
    return {
        "num_key_value_heads": settings["--num-attention-heads"],
        **{key: settings.get(flag) or None for key, flag in _ATTENTION_SIZES.items()},
        "attention_bias": False,
        "rms_norm_eps": settings["--layernorm-epsilon"],
    }


def attention_settings(
    config: Config,
    family: str,
    *,
    epsilon: float | None = _EPSILON,
    variant: str | None = None,
) -> dict[str, Any]:
    """Return Megatron's settings; the arguments are those of `attention_config`."""
    heads = config["num_attention_heads"]
    expected = {"num_key_value_heads": (heads, None), "rope_interleave": True}
    if epsilon is not None:
        expected["rms_norm_eps"] = epsilon
    expect_config(config, family, expected)
    # --spec does not reach layers of multi-token prediction.
    has_further = bool(config.get("num_nextn_predict_layers"))
    queries = {"--transformer-impl": "local"} if has_further else {"--spec": shared_experts.SPEC}
    return {
        "--multi-latent-attention": True,
        "--num-attention-heads": heads,
        "--group-query-attention": False,
        "--qk-layernorm": True,
        "--layernorm-epsilon": config["rms_norm_eps"],
        "--experimental-attention-variant": variant,
        **{flag: config[key] for key, flag in _ATTENTION_SIZES.items()},
        **({} if config["q_lora_rank"] else queries),
    }


def _leaves_queries_alone(settings: Settings) -> bool:
    if settings.get("--transformer-impl") == "local":
        return True
    others = settings.get("--mtp-num-layers") or settings.get("--mla-down-proj-fusion")
    return settings.get("--spec") == shared_experts.SPEC and not others


def rope_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json`, as DeepSeek writes them."""
    expect(settings, family, {"--rope-type": (None, "rope", "yarn")})
    rope: dict[str, Any] = {}
    if settings.get("--rope-type") != "rope":  # Megatron's default is YaRN
        rope = {
            "type": "yarn",
            "factor": settings["--rotary-scaling-factor"],
            **_yarn_config(settings),
            "mscale": settings["--mscale"],
            "mscale_all_dim": settings["--mscale-all-dim"],
        }
    if _factors_of_transformers(rope) != _factors_of_megatron(settings):
        raise ConfigError(
            f"--mscale={settings['--mscale']} and --mscale-all-dim={settings['--mscale-all-dim']} must "
            "both be given with --rope-type=yarn, or left at 1 and 0, and --mscale-all-dim must be 0 with "
            f"--rope-type=rope: else a model of {family} computes another softmax. Convert to torch_dist "
            "or safetensors."
        )
    return {"rope_theta": settings["--rotary-base"], "rope_scaling": rope or None}


def _yarn_config(settings: Settings) -> dict[str, Any]:
    reads_flags = settings.get("--spec") == shared_experts.SPEC
    given = {key: settings.get(flag) if reads_flags else None for key, (flag, _) in _YARN.items()}
    return {
        key: default if given[key] is None else given[key] for key, (_, default) in _YARN.items()
    }


def rope_settings(config: Config, family: str, *, has_own_layers: bool = True) -> dict[str, Any]:
    """Return Megatron's settings.

    Args:
        has_own_layers: whether the layers of shared_experts.SPEC can be those of the model.
    """
    rope = config.get("rope_parameters") or {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config.get("rope_theta", _THETA),
    }
    kind = rope.get("rope_type", rope.get("type", _PLAIN))
    is_yarn = kind == "yarn"
    theta = rope.get("rope_theta", _THETA)
    length = config["max_position_embeddings"]
    given = {"original_max_position_embeddings": length, **rope, "rope_type": kind}
    fixed = {"partial_rotary_factor": (1.0, None), "truncate": True}
    expect_config(given, family, {"rope_type": (_PLAIN, "yarn"), **fixed})
    own = {key: (given.get(key) or default) for key, (_, default) in _YARN.items()}
    is_own = is_yarn and any(own[key] != default for key, (_, default) in _YARN.items())
    if is_own and not has_own_layers:
        expect_config(own, family, {key: default for key, (_, default) in _YARN.items()})
    expect_config(rope, family, {"rope_theta": int(theta)})  # --rotary-base is a whole number
    has_both = is_yarn and rope.get("mscale") and rope.get("mscale_all_dim")
    settings = {
        "--position-embedding-type": "rope",
        "--max-position-embeddings": length,
        "--rope-type": "yarn" if is_yarn else "rope",
        "--rotary-base": int(theta),
        "--rotary-percent": 1.0,
        "--rotary-interleaved": False,
        "--rotary-scaling-factor": rope["factor"] if is_yarn else 1.0,
        "--mscale": rope["mscale"] if has_both else 1.0,
        "--mscale-all-dim": (is_yarn and rope.get("mscale_all_dim")) or 0.0,
    }
    if is_own:
        settings |= {flag: own[key] for key, (flag, _) in _YARN.items()}
        settings["--spec"] = shared_experts.SPEC
    if _factors_of_transformers(rope if is_yarn else {}) != _factors_of_megatron(settings):
        keys = ("mscale", "mscale_all_dim", "attention_factor")
        raise ConfigError(
            f"config.json has {', '.join(f'{key}={rope.get(key)}' for key in keys)}, and with "
            "multi-latent attention Megatron cannot express these: either mscale and mscale_all_dim, or "
            "none of them. There is no conversion of this model."
        )
    return settings


def _growth(factor: float, mscale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def _factors_of_megatron(settings: Settings) -> tuple[float, float]:
    """Return the factor of sine and cosine, and that of the softmax."""
    factor, of_all = settings["--rotary-scaling-factor"], settings["--mscale-all-dim"]
    of_softmax = _growth(factor, of_all)  # also without YaRN
    of_rotation = _growth(factor, settings["--mscale"]) / of_softmax
    return (1.0 if settings.get("--rope-type") == "rope" else of_rotation), of_softmax


def _factors_of_transformers(rope: Mapping[str, Any]) -> tuple[float, float]:
    if not rope:
        return 1.0, 1.0
    factor, mscale, of_all = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    of_rotation = rope.get("attention_factor")
    if of_rotation is None:
        has_both = mscale and of_all
        of_rotation = (
            _growth(factor, mscale) / _growth(factor, of_all) if has_both else _growth(factor, 1.0)
        )
    return of_rotation, _growth(factor, of_all) if of_all else 1.0


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
