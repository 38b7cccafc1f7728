"""Layers of DeepSeek's models: dense first layers, then experts with shared ones, then predicted tokens.

deepseek_v2.py and deepseek_v3.py have the routers and the names of the settings that only one of them has.
mla.py has the attention.
"""

from collections.abc import Iterator
from typing import Any

from moe_ft.convert.huggingface.families import decoder
from moe_ft.convert.huggingface.families.mla import (
    SPEC,
    attention,
    attention_config,
    attention_settings,
)
from moe_ft.convert.huggingface.families.mla_rope import rope_config, rope_settings
from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
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


def common_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json` that V2 and V3 have.

    Raises:
        ConfigError: if the family cannot express the model.
    """
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
    """Return Megatron's settings that V2 and V3 have.

    Raises:
        ConfigError: if Megatron cannot express the model.
    """
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

    Raises:
        ConfigError: if the family chooses other groups.
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
    """Return Megatron's settings for groups of experts.

    Args:
        best: as in `groups_config`.

    Raises:
        ConfigError: if Megatron chooses other groups.
    """
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


def model_tensors(settings: Settings, family: str) -> Iterator[Mapped]:
    """Yield every tensor; those of MTP layers have the numbers after the last layer on the hub."""
    num_layers, num_mtp = settings["--num-layers"], settings.get("--mtp-num-layers") or 0
    hidden, vocabulary = settings["--hidden-size"], vocabulary_size(settings)
    is_tied = not settings["--untie-embeddings-and-output-weights"]
    further = [f"model.layers.{num_layers + each}" for each in range(num_mtp)]
    heads = tuple(f"{layer}.shared_head.head.weight" for layer in further)
    yield same(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        (vocabulary, hidden),
        copies=tuple(f"{layer}.embed_tokens.weight" for layer in further)
        + (heads if is_tied else ()),
        duplicates=(decoder.HEAD,) * is_tied,
        is_vocabulary=True,
    )
    num_dense = _num_dense_layers(settings, family)
    for layer in range(num_layers):
        names = f"decoder.layers.{layer}", f"model.layers.{layer}"
        yield from _layer(settings, *names, is_dense=layer < num_dense)
    yield same("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
    for number, hub in enumerate(further):
        megatron = f"mtp.layers.{number}"
        for norm in ("enorm", "hnorm"):
            yield same(f"{megatron}.{norm}.weight", f"{hub}.{norm}.weight", (hidden,))
        projection = f"{megatron}.eh_proj.weight"
        yield same(projection, f"{hub}.eh_proj.weight", (hidden, 2 * hidden))
        yield from _layer(settings, f"{megatron}.transformer_layer", hub, is_dense=False)
        final = f"{megatron}.final_layernorm.weight"
        yield same(final, f"{hub}.shared_head.norm.weight", (hidden,))
    if not is_tied:
        yield same(
            "output_layer.weight",
            decoder.HEAD,
            (vocabulary, hidden),
            copies=heads,
            is_vocabulary=True,
        )


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
    num_experts = settings["--num-experts"]
    yield same(f"{ours}.router.weight", f"{theirs}.gate.weight", (num_experts, *hidden))
    if settings.get("--moe-router-enable-expert-bias"):
        bias = f"{theirs}.gate.e_score_correction_bias"
        yield same(f"{ours}.router.expert_bias", bias, (num_experts,))
    for expert in range(num_experts):
        names = f"{ours}.experts.experts.{expert}", f"{theirs}.experts.{expert}"
        yield from decoder.mlp(settings, *names, decoder.expert_size(settings))
    size = settings["--moe-shared-expert-intermediate-size"]
    yield from decoder.mlp(settings, f"{ours}.shared_experts", f"{theirs}.shared_experts", size)


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
