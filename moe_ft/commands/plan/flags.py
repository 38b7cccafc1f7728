"""Flags of ``python -m moe_ft plan`` that all strategies share, checked: model, layout, bytes, schedule.

A strategy's own flags are in its own file, beside this one.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_ft.config.fields import parse_size
from moe_ft.errors import ConfigError
from moe_ft.planning.model_size import PRESETS, ByteModel, ModelShape, evenly_spaced_layers
from moe_ft.planning.ownership import SavingLayout, Sharding
from moe_ft.planning.placement import default_replication_factor

_REQUIRED = ("num_layers", "hidden_size", "num_experts")

# Megatron's names. Field of ModelShape: (least value, help).
_SIZES: Mapping[str, tuple[int, str]] = {
    "num_layers": (1, "transformer layers"),
    "hidden_size": (1, "width"),
    "num_experts": (1, "experts of each MoE layer"),
    "ffn_hidden_size": (1, "inner width of a dense FFN (default 4 x hidden size)"),
    "moe_ffn_hidden_size": (1, "inner width of an expert (default: that of a dense FFN)"),
    "num_attention_heads": (1, "needed with --num-query-groups or --kv-channels"),
    "kv_channels": (1, "width of a head (default hidden size / heads)"),
    "num_query_groups": (1, "heads of keys and values (default: as many as queries)"),
    "vocab_size": (0, "as padded (default 50257)"),
}
_OTHER_SIZES: Mapping[str, tuple[str, int, str]] = {
    "moe_shared_expert_intermediate_size": (
        "shared_expert_hidden_size",
        0,
        "inner width of the experts that see every token (default 0: none)",
    ),
    "max_position_embeddings": (
        "num_positions",
        0,
        "learned position embeddings; 0 with rotary ones (default 2048)",
    ),
}
_SWITCHES: Mapping[str, tuple[str, bool, str]] = {
    "untie_embeddings_and_output_weights": ("has_output_layer", True, "own output weights"),
    "swiglu": ("is_gated", True, "FFNs have a gate"),
    "disable_bias_linear": ("has_bias", False, "linear layers have no biases"),
    "rmsnorm": ("has_norm_bias", False, "norms have no biases"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all strategies share."""
    _add_model_flags(parser.add_argument_group("model"))
    _add_layout_flags(parser.add_argument_group("layout and bytes"))
    _add_schedule_flags(parser.add_argument_group("schedule and machine"))
    _add_memory_flags(parser.add_argument_group("host memory"))


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", choices=tuple(PRESETS), help="of the papers; the flags below change its sizes"
    )
    for name, (_, text) in _SIZES.items():
        group.add_argument(_flag(name), type=int, metavar="N", help=text)
    for name, (_, _, text) in _OTHER_SIZES.items():
        group.add_argument(_flag(name), type=int, metavar="N", help=text)
    group.add_argument(
        "--num-moe-layers", type=int, metavar="N", help="of the layers (default all), evenly spaced"
    )
    for name, (_, _, text) in _SWITCHES.items():
        group.add_argument(_flag(name), action="store_true", help=text)


def _add_layout_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pp", type=int, default=1, help="pipeline stages (default 1)")
    group.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    group.add_argument("--ep", type=int, default=1, help="expert-parallel ranks (default 1)")
    group.add_argument(
        "--sharding",
        choices=tuple(Sharding),
        help="who saves what several ranks hold alike (default equal)",
    )
    group.add_argument(
        "--no-distributed-optimizer",
        action="store_true",
        help="every rank holds the optimizer's whole state",
    )
    for name, value, text in (
        ("weight", ByteModel().weights, "weights of the forward pass"),
        ("master", ByteModel().master, "master weights"),
        ("moment", ByteModel().moments, "optimizer moments"),
    ):
        group.add_argument(
            f"--{name}-bytes",
            type=int,
            metavar="BYTES",
            help=f"of a parameter's {text} (default {value})",
        )


def _add_schedule_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--interval", type=int, default=1, help="iterations between snapshots (default 1)"
    )
    group.add_argument(
        "--persist-interval",
        type=int,
        default=1,
        help="snapshots between those that are persisted (default 1)",
    )
    group.add_argument("--train-iters", type=int, metavar="N", help="of the run, for the PLT")
    group.add_argument("--iteration-s", type=float, metavar="S", help="seconds of an iteration")
    group.add_argument(
        "--update-s",
        type=float,
        default=0.0,
        metavar="S",
        help="of it the optimizer step, which hides no snapshot (default 0)",
    )
    group.add_argument(
        "--bandwidth", metavar="BYTES", help="device to host, per second and rank, such as 25GB"
    )
    group.add_argument(
        "--storage-bandwidth", metavar="BYTES", help="host to storage, per second and rank"
    )


