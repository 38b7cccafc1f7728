"""DeepSeek-V2 and V3: dense first layers, then experts with shared ones; V3 also predicts further tokens.

Queries of the multi-latent attention need not be compressed (`q_lora_rank`): then one projection makes them,
as in V2-Lite. Both sides rotate pairs of neighbouring elements, so weights are the same. They differ in how
`mscale` and `mscale_all_dim` become two numbers: a factor of sine and cosine, and one of the softmax. Only
settings that give the same numbers are translated.
"""

from collections.abc import Callable, Iterator, Mapping
from math import log
from typing import Any, override

from moe_ft.convert.huggingface import decoder
from moe_ft.convert.huggingface.mapping import (
    Config,
    Family,
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
# The layers that stock Megatron needs for what it would compute otherwise.
SPEC = ["megatron.fault_tolerance.program.deepseek_layers", "layer_spec"]
_ATTENTION_SIZES = {
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_nope_head_dim": "--qk-head-dim",
    "qk_rope_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
}
# Megatron 0.19.2 has no flags for these with multi-latent attention.
_FIXED = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_THETA = 10000
_PLAIN = "default"
_SIZES = {
    "intermediate_size": "--ffn-hidden-size",
    "moe_intermediate_size": "--moe-ffn-hidden-size",
    "n_routed_experts": "--num-experts",
}
_FEATURES = {
    **decoder.without(
        decoder.PLAIN,
        *("--multi-latent-attention", "--qk-layernorm", "--experimental-attention-variant"),
        *("--moe-router-enable-expert-bias", "--moe-router-score-function"),
        *("--moe-router-topk-scaling-factor", "--moe-router-num-groups"),
        *("--moe-shared-expert-intermediate-size", "--mtp-num-layers"),
    ),
    "--spec": (None, SPEC),
    "--mtp-use-repeated-layer": None,
}
_V2_ROUTER = {
    "--moe-router-score-function": "softmax",
    "--moe-router-pre-softmax": True,
    "--moe-router-enable-expert-bias": False,
    "--mtp-num-layers": None,
}
_V3_ROUTER = {"--moe-router-score-function": "sigmoid", "--moe-router-enable-expert-bias": True}


class _Deepseek(Family):
    """Tensors of both; those of layers of further tokens have the numbers after the last layer on the hub."""

    @override
    def tensors(self, settings: Settings) -> Iterator[Mapped]:
        num_layers, num_further = settings["--num-layers"], settings.get("--mtp-num-layers") or 0
        num_dense = num_dense_layers(settings, self.model_type)

        def layer_tensors(layer: int) -> Iterator[Mapped]:
            names = f"decoder.layers.{layer}", f"model.layers.{layer}"
            return self.layer(settings, *names, is_dense=layer < num_dense)

        further = {
            hub: further_layer(settings, f"mtp.layers.{number}", hub, self.layer)
            for number in range(num_further)
            for hub in (f"model.layers.{num_layers + number}",)
        }
        return decoder.model_tensors(settings, layer_tensors, further)

    def layer(
        self, settings: Settings, megatron: str, hub: str, *, is_dense: bool
    ) -> Iterator[Mapped]:
        """Yield the tensors of a layer; `megatron` and `hub` are its names there."""
        hidden = (settings["--hidden-size"],)
        norm = f"{megatron}.input_layernorm.weight"
        yield same(norm, f"{hub}.input_layernorm.weight", hidden)
        attention = f"{megatron}.self_attention", f"{hub}.self_attn"
        yield from decoder.latent_attention(settings, *attention)
        # Transformer Engine has the norm before a dense MLP in its first projection.
        fused = (f"{megatron}.mlp.linear_fc1.layer_norm_weight",) if is_dense else ()
        norm = f"{megatron}.pre_mlp_layernorm.weight"
        yield same(norm, f"{hub}.post_attention_layernorm.weight", hidden, others=fused)
        yield from mlp(settings, f"{megatron}.mlp", f"{hub}.mlp", is_dense=is_dense)


class DeepseekV2(_Deepseek):
    """Softmax over all experts before the choice; the score of a group is that of its best expert."""

    architecture = "DeepseekV2ForCausalLM"
    model_type = "deepseek_v2"

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        expect(settings, self.model_type, _V2_ROUTER)
        groups = groups_config(settings, self.model_type, best=1)
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
            **groups_settings(groups, self.model_type, best=1),
            **_V2_ROUTER,
        }


