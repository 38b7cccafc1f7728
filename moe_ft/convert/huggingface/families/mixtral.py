"""Mixtral: experts in all layers, and weights of the chosen experts that have the sum 1."""

from collections.abc import Iterator
from typing import Any

from moe_ft.convert.huggingface.families import decoder
from moe_ft.convert.huggingface.mapping import Config, Mapped, Settings

_GATE_UP_DOWN = ("w1", "w3", "w2")


class Mixtral:
    """The family."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"

    def check(self, settings: Settings) -> None:
        """Refuse what the family cannot express."""
        features = {**decoder.PLAIN, "--moe-layer-freq": 1, "--moe-router-pre-softmax": False}
        pattern = decoder.layer_frequency(decoder.moe_layers(settings))
        decoder.check_decoder({**settings, "--moe-layer-freq": pattern}, self.model_type, features)

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return its `config.json`."""
        return {
            **decoder.decoder_config(settings),
            "intermediate_size": decoder.expert_size(settings),
            "num_local_experts": settings["--num-experts"],
            "sliding_window": None,
        }

    def settings(self, config: Config) -> dict[str, Any]:
        """Return Megatron's settings."""
        size = config["intermediate_size"]
        return {
            **decoder.decoder_settings(config, self.model_type),
            **decoder.router_settings(True, config["num_experts_per_tok"]),
            "--ffn-hidden-size": size,
            "--moe-ffn-hidden-size": size,
            "--num-experts": config["num_local_experts"],
            "--moe-layer-freq": 1,
        }

    def tensors(self, settings: Settings) -> Iterator[Mapped]:
        """Yield its tensors."""

        def layer_tensors(layer: int) -> Iterator[Mapped]:
            yield from decoder.attention(settings, layer)
            yield decoder.norm_before_mlp(settings, layer, has_experts=True)
            yield from decoder.experts(settings, layer, "block_sparse_moe", _GATE_UP_DOWN)

        return decoder.model_tensors(settings, layer_tensors)