def _add_memory_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="(default 8)")
    group.add_argument(
        "--replication-factor",
        default="auto",
        metavar="N|auto",
        help="copies in other nodes' memory; auto: 0 on one node, 1 on two, else 2",
    )
    group.add_argument("--storage", action="store_true", help="checkpoints also go to storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When checkpoints are taken, and the machine; what was not given is None."""

    interval: int
    persist_interval: int
    train_iters: int | None
    iteration_s: float | None
    hidden_s: float | None
    bandwidth: float | None
    storage_bandwidth: float | None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_least(options: argparse.Namespace, name: str, least: int) -> None:
    """Raise ConfigError if a flag that was given is less than it may be."""
    value = getattr(options, name)
    if value is not None and value < least:
        raise ConfigError(
            f"{_flag(name)}={value} must be a whole number, at least {least}. Give a larger one."
        )


def check_divides(options: argparse.Namespace, part: str, whole: str, value: int) -> None:
    """Raise ConfigError unless one flag divides another, whose value it is."""
    if value % getattr(options, part):
        raise ConfigError(
            f"{_flag(part)}={getattr(options, part)} must divide {_flag(whole)}={value}. "
            "Change one of them."
        )


def read_shape(options: argparse.Namespace, *, least_moe_layers: int = 1) -> ModelShape:
    """Return the preset with what flags change, or the model that flags describe.

    Args:
        options: the flags.
        least_moe_layers: 0 for strategies that also save models without experts.

    Raises:
        ConfigError: if a flag cannot be, or two do not fit together.
    """
    sizes = {name: (name, least) for name, (least, _) in _SIZES.items()}
    sizes |= {name: (field, least) for name, (field, least, _) in _OTHER_SIZES.items()}
    given: dict[str, Any] = {}
    for name, (field, least) in sizes.items():
        check_least(options, name, least)
        if getattr(options, name) is not None:
            given[field] = getattr(options, name)
    for name, (field, value, _) in _SWITCHES.items():
        if getattr(options, name):
            given[field] = value
    missing = [_flag(name) for name in _REQUIRED if name not in given]
    if options.model is None and missing:
        raise ConfigError(
            f"{', '.join(missing)} not given: without --model the size of the model must be. Give "
            f"{'it' if len(missing) == 1 else 'them'}, or --model {'|'.join(PRESETS)}."
        )
    base = PRESETS[options.model] if options.model else _plain_shape(given)
    num_layers = given.get("num_layers", base.num_layers)
    preset = base if options.model else None
    moe_layers = _moe_layers(options, preset, num_layers, least_moe_layers)
    heads = given.get("num_attention_heads", base.num_attention_heads)
    _check_heads(
        heads,
        given.get("hidden_size", base.hidden_size),
        given.get("kv_channels", base.kv_channels),
        given.get("num_query_groups", base.num_query_groups),
    )
    return replace(base, moe_layers=moe_layers, **given)


def _plain_shape(given: Mapping[str, Any]) -> ModelShape:
    """Return a model with nothing but the sizes that must be given."""
    return ModelShape(moe_layers=(), **{name: given[name] for name in _REQUIRED})


def _moe_layers(
    options: argparse.Namespace, preset: ModelShape | None, num_layers: int, least: int
) -> tuple[int, ...]:
    num_moe_layers = options.num_moe_layers
    if num_moe_layers is None:
        if preset is not None and options.num_layers is None:
            return preset.moe_layers
        num_moe_layers = num_layers
        if preset is not None:
            num_moe_layers = max(1, num_layers * preset.num_moe_layers // preset.num_layers)
    if not least <= num_moe_layers <= num_layers:
        remedy = "Raise it, or plan a model without experts with --strategy sparse."
        raise ConfigError(
            f"--num-moe-layers={num_moe_layers} must be between {least} and "
            f"--num-layers={num_layers}. {remedy if num_moe_layers < least else 'Lower it.'}"
        )
    return evenly_spaced_layers(num_layers, num_moe_layers)


def _check_heads(heads: int, hidden_size: int, kv_channels: int, query_groups: int) -> None:
    if not kv_channels and hidden_size % heads:
        raise ConfigError(
            f"--num-attention-heads={heads} must divide --hidden-size={hidden_size} where "
            "--kv-channels is not given. Change one of them, or give it."
        )
    if query_groups and heads % query_groups:
        raise ConfigError(
            f"--num-query-groups={query_groups} must divide --num-attention-heads={heads}. "
            "Change one of them."
        )


def read_layout(options: argparse.Namespace, shape: ModelShape) -> SavingLayout:
    """Return the ranks and who of them saves what.

    Raises:
        ConfigError: if a flag cannot be, or two do not fit together.
    """
    for name in ("dp", "ep"):
        check_least(options, name, 1)
    check_divides(options, "ep", "dp", options.dp)
    check_divides(options, "ep", "num_experts", shape.num_experts)
    return SavingLayout(
        dp=options.dp,
        ep=options.ep,
        sharding=Sharding(options.sharding or Sharding.EQUAL),
        is_optimizer_distributed=not options.no_distributed_optimizer,
    )


def read_byte_model(options: argparse.Namespace) -> ByteModel:
    """Return the bytes per parameter; a strategy says what experts leave out.

    Raises:
        ConfigError: if a flag cannot be, or two do not fit together.
    """
    for name in ("weight_bytes", "master_bytes", "moment_bytes"):
        check_least(options, name, 0)
    given = {
        "weights": options.weight_bytes,
        "master": options.master_bytes,
        "moments": options.moment_bytes,
    }
    model = ByteModel(**{name: size for name, size in given.items() if size is not None})
    if model.total == 0:
        raise ConfigError(
            "--weight-bytes=0, --master-bytes=0 and --moment-bytes=0: at least one of them must be "
            "more than 0. Raise one."
        )
    return model


def refuse_foreign(
    options: argparse.Namespace, strategy: str, foreign: Sequence[tuple[str, object, str]]
) -> None:
    """Raise ConfigError if a flag was given that another strategy needs.

    Args:
        options: the flags.
        strategy: that is planned.
        foreign: name of each such flag, the value it has if it was left out, the reason.
    """
    for name, default, reason in foreign:
        value = getattr(options, name)
        if value != default:
            given = _flag(name) if value is True else f"{_flag(name)}={value}"
            raise ConfigError(
                f"{given} does not go with --strategy={strategy}: {reason}. Leave it out."
            )


def read_replication(options: argparse.Namespace) -> int:
    """Return how many peers keep each rank's state.

    Raises:
        ConfigError: if it is no number, or there are not so many other nodes.
    """
    for name in ("pp", "ranks_per_node"):
        check_least(options, name, 1)
    text = options.replication_factor
    num_nodes = math.ceil(options.dp * options.pp / options.ranks_per_node)
    if text == "auto":
        return default_replication_factor(num_nodes)
    if not text.isdecimal():
        raise ConfigError(
            f"--replication-factor={text} must be a whole number, at least 0, or auto. Give one of them."
        )
    if int(text) >= num_nodes:
        raise ConfigError(
            f"--replication-factor={text} must be less than the {num_nodes} nodes that "
            f"--dp={options.dp} x --pp={options.pp} ranks are on with "
            f"--ranks-per-node={options.ranks_per_node}: replicas go "
            "to other nodes. Lower one of the first and the last."
        )
    return int(text)


def read_schedule(options: argparse.Namespace) -> Schedule:
    """Return when checkpoints are taken, and the bandwidths.

    Raises:
        ConfigError: if a flag cannot be, or two do not fit together.
    """
    for name in ("interval", "persist_interval", "train_iters"):
        check_least(options, name, 1)
    iteration_s, update_s = options.iteration_s, options.update_s
    if iteration_s is not None and not 0 < iteration_s < math.inf:
        raise ConfigError(
            f"--iteration-s={iteration_s} must be more than 0 seconds. Give what training measures."
        )
    if not 0 <= update_s < (iteration_s or math.inf):
        raise ConfigError(
            f"--update-s={update_s} must be at least 0 and less than --iteration-s={iteration_s}, of "
            "which it is a part. Lower it."
        )
    bandwidth = read_bandwidth(options, "bandwidth")
    storage_bandwidth = read_bandwidth(options, "storage_bandwidth")
    if iteration_s is None and (bandwidth or storage_bandwidth):
        name = "bandwidth" if bandwidth else "storage_bandwidth"
        raise ConfigError(
            f"{_flag(name)}={getattr(options, name)} needs --iteration-s: what a copy takes is "
            f"compared with an iteration. Give it, or leave {_flag(name)} out."
        )
    return Schedule(
        interval=options.interval,
        persist_interval=options.persist_interval,
        train_iters=options.train_iters,
        iteration_s=iteration_s,
        hidden_s=None if iteration_s is None else iteration_s - update_s,
        bandwidth=bandwidth,
        storage_bandwidth=storage_bandwidth,
    )


def read_bandwidth(options: argparse.Namespace, name: str) -> float | None:
    """Return the bytes per second that a flag gives, None if it was left out.

    Raises:
        ConfigError: if it is no positive number of bytes.
    """
    text = getattr(options, name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(parse_size(name, text))
        except ConfigError:
            value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(
            f"{_flag(name)}={text} must be bytes per second, more than 0. Write it like 25GB or 25e9."
        )
    return value
