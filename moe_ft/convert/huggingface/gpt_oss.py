"""gpt-oss: biases everywhere, a sink in each head of attention, windows in some layers, a clamped activation.

Attention with a sink is Megatron's `--softmax-type learnable`, whose offsets are the sinks. The activation is
--quick-geglu with --glu-linear-offset and --activation-func-clamp-value; the hub has its factor 1.702 as a
number, and Megatron has no other. Megatron's fused form limits values before it adds the bias (0.19.2), but
for --moe-grouped-gemm of Transformer Engine, which has added it: else --no-bias-gelu-fusion is needed. The
experts of a layer are two tensors on the hub, with biases, where rows of gate and up take turns. Published
weights of experts are in MXFP4, which quantized.py reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, override

import torch

from moe_ft.convert.huggingface import decoder
from moe_ft.convert.huggingface.config_values import STACKED, ValueRule
from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
    expect_config,
    same,
)
from moe_ft.errors import ConfigError

_WINDOW, _WHOLE = "sliding_attention", "full_attention"
_ALPHA = 1.702
_FUSION = "--bias-gelu-fusion"
# Megatron's settings of YaRN by the keys of `rope_scaling`, and what transformers takes without a key.
_YARN: Mapping[str, tuple[str, Any]] = {
    "factor": ("--rotary-scaling-factor", None),
    "original_max_position_embeddings": ("--yarn-original-max-position-embeddings", None),
    "beta_fast": ("--yarn-beta-fast", 32.0),
    "beta_slow": ("--yarn-beta-slow", 1.0),
    "truncate": ("--yarn-correction-range-round-to-int", True),
}
_ORIGINAL_LENGTH = 4096  # Megatron's, without the flag
# Settings of the layers that no key of `config.json` changes.
_LAYERS: Mapping[str, Any] = {
    "--add-bias-linear": True,
    "--swiglu": False,
    "--quick-geglu": True,
    "--glu-linear-offset": 1.0,
    _FUSION: False,
    "--softmax-type": "learnable",
    "--position-embedding-type": "yarn",
    "--mscale": 1.0,
    "--mscale-all-dim": 0.0,
}


class GptOss(decoder.ExpertsEverywhere):
    """Experts in all layers, chosen by scores with a bias; their weights are the softmax over the chosen."""

    architecture = "GptOssForCausalLM"
    model_type = "gpt_oss"
    features = MappingProxyType(
        {
            **_LAYERS,
            "--add-qkv-bias": (False, True),  # there is one already
            "--moe-router-pre-softmax": False,
        }
    )
    optional = ("--window-size", "--activation-func-clamp-value")
    rules = MappingProxyType(
        {
            **STACKED,
            "sliding_window": ValueRule(least=1),
            "swiglu_limit": ValueRule(types=(int, float)),
            "layer_types": ValueRule(types=(list,), is_optional=True),
        }
    )

    @override
    def check(self, settings: Settings) -> None:
        is_added = (
            settings.get("--moe-grouped-gemm") and settings.get("--transformer-impl") != "local"
        )
        super().check({**settings, _FUSION: False} if is_added else settings)
        decoder.check_number(settings, self.model_type, "--activation-func-clamp-value")
        decoder.router_settings(True, settings["--moe-router-topk"])
        window = list(settings.get("--window-size") or ())
        if len(window) != 2 or window[0] < 0 or window[1] != 0:
            raise ConfigError(
                f"--window-size={settings.get('--window-size')} must be a number of earlier tokens and 0, as "
                f"127,0, for a model of {self.model_type}. Convert to torch_dist or safetensors."
            )

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        yarn = {
            key: default if settings.get(flag) is None else settings[flag]
            for key, (flag, default) in _YARN.items()
        }
        yarn["original_max_position_embeddings"] = (
            yarn["original_max_position_embeddings"] or _ORIGINAL_LENGTH
        )
        return {
            **decoder.decoder_config(settings),
            "attention_bias": True,
            "intermediate_size": decoder.expert_size(settings),
            "num_local_experts": settings["--num-experts"],
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": settings["--activation-func-clamp-value"],
            "sliding_window": settings["--window-size"][0] + 1,
            "layer_types": [_WINDOW if each else _WHOLE for each in _windows(settings)],
            "rope_scaling": {"rope_type": "yarn", **yarn},
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        plain = decoder.without(decoder.PLAIN_CONFIG, "sliding_window")
        expected = {**plain, "attention_bias": True, "swiglu_alpha": _ALPHA}
        rotation = _rotation(config, self.model_type)
        return {
            **self.common_settings(
                config, is_normalized=True, expected=expected, rotation=rotation
            ),
            **_LAYERS,
            "--activation-func-clamp-value": config.get("swiglu_limit", 7.0),
            "--window-size": (config["sliding_window"] - 1, 0),
            "--window-attn-skip-freq": _window_frequency(config, self.model_type),
        }

    @override
    def attention(
        self, settings: Settings, ours: str, theirs: str, number: int | None
    ) -> Iterator[Mapped]:
        yield from decoder.attention(settings, ours, theirs, has_bias=True)
        ours, theirs = f"{ours}.self_attention", f"{theirs}.self_attn"
        heads, hidden = settings["--num-attention-heads"], settings["--hidden-size"]
        yield same(f"{ours}.linear_proj.bias", f"{theirs}.o_proj.bias", (hidden,))
        yield same(f"{ours}.core_attention.softmax_offset", f"{theirs}.sinks", (heads,))

    @override
    def experts(self, settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
        num, size = int(settings["--num-experts"]), decoder.expert_size(settings)
        yield from decoder.router(settings, ours, theirs, "router")
        yield same(f"{ours}.router.bias", f"{theirs}.router.bias", (num,))
        theirs = f"{theirs}.experts"
        yield from decoder.stacked_experts(
            settings, ours, theirs, is_transposed=True, is_interleaved=True
        )
        for expert in range(num):
            name = f"{ours}.experts.experts.{expert}"
            yield Mapped(
                tensor=f"{name}.linear_fc1.bias",
                shape=(2 * size,),
                names=(f"{theirs}.gate_up_proj_bias",),
                split=_taking_turns,
                join=_gate_before_up,
                stack=(expert, num),
            )
            bias = f"{theirs}.down_proj_bias"
            shape = (settings["--hidden-size"],)
            yield same(f"{name}.linear_fc2.bias", bias, shape, stack=(expert, num))


def _taking_turns(whole: torch.Tensor) -> Sequence[torch.Tensor]:
    return (torch.stack(whole.chunk(2), dim=1).flatten(),)


def _gate_before_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat((parts[0][0::2], parts[0][1::2]))


def _windows(settings: Settings) -> list[bool]:
    """Return for each layer whether its attention has the window."""
    frequency = settings.get("--window-attn-skip-freq")
    layers = range(1, settings["--num-layers"] + 1)
    if isinstance(frequency, list | tuple):
        return [bool(each) for each in frequency]
    return [not frequency or layer % frequency != 0 for layer in layers]


def _window_frequency(config: Config, family: str) -> int | list[int]:
    """Return --window-attn-skip-freq."""
    num_layers = config["num_hidden_layers"]
    alternate = [_WHOLE if layer % 2 else _WINDOW for layer in range(num_layers)]
    types = config.get("layer_types") or alternate
    known = {each: (_WINDOW, _WHOLE) for each in map(str, types)}
    expect_config({each: each for each in known}, family, known)
    if len(types) != num_layers:
        raise ConfigError(
            f"config.json has {len(types)} layer_types and num_hidden_layers={num_layers}, and there must be "
            "as many. Compare it with the published file."
        )
    return 2 if types == alternate else [int(each == _WINDOW) for each in types]


def _rotation(config: Config, family: str) -> dict[str, Any]:
    """Return the settings of YaRN."""
    old = {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta")}
    rope = config.get("rope_parameters") or old
    kind = {"rope_type": rope.get("rope_type", rope.get("type"))}
    absent = dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"))
    expect_config(kind, family, {"rope_type": "yarn"})
    expect_config(rope, family, {**absent, "partial_rotary_factor": (1.0, None)})
    length = {"original_max_position_embeddings": config["max_position_embeddings"]}
    given = {**length, **{key: each for key, each in rope.items() if each is not None}}
    return {
        "--rotary-base": decoder.whole_base(rope.get("rope_theta")),
        **{
            flag: given[key] if default is None else given.get(key, default)
            for key, (flag, default) in _YARN.items()
        },
    }
