"""The parts of a Megatron checkpoint that are no tensors, from the records of a source.

Arguments, iteration, scheduler and optimizer groups are one dictionary for all ranks; random numbers are one
object for each tensor- and pipeline-parallel rank, which a run of other sizes ignores.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from moe_ft.convert.source import Source
from moe_ft.errors import ConfigError
from moe_ft.format.records import IterationRecord, OptimizerRecord
from moe_ft.state.global_places import CONTENT_METADATA
from moe_ft.state.record import from_json, rng_values

_CHECKPOINT_VERSION = 3.0  # the order of rows in linear_qkv, and that arguments are there
_FULLY_RESHARDABLE = "fully_reshardable"


def uses_distributed_optimizer(source: Source) -> bool:
    """Return whether the run had --use-distributed-optimizer."""
    return bool(source.identity.fingerprint.get("--use-distributed-optimizer"))


def common_state(source: Source, *, with_optimizer: bool) -> dict[str, Any]:
    """Return the dictionary that all ranks load.

    Args:
        with_optimizer: whether training continues; without, the checkpoint is a release of weights.

    Raises:
        ConfigError: if ranks have optimizers that Megatron cannot load.
    """
    record = _record(source, 0)
    metadata: dict[str, Any] = dict(CONTENT_METADATA)
    state: dict[str, Any] = {
        "args": _arguments(source, record, with_optimizer=with_optimizer),
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": record.iteration,
        "num_floating_point_operations_so_far": record.num_floating_point_operations,
        "content_metadata": metadata,
    }
    if uses_distributed_optimizer(source):
        metadata["distrib_optim_sharding_type"] = _FULLY_RESHARDABLE
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    if with_optimizer:
        state["optimizer"] = _optimizers(source)
        state["opt_param_scheduler"] = from_json(dict(record.scheduler))
    return state


def rng_states(source: Source) -> Iterator[tuple[tuple[int, int], tuple[int, int], list[Any]]]:
    """Yield place and number of (pipeline, tensor) ranks, and the random numbers of the first rank there."""
    sizes = _sizes(source)
    pp, tp = sizes["pipeline"], sizes["tensor"]
    seen = set()
    for rank in range(len(source.ranks)):
        place = (_pipeline_rank(source, rank, sizes), rank % tp)
        if place not in seen:
            seen.add(place)
            yield place, (pp, tp), [rng_values(_record(source, rank))]


def _record(source: Source, rank: int) -> IterationRecord:
    return source.ranks[rank].index.records[-1]


def _sizes(source: Source) -> dict[str, int]:
    settings = source.identity.fingerprint
    names = ("tensor", "context", "pipeline")
    flags = ("tensor-model", "context", "pipeline-model")
    return {
        name: int(settings.get(f"--{flag}-parallel-size") or 1)
        for name, flag in zip(names, flags, strict=True)
    }


def _pipeline_rank(source: Source, rank: int, sizes: Mapping[str, int]) -> int:
    """Return the stage of a rank in Megatron's order of ranks."""
    inner = sizes["tensor"] * sizes["context"]
    if not source.identity.fingerprint.get("--use-tp-pp-dp-mapping"):
        inner = len(source.ranks) // sizes["pipeline"]
    return rank // inner % sizes["pipeline"]


def _arguments(
    source: Source, record: IterationRecord, *, with_optimizer: bool
) -> argparse.Namespace:
    """Return the settings of the run as Megatron's arguments."""
    settings = {**source.identity.replay_settings, **source.identity.fingerprint}
    named = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in settings.items()
        if flag.startswith("--")
    }
    sizes = _sizes(source)
    world_size = len(source.ranks)
    inner = sizes["tensor"] * sizes["context"] * sizes["pipeline"]
    return argparse.Namespace(
        **{
            **named,
            "world_size": world_size,
            "data_parallel_size": world_size // inner,
            "iteration": record.iteration,
            "consumed_train_samples": record.consumed_train_samples,
            "consumed_valid_samples": record.consumed_valid_samples,
            "skipped_train_samples": record.skipped_train_samples,
            "ckpt_format": "torch_dist",
            "no_save_optim": not with_optimizer,
            "no_save_rng": not with_optimizer,
        }
    )


def _optimizers(source: Source) -> dict[Any, Any]:
    """Return the state of the chained optimizers that is no tensor, as Megatron names it."""
    records = [_record(source, rank).optimizers for rank in range(len(source.ranks))]
    num = len(records[0])
    if other := next((rank for rank, each in enumerate(records) if len(each) != num), None):
        raise ConfigError(
            f"{source.place}: rank 0 has {num} optimizers and rank {other} {len(records[other])}: stages "
            "without experts have one less, and Megatron has one number for all. Give --what weights."
        )
    is_distributed = uses_distributed_optimizer(source)
    found = [
        _distributed([each[position] for each in records])
        if is_distributed
        else _plain(source, records[0][position])
        for position in range(num)
    ]
    return found[0] if num == 1 else dict(enumerate(found))


def _distributed(records: list[OptimizerRecord]) -> dict[str, Any]:
    """Return the state of one distributed optimizer: the groups of all ranks, each once."""
    groups: list[dict[str, Any]] = []
    for record in records:
        groups += [group for group in _groups(record) if group not in groups]
    return {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": _FULLY_RESHARDABLE,
        **_scaler(records[0]),
    }


def _plain(source: Source, record: OptimizerRecord) -> dict[str, Any]:
    """Return the state of one optimizer that all data-parallel ranks hold."""
    inner = {"param_groups": _groups(record), "state": {"common_step": _step(record)}}
    settings = source.identity.fingerprint
    if settings.get("--bf16") or settings.get("--fp16"):
        return {"optimizer": inner, **_scaler(record)}
    return inner


def _scaler(record: OptimizerRecord) -> dict[str, Any]:
    return {} if record.scaler is None else {"grad_scaler": from_json(record.scaler)}


def _groups(record: OptimizerRecord) -> list[dict[str, Any]]:
    """Return the parameter groups without their parameters; Megatron keeps the step there."""
    found = []
    for saved in record.groups:
        group = {
            key: from_json(value)
            for key, value in saved.items()
            if not (isinstance(value, dict) and "other" in value)
        }
        if isinstance(group.get("betas"), list):
            group["betas"] = tuple(group["betas"])
        found.append({"step": _step(record), **group})
    return found


def _step(record: OptimizerRecord) -> Any:
    """Return the number of steps; Adam's of all parameters is that of the iteration."""
    return max(record.steps.values(), default=None)
