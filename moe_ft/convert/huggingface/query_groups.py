"""Families with query groups: Mixtral, Qwen-MoE, OLMoE, MiniMax-M2. decoder.py has what they share."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, override

from moe_ft.convert.huggingface import decoder
from moe_ft.convert.huggingface.config_values import COUNTED, LONGEST, STACKED, ValueRule
from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
    expect,
    expect_config,
    same,
    with_values,
)

# Megatron has norms over all queries and keys only with layers from elsewhere: these are ours.
SPEC = ["megatron.fault_tolerance.program.projection_norm", "layer_spec"]
_SIGMOID = {"--moe-router-score-function": "sigmoid", "--moe-router-enable-expert-bias": True}
_OF_MINIMAX = {
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
}
_SHARED_SIZE = "--moe-shared-expert-intermediate-size"
_SHARED_GATE = "--moe-shared-expert-gate"


class Mixtral(decoder.ExpertsEverywhere):
    """Weights of the chosen experts that have the sum 1."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"
    moe = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")
    features = MappingProxyType({"--moe-router-pre-softmax": False})
    num_experts_key = "num_local_experts"
    written = MappingProxyType({"sliding_window": None})


class Qwen3Moe(decoder.ExpertsEverywhere):
    """Layers with and without experts, and norms of each query and key."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    has_shared_expert = False

    @override
    def check(self, settings: Settings) -> None:
        features = {**decoder.PLAIN, "--qk-layernorm": True}
        if self.has_shared_expert:
            features = decoder.without(decoder.PLAIN, "--add-qkv-bias", _SHARED_SIZE)
            features[_SHARED_GATE] = True
            decoder.check_number(settings, self.model_type, _SHARED_SIZE)
        decoder.check_decoder(settings, self.model_type, features)

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        dense = [layer for layer, has in enumerate(decoder.moe_layers(settings)) if not has]
        own: dict[str, Any] = {"attention_bias": False}
        if self.has_shared_expert:
            own = {
                "qkv_bias": bool(settings.get("--add-qkv-bias")),
                "shared_expert_intermediate_size": settings[_SHARED_SIZE],
            }
        return {
            **decoder.decoder_config(settings),
            **own,
            "intermediate_size": settings["--ffn-hidden-size"],
            "moe_intermediate_size": decoder.expert_size(settings),
            "num_experts": settings["--num-experts"],
            "norm_topk_prob": not settings.get("--moe-router-pre-softmax"),
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
            "use_sliding_window": False,
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        expect_config(config, self.model_type, {"use_sliding_window": False})
        plain = decoder.without(decoder.PLAIN_CONFIG, "sliding_window")  # not used
        is_normalized = config.get("norm_topk_prob", False)
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        layers = range(config["num_hidden_layers"])
        has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in layers]
        own: dict[str, Any] = {"--qk-layernorm": True}
        if self.has_shared_expert:
            own = {
                "--add-qkv-bias": config.get("qkv_bias", True),
                _SHARED_SIZE: config["shared_expert_intermediate_size"],
                _SHARED_GATE: True,
            }
        return {
            **self.common_settings(config, is_normalized=is_normalized, expected=plain),
            **own,
            "--moe-ffn-hidden-size": config["moe_intermediate_size"],
            "--moe-layer-freq": decoder.layer_frequency(has_experts),
        }

    @override
    def attention_options(self, settings: Settings) -> Mapping[str, Any]:
        if self.has_shared_expert:
            return {"has_bias": bool(settings.get("--add-qkv-bias"))}
        return {"norms": (decoder.head_size(settings),) * 2}

    @override
    def experts(self, settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
        yield from super().experts(settings, ours, theirs)
        if self.has_shared_expert:
            ours, theirs = f"{ours}.shared_experts", f"{theirs}.shared_expert"
            yield from decoder.mlp(settings, ours, theirs, settings[_SHARED_SIZE])
            shape = (1, settings["--hidden-size"])
            yield same(f"{ours}.gate_weight", f"{theirs}_gate.weight", shape)


class Qwen3VlMoe(Qwen3Moe):
    """Text part of Qwen3-VL: without pictures its rotation is the plain one, as positions are the same."""

    architecture = "Qwen3VLMoeForConditionalGeneration"
    model_type = "qwen3_vl_moe"
    hub = "model.language_model."
    text_key = "text_config"
    left_out = ("model.visual.",)
    is_written = False
    rules = STACKED

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        weights = {"norm_topk_prob": True}  # whatever a configuration without the key has elsewhere
        expect_config(config, self.model_type, weights)
        return super().settings(with_values(config, weights))

    @override
    def experts(self, settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
        yield from decoder.router(settings, ours, theirs)
        yield from decoder.stacked_experts(settings, ours, f"{theirs}.experts", is_transposed=None)


class Qwen2Moe(Qwen3Moe):
    """A shared expert with a gate, and biases of queries, keys and values instead of the norms."""

    architecture = "Qwen2MoeForCausalLM"
    model_type = "qwen2_moe"
    has_shared_expert = True


class Olmoe(decoder.ExpertsEverywhere):
    """Norms over all queries and over all keys of a token."""

    architecture = "OlmoeForCausalLM"
    model_type = "olmoe"
    features = MappingProxyType({"--qk-layernorm": True, "--spec": SPEC})

    @override
    def check(self, settings: Settings) -> None:
        super().check(settings)
        size = settings["--hidden-size"] // settings["--num-attention-heads"]
        given = {"--kv-channels": decoder.head_size(settings)}
        expect(given, self.model_type, {"--kv-channels": size})

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        return {
            **super().config(settings),
            "norm_topk_prob": not settings.get("--moe-router-pre-softmax"),
            "attention_bias": False,
            "clip_qkv": None,
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        size = config["hidden_size"] // config["num_attention_heads"]
        expect_config(config, self.model_type, {"head_dim": (size, None)})
        return {
            **self.common_settings(config, is_normalized=config.get("norm_topk_prob", False)),
            **self.features,
        }

    @override
    def attention_options(self, settings: Settings) -> Mapping[str, Any]:
        return {"norms": _norms_of_projections(settings)}


class MiniMaxM2(decoder.ExpertsEverywhere):
    """Sigmoid scores with a bias for the choice, norms as OLMoE's, and a rotation of a part of each head."""

    architecture = "MiniMaxM2ForCausalLM"
    model_type = "minimax_m2"
    moe = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")
    features = MappingProxyType({**_SIGMOID, "--qk-layernorm": True, "--spec": SPEC})
    optional = ("--rotary-percent",)
    num_experts_key = "num_local_experts"
    rules = MappingProxyType(
        {
            "rotary_dim": ValueRule(least=2, limit=LONGEST, is_optional=True),
            "num_mtp_modules": ValueRule(least=0, limit=COUNTED, is_optional=True),
        }
    )

    @override
    def names_left_out(self, config: Config) -> tuple[str, ...]:
        # Layers of further tokens are not part of the model that transformers has.
        num_layers, num_further = config["num_hidden_layers"], config.get("num_mtp_modules") or 0
        return tuple(f"model.layers.{num_layers + number}." for number in range(num_further))

    @override
    def check(self, settings: Settings) -> None:
        super().check(settings)
        decoder.router_settings(True, settings["--moe-router-topk"])

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        share = settings.get("--rotary-percent")
        return {
            **super().config(settings),
            "rotary_dim": int(decoder.head_size(settings) * (1.0 if share is None else share)),
            **_OF_MINIMAX,
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        expected = {**_OF_MINIMAX, "shared_intermediate_size": (0, None)}
        expect_config(config, self.model_type, expected)
        parameters = config.get("rope_parameters") or {}
        share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if share is None:
            size = config["head_dim"]
            share = (config.get("rotary_dim") or size) / size
        base = decoder.rope_base(config, self.model_type, is_partial=True)
        return {
            **self.common_settings(
                config,
                is_normalized=True,
                expected=decoder.without(decoder.PLAIN_CONFIG, "partial_rotary_factor"),
                rotation={"--rotary-base": base, "--rotary-percent": share},
            ),
            **self.features,
            "--moe-router-dtype": "fp32",
        }

    @override
    def attention_options(self, settings: Settings) -> Mapping[str, Any]:
        return {"norms": _norms_of_projections(settings)}

    @override
    def experts(self, settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
        bias = "e_score_correction_bias"
        return decoder.experts(settings, ours, theirs, self.expert_names, bias=bias)


def _norms_of_projections(settings: Settings) -> tuple[int, int]:
    size, heads = decoder.head_size(settings), int(settings["--num-attention-heads"])
    return heads * size, decoder.query_groups(settings) * size
