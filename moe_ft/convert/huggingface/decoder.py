"""Decoders with experts, as far as all families are the same: settings, and the tensors of their parts.

Attention is with query groups and rotary embeddings (multi-latent: deepseek.py); norms are RMSNorm; MLPs are
SwiGLU without biases. The files of the families say what differs.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, override

import torch

from moe_ft.convert.huggingface.mapping import (
    Config,
    Family,
    Mapped,
    Settings,
    expect,
    expect_config,
    query_key_value,
    same,
    stacked,
    vocabulary_size,
)
from moe_ft.errors import ConfigError

# Features of Megatron, by flag, with the value that a family has unless it says otherwise.
PLAIN: Mapping[str, Any] = MappingProxyType(
    {
        "--swiglu": True,
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        **dict.fromkeys(("--add-bias-linear", "--add-qkv-bias", "--qk-layernorm"), False),
        **dict.fromkeys(("--multi-latent-attention", "--mtp-num-layers"), None),
        **dict.fromkeys(
            ("--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate"), None
        ),
        **dict.fromkeys(("--moe-router-enable-expert-bias", "--moe-router-num-groups"), None),
        "--moe-router-topk-scaling-factor": (None, 1.0),
        "--moe-router-score-function": ("softmax", None),
        "--rotary-percent": (1.0, None),
        "--softmax-type": ("vanilla", None),
        "--moe-expert-capacity-factor": None,
        **dict.fromkeys(
            (
                *("--rotary-interleaved", "--rotary-seq-len-interpolation-factor"),
                *("--mrope-section", "--use-rope-scaling", "--no-rope-freq", "--window-size"),
                *("--qk-l2-norm", "--use-mup"),
                *("--attention-output-gate", "--experimental-attention-variant", "--spec"),
                *("--linear-attention-freq", "--heterogeneous-layers-config-encoded-json"),
                *("--layernorm-zero-centered-gamma", "--quick-geglu", "--squared-relu"),
                *("--glu-linear-offset", "--activation-func-clamp-value", "--moe-latent-size"),
                *("--moe-apply-probs-on-input", "--moe-mlp-glu-interleave-size"),
                "--moe-shared-expert-glu-interleave-size",
            ),
            None,
        ),
    }
)
_HEAD = "lm_head.weight"
# Balancing that decides which experts a token gets, not only what is trained.
_ROUTING = {"sinkhorn", "quantile_balancing"}
# Keys of `config.json` for which Megatron has one behavior only, with the value that says so.
PLAIN_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "partial_rotary_factor": (1.0, None),
        "clip_qkv": None,
        "quantization_config": None,
    }
)


def without(features: Mapping[str, Any], *flags: str) -> dict[str, Any]:
    """Return features but some, which a family has or writes otherwise."""
    return {flag: value for flag, value in features.items() if flag not in flags}


def query_groups(settings: Settings) -> int:
    """Return the number of query groups."""
    name = (
        "--num-query-groups" if settings.get("--group-query-attention") else "--num-attention-heads"
    )
    return int(settings[name])


def head_size(settings: Settings) -> int:
    """Return the size of a query."""
    size = settings.get("--kv-channels")
    return int(size or settings["--hidden-size"] // settings["--num-attention-heads"])


def expert_size(settings: Settings) -> int:
    """Return the intermediate size of an expert."""
    return int(settings.get("--moe-ffn-hidden-size") or settings["--ffn-hidden-size"])


def num_experts(config: Config) -> int:
    """Return the number of experts, to which transformers gives either name."""
    return int(config.get("num_experts") or config["num_local_experts"])


def moe_layers(settings: Settings) -> list[bool]:
    """Return for each layer whether it has experts."""
    pattern, num_layers = settings.get("--moe-layer-freq") or 1, int(settings["--num-layers"])
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(num_layers)]
    return [bool(each) for each in pattern]


def layer_frequency(has_experts: list[bool]) -> int | list[int]:
    """Return --moe-layer-freq, the inverse of `moe_layers`."""
    return 1 if all(has_experts) else [int(each) for each in has_experts]


def check_decoder(settings: Settings, family: str, features: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a model has these features and experts, chosen by scores alone."""
    check_number(settings, family, "--num-experts")
    expect(settings, family, features)
    balancing = settings.get("--moe-router-load-balancing-type")
    if _ROUTING.intersection(balancing if isinstance(balancing, list) else [balancing]):
        raise ConfigError(
            f"--moe-router-load-balancing-type={balancing} must be another for a model of {family}: it "
            "chooses experts in another way. Convert to torch_dist or safetensors."
        )


