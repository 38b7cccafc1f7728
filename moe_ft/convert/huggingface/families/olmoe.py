"""OLMoE: experts in all layers, and norms over all queries and over all keys of a token.

Megatron has such norms only with layers from elsewhere: `--spec` names ours.
"""

from collections.abc import Iterator
from typing import Any

from moe_ft.convert.huggingface.families import decoder
from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
    expect,
    expect_config,
)

SPEC = ["megatron.fault_tolerance.program.projection_norm", "layer_spec"]


class Olmoe:
    """The family."""

    architecture = "OlmoeForCausalLM"
    model_type = "olmoe"

    def check(self, settings: Settings) -> None:
        """Refuse what the family cannot express."""
        features = {**decoder.PLAIN, "--qk-layernorm": True, "--spec": SPEC, "--moe-layer-freq": 1}
        pattern = decoder.layer_frequency(decoder.moe_layers(settings))
        decoder.check_decoder({**settings, "--moe-layer-freq": pattern}, self.model_type, features)
        heads, hidden = settings["--num-attention-heads"], settings["--hidden-size"]
        size = {"--kv-channels": decoder.head_size(settings)}
        expect(size, self.model_type, {"--kv-channels": hidden // heads})

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return its `config.json`."""
        return {
            **decoder.decoder_config(settings),
            "intermediate_size": decoder.expert_size(settings),
            "num_experts": settings["--num-experts"],
            "norm_topk_prob": not settings.get("--moe-router-pre-softmax"),
            "attention_bias": False,
            "clip_qkv": None,
        }

    def settings(self, config: Config) -> dict[str, Any]:
        """Return Megatron's settings."""
        size = config["hidden_size"] // config["num_attention_heads"]
        expect_config(config, self.model_type, {"head_dim": (size, None)})
        is_normalized = config.get("norm_topk_prob", False)
        return {
            **decoder.decoder_settings(config, self.model_type),
            **decoder.router_settings(is_normalized, config["num_experts_per_tok"]),
            "--qk-layernorm": True,
            "--spec": SPEC,
            "--ffn-hidden-size": config["intermediate_size"],
            "--moe-ffn-hidden-size": config["intermediate_size"],
            # transformers gives it either name.
            "--num-experts": config.get("num_experts") or config["num_local_experts"],
            "--moe-layer-freq": 1,
        }

    def tensors(self, settings: Settings) -> Iterator[Mapped]:
        """Yield its tensors."""
        size = decoder.head_size(settings)
        heads = (int(settings["--num-attention-heads"]), decoder.query_groups(settings))

        def layer_tensors(layer: int) -> Iterator[Mapped]:
            norms = (heads[0] * size, heads[1] * size)
            yield from decoder.attention(settings, layer, norms=norms)
            yield decoder.norm_before_mlp(settings, layer, has_experts=True)
            yield from decoder.experts(settings, layer)

        return decoder.model_tensors(settings, layer_tensors)
