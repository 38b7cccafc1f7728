"""Qwen2-MoE and Qwen3-MoE: layers with and without experts.

Qwen2-MoE also has a shared expert with a gate, and biases of queries, keys and values; Qwen3-MoE has norms of
each query and key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moe_ft.convert.huggingface.families import decoder
from moe_ft.convert.huggingface.mapping import Config, Mapped, Settings, expect_config, same

_SHARED_SIZE = "--moe-shared-expert-intermediate-size"
_SHARED_GATE = "--moe-shared-expert-gate"


@dataclass(frozen=True, slots=True)
class QwenMoe:
    """One of the families.

    Attributes:
        has_shared_expert: whether it is Qwen2-MoE.
    """

    architecture: str
    model_type: str
    has_shared_expert: bool

    def check(self, settings: Settings) -> None:
        """Refuse what the family cannot express."""
        features = dict(decoder.PLAIN)
        if self.has_shared_expert:
            features = decoder.without(features, "--add-qkv-bias", _SHARED_SIZE)
            features[_SHARED_GATE] = True
            decoder.check_number(settings, self.model_type, _SHARED_SIZE)
        else:
            features["--qk-layernorm"] = True
        decoder.check_decoder(settings, self.model_type, features)

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return its `config.json`."""
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

    def settings(self, config: Config) -> dict[str, Any]:
        """Return Megatron's settings."""
        expect_config(config, self.model_type, {"use_sliding_window": False})
        plain = decoder.without(decoder.PLAIN_CONFIG, "sliding_window")  # not used
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
        is_normalized = config.get("norm_topk_prob", False)
        return {
            **decoder.decoder_settings(config, self.model_type, plain),
            **decoder.router_settings(is_normalized, config["num_experts_per_tok"]),
            **own,
            "--ffn-hidden-size": config["intermediate_size"],
            "--moe-ffn-hidden-size": config["moe_intermediate_size"],
            # transformers 5 writes Qwen3-MoE's under the other name.
            "--num-experts": config.get("num_experts") or config["num_local_experts"],
            "--moe-layer-freq": decoder.layer_frequency(has_experts),
        }

    def tensors(self, settings: Settings) -> Iterator[Mapped]:
        """Yield its tensors."""
        has_experts = decoder.moe_layers(settings)
        has_bias = self.has_shared_expert and bool(settings.get("--add-qkv-bias"))

        size = decoder.head_size(settings)
        norms = None if self.has_shared_expert else (size, size)

        def layer_tensors(layer: int) -> Iterator[Mapped]:
            yield from decoder.attention(settings, layer, has_bias=has_bias, norms=norms)
            yield decoder.norm_before_mlp(settings, layer, has_experts=has_experts[layer])
            if has_experts[layer]:
                yield from decoder.experts(settings, layer)
                yield from self._shared_expert(settings, layer)
            else:
                ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
                yield from decoder.mlp(settings, ours, theirs, settings["--ffn-hidden-size"])

        return decoder.model_tensors(settings, layer_tensors)

    def _shared_expert(self, settings: Settings, layer: int) -> Iterator[Mapped]:
        if self.has_shared_expert:
            ours, theirs = f"decoder.layers.{layer}.mlp.shared_experts", f"model.layers.{layer}.mlp"
            shape = (1, settings["--hidden-size"])
            yield from decoder.mlp(
                settings, ours, f"{theirs}.shared_expert", settings[_SHARED_SIZE]
            )
            yield same(f"{ours}.gate_weight", f"{theirs}.shared_expert_gate.weight", shape)