def check_number(settings: Settings, family: str, flag: str) -> None:
    """Raise ConfigError unless a setting is a number greater than 0."""
    if not settings.get(flag):
        raise ConfigError(
            f"{flag}={settings.get(flag)} must be a number for a model of {family}. Convert to torch_dist or "
            "safetensors, or name another --family."
        )


def decoder_config(settings: Settings) -> dict[str, Any]:
    """Return the part of `config.json` that families with query groups share."""
    return {
        **shared_config(settings),
        "num_key_value_heads": query_groups(settings),
        "head_dim": head_size(settings),
        "rms_norm_eps": settings["--layernorm-epsilon"],
        "rope_theta": float(settings["--rotary-base"]),
    }


def shared_config(settings: Settings) -> dict[str, Any]:
    """Return the part of `config.json` that all families share."""
    return {
        "vocab_size": vocabulary_size(settings),
        "hidden_size": settings["--hidden-size"],
        "num_hidden_layers": settings["--num-layers"],
        "num_attention_heads": settings["--num-attention-heads"],
        "hidden_act": "silu",
        "max_position_embeddings": settings["--max-position-embeddings"],
        "tie_word_embeddings": not settings["--untie-embeddings-and-output-weights"],
        "attention_dropout": settings.get("--attention-dropout") or 0.0,
        "num_experts_per_tok": settings["--moe-router-topk"],
        "bos_token_id": None,
        "eos_token_id": None,
    }


def decoder_settings(
    config: Config,
    family: str,
    expected: Mapping[str, Any] = PLAIN_CONFIG,
    rotation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the settings that families with query groups share.

    Args:
        rotation: settings of the rotary embedding; None for the plain one.
    """
    expect_config(config, family, expected)
    if rotation is None:
        rotation = {"--rotary-base": rope_base(config, family)}
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return {
        **shared_settings(config, PLAIN),
        "--group-query-attention": groups != heads,
        "--num-query-groups": groups,
        "--kv-channels": config.get("head_dim") or config["hidden_size"] // heads,
        "--max-position-embeddings": config["max_position_embeddings"],
        "--position-embedding-type": "rope",
        "--rotary-percent": 1.0,
        **rotation,
        "--layernorm-epsilon": config["rms_norm_eps"],
        "--moe-router-score-function": "softmax",
    }


def shared_settings(config: Config, features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all families share, with the features that are off."""
    off = {flag: None for flag, value in features.items() if not value or isinstance(value, tuple)}
    return {
        **off,
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--num-attention-heads": config["num_attention_heads"],
        "--normalization": "RMSNorm",
        "--swiglu": True,
        "--add-bias-linear": False,
        "--untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", False),
        "--vocab-size": config["vocab_size"],
        # Without padding, whose logits of 0 Megatron's loss would count.
        "--padded-vocab-size": config["vocab_size"],
        "--moe-router-topk": config["num_experts_per_tok"],
        "--attention-dropout": config.get("attention_dropout", 0.0),
        "--hidden-dropout": 0.0,
    }


def rope_base(config: Config, family: str, *, is_partial: bool = False) -> int:
    """Return --rotary-base, from either place that has it; a rotation of a part is refused or not."""
    parameters = config.get("rope_parameters") or {}
    for scaling in (parameters, config.get("rope_scaling") or {}):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        expect_config({"rope_scaling": kind}, family, {"rope_scaling": "default"})
        if not is_partial:
            expect_config(scaling, family, {"partial_rotary_factor": (1.0, None)})
    return whole_base(parameters.get("rope_theta", config.get("rope_theta")))


