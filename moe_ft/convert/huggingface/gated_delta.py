"""Text part of Qwen3.5: layers with a gated delta net, and some with attention whose output has a gate.

Megatron has them as `--experimental-attention-variant gated_delta_net` and `--attention-output-gate`. All its
norms have weights around 0 (`--apply-layernorm-1p`), also the one of a delta net's output, whose weights are
around 1 on the hub. It saves the projection and the convolution of a delta net in parts, of which several are
one tensor on the hub.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, override

import torch

from moe_ft.convert.huggingface import decoder
from moe_ft.convert.huggingface.glm import rotary_factor
from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
    expect_config,
    same,
)
from moe_ft.errors import ConfigError

_SIZES = {
    "linear_conv_kernel_dim": "--linear-conv-kernel-dim",
    "linear_key_head_dim": "--linear-key-head-dim",
    "linear_value_head_dim": "--linear-value-head-dim",
    "linear_num_key_heads": "--linear-num-key-heads",
    "linear_num_value_heads": "--linear-num-value-heads",
}
_SHARED_SIZE = "--moe-shared-expert-intermediate-size"
_DELTA, _FULL = "linear_attention", "full_attention"


class Qwen35Moe(decoder.Decoder):
    """Experts in all layers, with a shared one that has a gate."""

    architecture = "Qwen3_5MoeForConditionalGeneration"
    model_type = "qwen3_5_moe"
    hub = "model.language_model."
    text_key = "text_config"
    left_out = ("model.visual.", "mtp.")
    is_written = False

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        num_layers, period = config["num_hidden_layers"], config.get("full_attention_interval", 4)
        kinds = config.get("layer_types") or [
            _FULL if layer % period == 0 else _DELTA for layer in range(1, num_layers + 1)
        ]
        if len(kinds) != num_layers or not {_DELTA, _FULL}.issuperset(kinds):
            raise ConfigError(
                f"config.json has layer_types={kinds!r:.100}, and they must be {_DELTA} or {_FULL}, one for "
                f"each of num_hidden_layers={num_layers}. There is no conversion of this model."
            )
        # The weights of the chosen experts have the sum 1; published files have no key that says so.
        expected = {"attn_output_gate": True, "norm_topk_prob": True}
        expect_config(config, self.model_type, expected)
        percent, config = rotary_factor(config, 0.25)
        plain = decoder.without(decoder.PLAIN_CONFIG, "partial_rotary_factor")
        return {
            **decoder.decoder_settings(config, self.model_type, plain),
            **decoder.router_settings(True, config["num_experts_per_tok"]),
            **{flag: config[key] for key, flag in _SIZES.items()},
            "--rotary-percent": percent,
            "--qk-layernorm": True,
            "--attention-output-gate": True,
            "--layernorm-zero-centered-gamma": True,
            "--experimental-attention-variant": "gated_delta_net",
            "--linear-attention-freq": [int(kind == _DELTA) for kind in kinds],
            "--num-experts": decoder.num_experts(config),
            "--ffn-hidden-size": config["moe_intermediate_size"],  # of no layer
            "--moe-ffn-hidden-size": config["moe_intermediate_size"],
            "--moe-layer-freq": 1,
            _SHARED_SIZE: config["shared_expert_intermediate_size"],
            "--moe-shared-expert-gate": True,
        }

    @override
    def attention(
        self, settings: Settings, ours: str, theirs: str, number: int | None
    ) -> Iterator[Mapped]:
        if number is not None and settings["--linear-attention-freq"][number]:
            return _delta_net(settings, ours, theirs)
        norms = (decoder.head_size(settings),) * 2
        return decoder.attention(settings, ours, theirs, has_gate=True, norms=norms)

    @override
    def experts(self, settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
        yield from decoder.router(settings, ours, theirs)
        stacked = decoder.stacked_experts(settings, ours, f"{theirs}.experts", is_transposed=False)
        alone = (
            each
            for number in range(settings["--num-experts"])
            for prefixes in ((f"{ours}.experts.experts.{number}", f"{theirs}.experts.{number}"),)
            for each in decoder.mlp(settings, *prefixes, decoder.expert_size(settings))
        )
        # Published models have stacks, and transformers writes each expert alone.
        yield from (
            replace(each, instead=other) for each, other in zip(stacked, alone, strict=True)
        )
        shared, size = f"{theirs}.shared_expert", settings[_SHARED_SIZE]
        yield from decoder.mlp(settings, f"{ours}.shared_experts", shared, size)
        shape = (1, settings["--hidden-size"])
        yield same(f"{ours}.shared_experts.gate_weight", f"{shared}_gate.weight", shape)


def _delta_net(settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
    """Yield the norm before the delta net of a layer, and its tensors."""
    hidden, kernel = settings["--hidden-size"], settings["--linear-conv-kernel-dim"]
    heads, size = settings["--linear-num-value-heads"], settings["--linear-value-head-dim"]
    keys = settings["--linear-num-key-heads"] * settings["--linear-key-head-dim"]
    values = heads * size
    norm = f"{theirs}.input_layernorm.weight"
    ours, theirs = f"{ours}.self_attention", f"{theirs}.linear_attn"
    yield same(f"{ours}.in_proj.layer_norm_weight", norm, (hidden,))
    parts = {"query": keys, "key": keys, "value": values}
    yield from _parts(f"{ours}.in_proj.weight", f"{theirs}.in_proj_qkv.weight", parts, hidden)
    for part, name, rows in (("z", "z", values), ("beta", "b", heads), ("alpha", "a", heads)):
        name = f"{theirs}.in_proj_{name}.weight"
        yield same(f"{ours}.in_proj.weight.{part}", name, (rows, hidden))
    yield from _parts(f"{ours}.conv1d.weight", f"{theirs}.conv1d.weight", parts, 1, kernel)
    for name in ("dt_bias", "A_log"):
        yield same(f"{ours}.{name}", f"{theirs}.{name}", (heads,))
    yield Mapped(
        tensor=f"{ours}.out_norm.weight",
        names=(f"{theirs}.norm.weight",),
        shape=(size,),
        split=lambda whole: (whole + 1,),
        join=lambda parts: parts[0] - 1,
    )
    yield same(f"{ours}.out_proj.weight", f"{theirs}.out_proj.weight", (hidden, values))


def _parts(tensor: str, name: str, rows: dict[str, int], *rest: int) -> Iterator[Mapped]:
    """Yield the parts of a weight that are rows of one tensor on the hub, one after the other.

    They are only read: what `split` makes of a part has the shape of all, and nothing in it.
    """
    at, total = 0, sum(rows.values())
    for part, length in rows.items():
        yield Mapped(
            tensor=f"{tensor}.{part}",
            names=(name,),
            shape=(length, *rest),
            split=lambda whole: (whole.new_empty((total, *rest)),),
            join=partial(_rows, at, length),
        )
        at += length


def _rows(at: int, length: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0][at : at + length]
