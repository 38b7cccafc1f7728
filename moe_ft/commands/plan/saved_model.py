"""The model whose snapshots hold master weights and moments (``dense``, ``partial``), from the flags."""

import argparse
from dataclasses import replace

from moe_ft.commands.plan.flags import (
    check_divides,
    check_least,
    read_byte_model,
    read_layout,
    read_shape,
)
from moe_ft.errors import ConfigError
from moe_ft.planning.model_size import ByteModel
from moe_ft.planning.ownership import SavingLayout
from moe_ft.strategies.partial.size import SavedModel
from moe_ft.strategies.sparse.size import stage_units

_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000  # Megatron's default


def read_model(options: argparse.Namespace, *, least_moe_layers: int = 1) -> SavedModel:
    """Return the model and the ranks that save it.

    Args:
        options: the flags.
        least_moe_layers: 0 for strategies that also save models without experts.

    Raises:
        ConfigError: if a flag cannot be, or two do not fit together.
    """
    shape = read_shape(options, least_moe_layers=least_moe_layers)
    layout = read_layout(options, shape)
    check_least(options, "pp", 1)
    check_divides(options, "pp", "num_layers", shape.num_layers)
    if layout.is_optimizer_distributed and options.sharding is not None:
        raise ConfigError(
            f"--sharding={options.sharding} changes nothing with the distributed optimizer: every rank "
            "saves the slices that it owns. Leave it out, or plan with --no-distributed-optimizer."
        )
    return SavedModel(
        shape=shape,
        stages=tuple(stage_units(shape, options.pp)),
        layout=layout,
        byte_model=_read_bytes(options),
        bucket_parameters=_read_bucket(options, layout),
    )


def _read_bytes(options: argparse.Namespace) -> ByteModel:
    """Return the bytes of what snapshots hold: they take no weights where there are masters."""
    covers = options.partial_covers
    if covers == "weights" and options.master_always_full:
        raise ConfigError(
            "--partial-covers=weights with --master-always-full leaves nothing that a snapshot could leave "
            "out. Drop one of them."
        )
    byte_model = replace(
        read_byte_model(options),
        weights=0,
        master_always_full=options.master_always_full or covers == "optimizer",
        moments_always_full=covers == "weights",
    )
    if byte_model.optimizer == 0:
        raise ConfigError(
            "--master-bytes=0 and --moment-bytes=0: snapshots hold master weights and moments, so at least "
            "one of them must be more than 0. Raise one."
        )
    return byte_model


def _read_bucket(options: argparse.Namespace, layout: SavingLayout) -> int | None:
    """Return the parameters of a bucket, None where buffers are not divided into some."""
    check_least(options, "ddp_bucket_size", 1)
    size: int | None = options.ddp_bucket_size
    if options.overlap_grad_reduce:
        return size or max(_LEAST_BUCKET, _BUCKET_PER_RANK * layout.dp)
    if size is not None:
        raise ConfigError(
            f"--ddp-bucket-size={size} needs --overlap-grad-reduce: without it there are no buckets. Give "
            "both or neither."
        )
    return None


def describe_model(model: SavedModel) -> str:
    """Return what the model is, and who saves what of it."""
    shape, layout = model.shape, model.layout
    experts, owners = ", no experts", ""
    if shape.num_moe_layers:
        experts = (
            f", of which {_count(shape.num_expert_parameters)} in {shape.num_experts} experts of each of "
            f"{shape.num_moe_layers} MoE layers ({_count(shape.expert_parameters)} each)"
        )
        ranks = "rank holds" if layout.num_groups == 1 else "ranks hold"
        owners = f"{layout.num_groups} {ranks} each expert; "
    division = (
        "each rank saves its slices of the distributed optimizer"
        if layout.is_optimizer_distributed
        else f"optimizer on every rank, sharding {layout.sharding}"
    )
    return (
        f"{_count(shape.num_parameters)} parameters{experts}\n"
        f"pp {len(model.stages)}, dp {layout.dp}, ep {layout.ep}: {owners}{division}; "
        f"{model.byte_model.optimizer} bytes of a parameter saved"
    )


def _count(number: int) -> str:
    return f"{number / 1e9:.3f}e9" if number >= 1e9 else f"{number / 1e6:.1f}e6"
