"""DeepSeek-V2 and V3: dense first layers, then experts with shared ones; V3 also predicts further tokens.

mla.py has the attention.
"""

from collections.abc import Iterator
from typing import Any, override

from moe_ft.convert.huggingface.families import decoder
from moe_ft.convert.huggingface.families.mla import (
    SPEC,
    attention,
    attention_config,
    attention_settings,
    rope_config,
    rope_settings,
)
from moe_ft.convert.huggingface.mapping import (
    Config,
    Family,
    Mapped,
    Settings,
    expect,
    expect_config,
    same,
    vocabulary_size,
)
from moe_ft.errors import ConfigError

_SIZES = {
    "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "moe_intermediate_size": "--moe-ffn-hidden-size",
    "num_hidden_layers": "--num-layers",
    "num_attention_heads": "--num-attention-heads",
    "n_routed_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
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
        num_dense = _num_dense_layers(settings, self.model_type)

        def layer_tensors(layer: int) -> Iterator[Mapped]:
            names = f"decoder.layers.{layer}", f"model.layers.{layer}"
            return _layer(settings, *names, is_dense=layer < num_dense)

        further = {
            hub: _further_layer(settings, f"mtp.layers.{number}", hub)
            for number in range(num_further)
            for hub in (f"model.layers.{num_layers + number}",)
        }
        return decoder.model_tensors(settings, layer_tensors, further)


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
        groups = config if is_limited else {**config, "n_group": 1, "topk_group": 1}
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
        loss = {"seq_aux": balancing == "seq_aux_loss"}
        loss["aux_loss_alpha"] = settings.get("--moe-aux-loss-coeff")
    return {
        **{key: settings[flag] for key, flag in _SIZES.items()},
        "vocab_size": vocabulary_size(settings),
        "moe_intermediate_size": decoder.expert_size(settings),
        "max_position_embeddings": settings["--max-position-embeddings"],
        "n_shared_experts": _num_shared_experts(settings, family),
        "first_k_dense_replace": _num_dense_layers(settings, family),
        "moe_layer_freq": 1,
        "routed_scaling_factor": settings.get("--moe-router-topk-scaling-factor") or 1.0,
        "hidden_act": "silu",
        "attention_dropout": settings.get("--attention-dropout") or 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": not settings["--untie-embeddings-and-output-weights"],
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
        **{
            flag: None for flag, value in _FEATURES.items() if not value or isinstance(value, tuple)
        },
        "--normalization": "RMSNorm",
        "--swiglu": True,
        "--add-bias-linear": False,
        "--attention-dropout": config.get("attention_dropout", 0.0),
        "--hidden-dropout": 0.0,
        **{flag: config[key] for key, flag in _SIZES.items()},
        **decoder.vocabulary_settings(config),
        "--moe-layer-freq": decoder.layer_frequency(has_experts),
        "--moe-shared-expert-intermediate-size": config["n_shared_experts"]
        * config["moe_intermediate_size"],
        "--moe-router-topk-scaling-factor": config.get("routed_scaling_factor", 1.0),
        "--moe-router-load-balancing-type": balancing,
        "--moe-aux-loss-coeff": config.get("aux_loss_alpha", 0.0),
        "--moe-router-dtype": "fp32",
        "--untie-embeddings-and-output-weights": not config.get("tie_word_embeddings"),
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


def _layer(settings: Settings, megatron: str, hub: str, *, is_dense: bool) -> Iterator[Mapped]:
    hidden = (settings["--hidden-size"],)
    norm = f"{megatron}.input_layernorm.weight"
    yield same(norm, f"{hub}.input_layernorm.weight", hidden)
    yield from attention(settings, f"{megatron}.self_attention", f"{hub}.self_attn")
    # Transformer Engine has the norm before a dense MLP in its first projection.
    fused = (f"{megatron}.mlp.linear_fc1.layer_norm_weight",) if is_dense else ()
    norm = f"{megatron}.pre_mlp_layernorm.weight"
    yield same(norm, f"{hub}.post_attention_layernorm.weight", hidden, others=fused)
    ours, theirs = f"{megatron}.mlp", f"{hub}.mlp"
    if is_dense:
        yield from decoder.mlp(settings, ours, theirs, settings["--ffn-hidden-size"])
        return
    yield from decoder.experts(settings, ours, theirs)
    size = settings["--moe-shared-expert-intermediate-size"]
    yield from decoder.mlp(settings, f"{ours}.shared_experts", f"{theirs}.shared_experts", size)


def _further_layer(settings: Settings, megatron: str, hub: str) -> Iterator[Mapped]:
    hidden = settings["--hidden-size"]
    for norm in ("enorm", "hnorm"):
        yield same(f"{megatron}.{norm}.weight", f"{hub}.{norm}.weight", (hidden,))
    yield same(f"{megatron}.eh_proj.weight", f"{hub}.eh_proj.weight", (hidden, 2 * hidden))
    yield from _layer(settings, f"{megatron}.transformer_layer", hub, is_dense=False)
    norm = f"{hub}.shared_head.norm.weight"
    yield same(f"{megatron}.final_layernorm.weight", norm, (hidden,))


def _num_dense_layers(settings: Settings, family: str) -> int:
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


def _num_shared_experts(settings: Settings, family: str) -> int:
    size = settings.get("--moe-shared-expert-intermediate-size") or 0
    of_one = decoder.expert_size(settings)
    if not size or size % of_one:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size={size} must be a multiple of --moe-ffn-hidden-size="
            f"{of_one} for a model of {family}. Convert to torch_dist or safetensors."
        )
    return int(size // of_one)
