"""Dense first layers, then layers with experts and shared ones, and layers that predict further tokens.

DeepSeek's models have them, with a router that has groups of experts; those of GLM and Kimi are of the same
kind, with other attention.
"""

from collections.abc import Iterator
from typing import Any, override

from moe_ft.convert.huggingface import decoder
from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
    expect,
    expect_config,
)
from moe_ft.errors import ConfigError

# The layers that stock Megatron needs for what it would compute otherwise.
SPEC = ["megatron.fault_tolerance.program.deepseek_layers", "layer_spec"]
_SIZES = {
    "intermediate_size": "--ffn-hidden-size",
    "moe_intermediate_size": "--moe-ffn-hidden-size",
    "n_routed_experts": "--num-experts",
}
SIGMOID_ROUTER = {
    "--moe-router-score-function": "sigmoid",
    "--moe-router-enable-expert-bias": True,
}


def experts_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json` for dense layers, experts, and what balances them."""
    balancing = settings.get("--moe-router-load-balancing-type")
    loss: dict[str, Any] = {}
    if balancing in ("aux_loss", "seq_aux_loss"):
        coefficient = settings.get("--moe-aux-loss-coeff")
        loss = {"seq_aux": balancing == "seq_aux_loss", "aux_loss_alpha": coefficient}
    return {
        **{key: settings[flag] for key, flag in _SIZES.items()},
        "moe_intermediate_size": decoder.expert_size(settings),
        "n_shared_experts": num_shared_experts(settings, family),
        "first_k_dense_replace": num_dense_layers(settings, family),
        "moe_layer_freq": 1,
        "routed_scaling_factor": settings.get("--moe-router-topk-scaling-factor") or 1.0,
        **loss,
    }


def experts_settings(config: Config, family: str) -> dict[str, Any]:
    """Return Megatron's settings for dense layers, experts, and what balances them."""
    expect_config(config, family, {"moe_layer_freq": 1})
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
        **{flag: config[key] for key, flag in _SIZES.items()},
        "--moe-layer-freq": decoder.layer_frequency(has_experts),
        "--moe-shared-expert-intermediate-size": config["n_shared_experts"]
        * config["moe_intermediate_size"],
        "--moe-router-topk-scaling-factor": config.get("routed_scaling_factor", 1.0),
        "--moe-router-load-balancing-type": balancing,
        "--moe-aux-loss-coeff": config.get("aux_loss_alpha", 0.0),
        "--moe-router-dtype": "fp32",
    }


def sigmoid_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json` for V3's router, and the number of layers of further tokens."""
    expect(settings, family, SIGMOID_ROUTER)
    return {
        **groups_config(settings, family, best=2),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        # Megatron does not divide by one score.
        "norm_topk_prob": settings["--moe-router-topk"] > 1,
        "num_nextn_predict_layers": settings.get("--mtp-num-layers") or 0,
    }


def sigmoid_settings(config: Config, family: str) -> dict[str, Any]:
    """Return Megatron's settings for V3's router, and the number of layers of further tokens."""
    is_normalized = config["num_experts_per_tok"] > 1
    router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    expect_config(config, family, {**router, "norm_topk_prob": is_normalized})
    return {
        **groups_settings(config, family, best=2),
        **SIGMOID_ROUTER,
        "--moe-router-pre-softmax": False,
        "--mtp-num-layers": config.get("num_nextn_predict_layers") or None,
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


class SharedExperts(decoder.Decoder):
    """Layers whose experts have shared ones beside them."""

    @override
    def experts(self, settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
        yield from super().experts(settings, ours, theirs)
        size = settings["--moe-shared-expert-intermediate-size"]
        shared = f"{ours}.shared_experts", f"{theirs}.shared_experts"
        yield from decoder.mlp(settings, *shared, size)


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