def whole_base(base: Any) -> int:
    """Return --rotary-base of a `rope_theta`; raises ConfigError unless it is a whole number."""
    if base is None or int(base) != base:
        raise ConfigError(
            f"config.json has rope_theta={base}, and Megatron's --rotary-base is a whole number. There is no "
            "conversion of this model."
        )
    return int(base)


def router_settings(is_normalized: bool, num_chosen: int) -> dict[str, Any]:
    """Return the settings of a router from `norm_topk_prob`.

    Megatron's softmax is over the chosen experts, whose weights then have the sum 1, or over all experts with
    --moe-router-pre-softmax.
    """
    if is_normalized and num_chosen == 1:
        raise ConfigError(
            "config.json has norm_topk_prob=True and num_experts_per_tok=1: the weight of each expert is 1, "
            "and Megatron has no such router. There is no conversion of this model."
        )
    return {"--moe-router-pre-softmax": not is_normalized}


def attention(
    settings: Settings,
    ours: str,
    theirs: str,
    *,
    has_bias: bool = False,
    has_gate: bool = False,
    norms: tuple[int, int] | None = None,
) -> Iterator[Mapped]:
    """Yield the norm before the attention of a layer, and its tensors.

    Args:
        has_bias: of queries, keys and values.
        has_gate: whether each query has a gate.
        norms: sizes of those of queries and keys.
    """
    heads, groups = int(settings["--num-attention-heads"]), query_groups(settings)
    size, hidden = head_size(settings), int(settings["--hidden-size"])
    norm = f"{theirs}.input_layernorm.weight"
    ours, theirs = f"{ours}.self_attention", f"{theirs}.self_attn"
    yield same(f"{ours}.linear_qkv.layer_norm_weight", norm, (hidden,))
    for kind, columns in (("weight", hidden), ("bias", 0))[: 1 + has_bias]:
        yield query_key_value(
            f"{ours}.linear_qkv.{kind}",
            [f"{theirs}.{each}_proj.{kind}" for each in "qkv"],
            heads=heads,
            groups=groups,
            head_dim=size,
            columns=columns,
            has_gate=has_gate,
        )
    for each, norm_size in zip("qk", norms or (), strict=norms is not None):
        name = f"{theirs}.{each}_norm.weight"
        yield same(f"{ours}.{each}_layernorm.weight", name, (norm_size,))
    yield same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (hidden, heads * size))