class DeepseekV3(_Deepseek):
    """Sigmoid scores with a bias for the choice; the score of a group is that of its best two experts."""

    architecture = "DeepseekV3ForCausalLM"
    model_type = "deepseek_v3"

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        expect(settings, self.model_type, _V3_ROUTER)
        return {
            **common_config(settings, self.model_type),
            **groups_config(settings, self.model_type, best=2),
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            # Megatron does not divide by one score.
            "norm_topk_prob": settings["--moe-router-topk"] > 1,
            "num_nextn_predict_layers": settings.get("--mtp-num-layers") or 0,
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        is_normalized = config["num_experts_per_tok"] > 1
        router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        expect_config(config, self.model_type, {**router, "norm_topk_prob": is_normalized})
        return {
            **common_settings(config, self.model_type),
            **groups_settings(config, self.model_type, best=2),
            **_V3_ROUTER,
            "--moe-router-pre-softmax": False,
            "--mtp-num-layers": config.get("num_nextn_predict_layers") or None,
        }


def common_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json` that V2 and V3 have."""
    attention_and_rope = attention_config(settings, family) | rope_config(settings, family)
    decoder.check_decoder(settings, family, _FEATURES)
    balancing = settings.get("--moe-router-load-balancing-type")
    loss: dict[str, Any] = {}
    if balancing in ("aux_loss", "seq_aux_loss"):
        coefficient = settings.get("--moe-aux-loss-coeff")
        loss = {"seq_aux": balancing == "seq_aux_loss", "aux_loss_alpha": coefficient}
    return {
        **decoder.shared_config(settings),
        **{key: settings[flag] for key, flag in _SIZES.items()},
        "moe_intermediate_size": decoder.expert_size(settings),
        "n_shared_experts": num_shared_experts(settings, family),
        "first_k_dense_replace": num_dense_layers(settings, family),
        "moe_layer_freq": 1,
        "routed_scaling_factor": settings.get("--moe-router-topk-scaling-factor") or 1.0,
        **attention_and_rope,
        **loss,
    }


def common_settings(config: Config, family: str) -> dict[str, Any]:
    """Return Megatron's settings that V2 and V3 have."""
    expect_config(config, family, {**decoder.PLAIN_CONFIG, "moe_layer_freq": 1})
    num_layers, num_dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    if not config.get("n_shared_experts") or num_dense >= num_layers:
        raise ConfigError(
            f"config.json has n_shared_experts={config.get('n_shared_experts')}, first_k_dense_replace="
            f"{num_dense} and num_hidden_layers={num_layers}: a model of {family} must have shared "
            "experts, and experts in its last layer. There is no conversion of this model."
        )
    has_experts = [layer >= num_dense for layer in range(num_layers)]
    balancing = {None: "none", False: "aux_loss", True: "seq_aux_loss"}[config.get("seq_aux")]
    return {
        **decoder.shared_settings(config, _FEATURES),
        **{flag: config[key] for key, flag in _SIZES.items()},
        "--moe-layer-freq": decoder.layer_frequency(has_experts),
        "--moe-shared-expert-intermediate-size": config["n_shared_experts"]
        * config["moe_intermediate_size"],
        "--moe-router-topk-scaling-factor": config.get("routed_scaling_factor", 1.0),
        "--moe-router-load-balancing-type": balancing,
        "--moe-aux-loss-coeff": config.get("aux_loss_alpha", 0.0),
        "--moe-router-dtype": "fp32",
        **attention_settings(config, family),
        **rope_settings(config, family),
    }


def groups_config(settings: Settings, family: str, *, best: int) -> dict[str, Any]:
    """Return the keys of `config.json` for groups of experts; 1 of 1 for none.

    Args:
        best: experts of a group whose scores are the group's score. Megatron takes as many as each chosen
            group has chosen experts on average, rounded down; the layers of SPEC take one.
    """
    top_k, chosen = settings["--moe-router-topk"], settings.get("--moe-router-group-topk")
    if not chosen:
        return {"n_group": 1, "topk_group": 1}
    num_groups = settings["--moe-router-num-groups"]
    takes_one = best == 1 and settings.get("--spec") == SPEC
    if not takes_one and _differ(top_k, chosen, num_groups, best):
        raise ConfigError(
            f"--moe-router-topk={top_k} must be at least {best * chosen} and less than "
            f"{(best + 1) * chosen} with --moe-router-group-topk={chosen} for a model of {family}: it "
            f"scores a group by its best {best} experts, and Megatron by its best {top_k // chosen}. "
            "Convert to torch_dist or safetensors."
        )
    return {"n_group": num_groups, "topk_group": chosen}


def groups_settings(config: Config, family: str, *, best: int) -> dict[str, Any]:
    """Return Megatron's settings for groups of experts; `best` is as in `groups_config`."""
    num_groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    top_k = config["num_experts_per_tok"]
    if num_groups == chosen:
        return dict.fromkeys(("--moe-router-num-groups", "--moe-router-group-topk"))
    settings = {"--moe-router-num-groups": num_groups, "--moe-router-group-topk": chosen}
    if not _differ(top_k, chosen, num_groups, best):
        return settings
    if best > 1:
        raise ConfigError(
            f"config.json has num_experts_per_tok={top_k} and topk_group={chosen}, and Megatron scores a "
            f"group by its best {top_k // chosen} experts: a model of {family} takes the best {best}. "
            "There is no conversion of this model."
        )
    return {**settings, "--spec": SPEC}


def _differ(top_k: int, chosen: int, num_groups: int, best: int) -> bool:
    return chosen != num_groups and top_k // chosen != best


def mlp(settings: Settings, ours: str, theirs: str, *, is_dense: bool) -> Iterator[Mapped]:
    """Yield the tensors of a dense MLP, or of experts with shared ones."""
    if is_dense:
        yield from decoder.mlp(settings, ours, theirs, settings["--ffn-hidden-size"])
        return
    yield from decoder.experts(settings, ours, theirs)
    size = settings["--moe-shared-expert-intermediate-size"]
    yield from decoder.mlp(settings, f"{ours}.shared_experts", f"{theirs}.shared_experts", size)


def further_layer(
    settings: Settings, megatron: str, hub: str, layer: Callable[..., Iterator[Mapped]]
) -> Iterator[Mapped]:
    """Yield the tensors of a layer that predicts a further token; `layer` yields those of its own layer."""
    hidden = settings["--hidden-size"]
    for norm in ("enorm", "hnorm"):
        yield same(f"{megatron}.{norm}.weight", f"{hub}.{norm}.weight", (hidden,))
    yield same(f"{megatron}.eh_proj.weight", f"{hub}.eh_proj.weight", (hidden, 2 * hidden))
    yield from layer(settings, f"{megatron}.transformer_layer", hub, is_dense=False)
    norm = f"{hub}.shared_head.norm.weight"
    yield same(f"{megatron}.final_layernorm.weight", norm, (hidden,))


def num_dense_layers(settings: Settings, family: str) -> int:
    """Return the number of layers before the first with experts; all after it must have experts."""
    has_experts, given = decoder.moe_layers(settings), settings.get("--moe-layer-freq")
    num_layers = len(has_experts)
    num_dense = has_experts.index(True) if True in has_experts else num_layers
    if num_dense == num_layers or not all(has_experts[num_dense:]):
        raise ConfigError(
            f"--moe-layer-freq={given} must be dense layers and then layers with experts for a model of "
            f"{family}, such as ([0]*1+[1]*{num_layers - 1}). Convert to torch_dist or safetensors."
        )
    return num_dense


def num_shared_experts(settings: Settings, family: str) -> int:
    """Return the number of shared experts, of the size of the others, that Megatron has as one."""
    size = settings.get("--moe-shared-expert-intermediate-size") or 0
    of_one = decoder.expert_size(settings)
    if not size or size % of_one:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size={size} must be a multiple of --moe-ffn-hidden-size="
            f"{of_one} for a model of {family}. Convert to torch_dist or safetensors."
        )
    return int(size // of_one)


def attention_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json`."""
    features = {"--multi-latent-attention": True, "--qk-layernorm": True}
    expect(settings, family, {**features, "--experimental-attention-variant": None})
    if settings["--layernorm-epsilon"] != _EPSILON:
        raise ConfigError(
            f"--norm-epsilon={settings['--layernorm-epsilon']} must be {_EPSILON} for a model of {family}: "
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
        "rms_norm_eps": _EPSILON,
    }


def attention_settings(config: Config, family: str) -> dict[str, Any]:
    """Return Megatron's settings."""
    heads = config["num_attention_heads"]
    expected = {"num_key_value_heads": (heads, None), "rms_norm_eps": _EPSILON}
    expect_config(config, family, {**expected, "rope_interleave": True})
    # --spec does not reach layers of multi-token prediction.
    has_further = bool(config.get("num_nextn_predict_layers"))
    queries = {"--transformer-impl": "local"} if has_further else {"--spec": SPEC}
    return {
        "--multi-latent-attention": True,
        "--num-attention-heads": heads,
        "--group-query-attention": False,
        "--qk-layernorm": True,
        "--layernorm-epsilon": _EPSILON,
        **{flag: config[key] for key, flag in _ATTENTION_SIZES.items()},
        **({} if config["q_lora_rank"] else queries),
    }


def _leaves_queries_alone(settings: Settings) -> bool:
    if settings.get("--transformer-impl") == "local":
        return True
    others = settings.get("--mtp-num-layers") or settings.get("--mla-down-proj-fusion")
    return settings.get("--spec") == SPEC and not others


def rope_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json`, as DeepSeek writes them."""
    expect(settings, family, {"--rope-type": (None, "rope", "yarn")})
    rope: dict[str, Any] = {}
    if settings.get("--rope-type") != "rope":  # Megatron's default is YaRN
        rope = {
            "type": "yarn",
            "factor": settings["--rotary-scaling-factor"],
            **_FIXED,
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


def rope_settings(config: Config, family: str) -> dict[str, Any]:
    """Return Megatron's settings."""
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
    expect_config(
        given, family, {"rope_type": (_PLAIN, "yarn"), **fixed, **(_FIXED if is_yarn else {})}
    )
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