_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def mlp(
    settings: Settings,
    ours: str,
    theirs: str,
    size: int,
    names: tuple[str, str, str] = _GATE_UP_DOWN,
) -> Iterator[Mapped]:
    """Yield the tensors of an MLP, which may be an expert; `names` are those of gate, up and down."""
    hidden, (gate, up, down) = int(settings["--hidden-size"]), names
    above = (f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight")
    yield stacked(f"{ours}.linear_fc1.weight", above, (2 * size, hidden))
    yield same(f"{ours}.linear_fc2.weight", f"{theirs}.{down}.weight", (hidden, size))


def router(
    settings: Settings,
    ours: str,
    theirs: str,
    name: str = "gate",
    bias: str = "gate.e_score_correction_bias",
) -> Iterator[Mapped]:
    """Yield the router of a layer, and the bias of its choice; `name` and `bias` are those on the hub."""
    num, hidden = int(settings["--num-experts"]), int(settings["--hidden-size"])
    yield same(f"{ours}.router.weight", f"{theirs}.{name}.weight", (num, hidden))
    if settings.get("--moe-router-enable-expert-bias"):
        yield same(f"{ours}.router.expert_bias", f"{theirs}.{bias}", (num,))


def stacked_experts(
    settings: Settings,
    ours: str,
    theirs: str,
    *,
    is_transposed: bool | None,
    is_interleaved: bool = False,
) -> Iterator[Mapped]:
    """Yield the experts of a layer which are two tensors on the hub: `gate_up_proj` and `down_proj`.

    Args:
        is_transposed: whether the last dimension of a weight there is its output; None if the files decide.
        is_interleaved: whether rows of gate and up take turns there; else gate is above up.
    """
    num, size, hidden = settings["--num-experts"], expert_size(settings), settings["--hidden-size"]
    both, down = (2 * size, hidden), (hidden, size)

    def turned(part: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        is_turned = part.shape != shape if is_transposed is None else is_transposed
        return part.mT if is_turned else part

    def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = turned(parts[0], both)
        return torch.cat((whole[0::2], whole[1::2])) if is_interleaved else whole

    def taking_turns(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = torch.stack(whole.chunk(2), dim=1).flatten(0, 1) if is_interleaved else whole
        return (turned(rows, both),)

    for expert in range(num):
        name = f"{ours}.experts.experts.{expert}"
        yield Mapped(
            tensor=f"{name}.linear_fc1.weight",
            shape=both,
            names=(f"{theirs}.gate_up_proj",),
            split=taking_turns,
            join=together,
            stack=(expert, num),
            is_either_way=is_transposed is None,
        )
        yield Mapped(
            tensor=f"{name}.linear_fc2.weight",
            shape=down,
            names=(f"{theirs}.down_proj",),
            split=lambda whole: (turned(whole, down),),
            join=lambda parts: turned(parts[0], down),
            stack=(expert, num),
            is_either_way=is_transposed is None,
        )


def experts(
    settings: Settings,
    ours: str,
    theirs: str,
    names: tuple[str, str, str] = _GATE_UP_DOWN,
    **of_router: str,
) -> Iterator[Mapped]:
    """Yield the router and the experts of a layer; the arguments are those of `mlp` and `router`."""
    size = expert_size(settings)
    yield from router(settings, ours, theirs, **of_router)
    for expert in range(int(settings["--num-experts"])):
        prefixes = f"{ours}.experts.experts.{expert}", f"{theirs}.experts.{expert}"
        yield from mlp(settings, *prefixes, size, names)


class Decoder(Family):
    """A family of layers with attention, a norm, and a dense MLP or experts; families override parts.

    Attributes:
        hub: beginning of the names of its tensors on the hub, but that of the head.
        moe: name there of what has the experts of a layer.
        expert_names: of gate, up and down of an expert there.
    """

    hub = "model."
    moe = "mlp"
    expert_names = _GATE_UP_DOWN

    @override
    def tensors(self, settings: Settings) -> Iterator[Mapped]:
        shape = (vocabulary_size(settings), int(settings["--hidden-size"]))
        is_tied = not settings["--untie-embeddings-and-output-weights"]
        has_experts = moe_layers(settings)
        num_layers, num_further = settings["--num-layers"], settings.get("--mtp-num-layers") or 0
        # There, layers of further tokens follow the last one, and have copies of embedding and head.
        further = [f"{self.hub}layers.{num_layers + number}" for number in range(num_further)]
        heads = [f"{layer}.shared_head.head.weight" for layer in further]
        embeddings = [f"{layer}.embed_tokens.weight" for layer in further]
        yield same(
            "embedding.word_embeddings.weight",
            f"{self.hub}embed_tokens.weight",
            shape,
            is_vocabulary=True,
            copies=(*embeddings, *heads) if is_tied else tuple(embeddings),
            duplicates=(_HEAD,) if is_tied else (),
        )
        for number in range(num_layers):
            names = f"decoder.layers.{number}", f"{self.hub}layers.{number}"
            yield from self.layer(settings, *names, number, has_experts=has_experts[number])
        yield same("decoder.final_layernorm.weight", f"{self.hub}norm.weight", shape[1:])
        for number, theirs in enumerate(further):
            yield from self.further_layer(settings, f"mtp.layers.{number}", theirs)
        if not is_tied:
            yield same("output_layer.weight", _HEAD, shape, copies=tuple(heads), is_vocabulary=True)

    def layer(
        self, settings: Settings, ours: str, theirs: str, number: int | None, *, has_experts: bool
    ) -> Iterator[Mapped]:
        """Yield the tensors of a layer by its names; its number is None if it predicts a further token."""
        yield from self.attention(settings, ours, theirs, number)
        yield self.norm_before_mlp(settings, ours, theirs, has_experts=has_experts)
        if has_experts:
            yield from self.experts(settings, f"{ours}.mlp", f"{theirs}.{self.moe}")
        else:
            size = settings["--ffn-hidden-size"]
            yield from mlp(settings, f"{ours}.mlp", f"{theirs}.mlp", size)

    def further_layer(self, settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
        """Yield the tensors of a layer that predicts a further token."""
        hidden = settings["--hidden-size"]
        for norm in ("enorm", "hnorm"):
            yield same(f"{ours}.{norm}.weight", f"{theirs}.{norm}.weight", (hidden,))
        yield same(f"{ours}.eh_proj.weight", f"{theirs}.eh_proj.weight", (hidden, 2 * hidden))
        inner = f"{ours}.transformer_layer"
        yield from self.layer(settings, inner, theirs, None, has_experts=True)
        norm = f"{theirs}.shared_head.norm.weight"
        yield same(f"{ours}.final_layernorm.weight", norm, (hidden,))

    def attention(
        self, settings: Settings, ours: str, theirs: str, number: int | None
    ) -> Iterator[Mapped]:
        """Yield the norm before the attention of a layer, and its tensors."""
        return attention(settings, ours, theirs, **self.attention_options(settings))

    def attention_options(self, settings: Settings) -> Mapping[str, Any]:
        """Return the options of `attention`."""
        return {}

    def norm_before_mlp(
        self, settings: Settings, ours: str, theirs: str, *, has_experts: bool
    ) -> Mapped:
        """Return the norm before the MLP of a layer, which has two names in Megatron if it has experts."""
        names = [f"{ours}.pre_mlp_layernorm.weight"] * has_experts
        first, *others = [*names, f"{ours}.mlp.linear_fc1.layer_norm_weight"]
        name = f"{theirs}.post_attention_layernorm.weight"
        return same(first, name, (settings["--hidden-size"],), others=others)

    def experts(self, settings: Settings, ours: str, theirs: str) -> Iterator[Mapped]:
        """Yield the router and the experts of a layer."""
        return experts(settings, ours, theirs, self.expert_names)


class ExpertsEverywhere(Decoder):
    """Families with query groups and experts in all layers, of the size that a dense MLP would have.

    Attributes:
        features: of Megatron that its models have, where these are not PLAIN.
        optional: flags of PLAIN of which they may have any value.
        num_experts_key: in `config.json`.
        written: values there that follow from no setting.
    """

    features: Mapping[str, Any] = MappingProxyType({})
    optional: tuple[str, ...] = ()
    num_experts_key = "num_experts"
    written: Mapping[str, Any] = MappingProxyType({})

    @override
    def check(self, settings: Settings) -> None:
        pattern = layer_frequency(moe_layers(settings))
        features = {**without(PLAIN, *self.optional), **self.features, "--moe-layer-freq": 1}
        check_decoder({**settings, "--moe-layer-freq": pattern}, self.model_type, features)

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        return {
            **decoder_config(settings),
            "intermediate_size": expert_size(settings),
            self.num_experts_key: settings["--num-experts"],
            **self.written,
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        return self.common_settings(config, is_normalized=True)

    def common_settings(
        self,
        config: Config,
        *,
        is_normalized: bool,
        expected: Mapping[str, Any] = PLAIN_CONFIG,
        rotation: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the settings that the families share; the arguments are those of `decoder_settings`."""
        return {
            **decoder_settings(config, self.model_type, expected, rotation),
            **router_settings(is_normalized, config["num_experts_per_tok"]),
            "--ffn-hidden-size": config["intermediate_size"],
            "--moe-ffn-hidden-size": config["intermediate_size"],
            "--num-experts": num_experts(config),
            "--moe-layer-freq": 1,
        }
