"""The model of a run of moe_ft, from a checkpoint on storage or from memory.

In a checkpoint of Megatron arguments, iteration, scheduler and optimizer groups are one dictionary for all
ranks; random numbers are one object for each tensor- and pipeline-parallel rank, which a run of other sizes
ignores.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, override

import torch

from moe_ft.convert.model import MegatronState, SourceModel, shared_state
from moe_ft.convert.source import RunState
from moe_ft.convert.tensors import GlobalTensor, find_tensors, read_tensor
from moe_ft.errors import ConfigError
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.records import IterationRecord, OptimizerRecord
from moe_ft.recovery.inspect.experts import summarize_experts
from moe_ft.state.packed_values import from_json
from moe_ft.state.random_states import rng_values

_FULLY_RESHARDABLE = "fully_reshardable"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunModel(SourceModel):
    """The model."""

    source: RunState
    kind: str = "moe_ft"

    @override
    def tensors(self) -> Sequence[GlobalTensor]:
        return find_tensors(self.source)

    @override
    def read(self, tensor: GlobalTensor, kind: str) -> torch.Tensor:
        return read_tensor(self.source, tensor, kind)

    @override
    def megatron_state(self, *, with_optimizer: bool, for_ep: int | None) -> MegatronState:
        states = self.source.ranks
        return MegatronState(
            common=common_state(self.source, with_optimizer=with_optimizer, for_ep=for_ep),
            rng=tuple(rng_states(self.source)) if with_optimizer else (),
            modules=[key for state in states for key in state.index.model_places.objects],
            master="param" if uses_distributed_optimizer(self.source) else "fp32_param",
        )


def model_of_run(source: RunState) -> RunModel:
    """Return the model of a run in the state of a source."""
    return RunModel(
        place=source.place,
        iteration=source.iteration,
        signature=checksum(b"".join(encode(state.index) for state in source.ranks)),
        settings=_settings(source),
        facts=_facts(source),
        source=source,
    )


def _settings(source: RunState) -> dict[str, Any]:
    return {**source.identity.replay_settings, **source.identity.fingerprint}


def _facts(source: RunState) -> dict[str, Any]:
    """Return what the run is, and the tokens that its experts have lost."""
    facts: dict[str, Any] = {
        "iteration": source.iteration,
        "job_id": source.identity.job_id,
        "lineage": source.identity.lineage,
        "strategy": source.identity.strategy,
    }
    summary = summarize_experts(state.index for state in source.ranks)
    if summary is not None:
        facts |= {
            "lost_tokens": {layer: list(counts) for layer, counts in summary.lost.items()},
            "tokens_not_saved": {layer: list(counts) for layer, counts in summary.missing.items()},
            "plt": summary.plt(summary.lost),
            "plt_not_saved": summary.plt(summary.missing),
        }
    return facts


def uses_distributed_optimizer(source: RunState) -> bool:
    """Return whether the run had --use-distributed-optimizer."""
    return bool(source.identity.fingerprint.get("--use-distributed-optimizer"))


def common_state(
    source: RunState, *, with_optimizer: bool, for_ep: int | None = None
) -> dict[str, Any]:
    """Return the dictionary that all ranks load.

    Args:
        with_optimizer: whether training continues; without, the checkpoint is a release of weights.
        for_ep: --expert-model-parallel-size of the job that will load it; None for that of the run.
    """
    record, sizes = _record(source, 0), _sizes(source)
    inner = sizes["tensor"] * sizes["context"] * sizes["pipeline"]
    state = shared_state(
        _settings(source),
        with_optimizer=with_optimizer,
        world_size=len(source.ranks),
        data_parallel_size=len(source.ranks) // inner,
        iteration=record.iteration,
        consumed_train_samples=record.consumed_train_samples,
        consumed_valid_samples=record.consumed_valid_samples,
        skipped_train_samples=record.skipped_train_samples,
    )
    state["num_floating_point_operations_so_far"] = record.num_floating_point_operations
    metadata = state["content_metadata"]
    if uses_distributed_optimizer(source):
        metadata["distrib_optim_sharding_type"] = _FULLY_RESHARDABLE
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    if with_optimizer:
        state["optimizer"] = _optimizers(source, for_ep)
        state["opt_param_scheduler"] = from_json(dict(record.scheduler))
    return state


def rng_states(source: RunState) -> Iterator[tuple[tuple[int, int], tuple[int, int], list[Any]]]:
    """Yield place and number of (pipeline, tensor) ranks, and the random numbers of the first rank there."""
    sizes = _sizes(source)
    pp, tp = sizes["pipeline"], sizes["tensor"]
    seen = set()
    for rank in range(len(source.ranks)):
        place = (_pipeline_rank(source, rank, sizes), rank % tp)
        if place not in seen:
            seen.add(place)
            yield place, (pp, tp), [rng_values(_record(source, rank).rng)]


def _record(source: RunState, rank: int) -> IterationRecord:
    return source.ranks[rank].index.records[-1]


def _sizes(source: RunState) -> dict[str, int]:
    settings = source.identity.fingerprint
    return {
        flag.removesuffix("-model"): int(settings.get(f"--{flag}-parallel-size") or 1)
        for flag in ("tensor-model", "context", "pipeline-model")
    }


def _pipeline_rank(source: RunState, rank: int, sizes: Mapping[str, int]) -> int:
    """Return the stage of a rank in Megatron's order of ranks."""
    inner = sizes["tensor"] * sizes["context"]
    if not source.identity.fingerprint.get("--use-tp-pp-dp-mapping"):
        inner = len(source.ranks) // sizes["pipeline"]
    return rank // inner % sizes["pipeline"]


def _optimizers(source: RunState, for_ep: int | None) -> dict[Any, Any]:
    """Return the state of the optimizers that is no tensor, as Megatron names it.

    With expert parallelism Megatron chains an optimizer of experts to the others', else there is one.
    """
    own_ep = int(source.identity.fingerprint.get("--expert-model-parallel-size") or 1)
    is_chained = (for_ep or own_ep) > 1 and bool(source.identity.fingerprint.get("--num-experts"))
    records = [
        inner for rank in range(len(source.ranks)) for inner in _record(source, rank).optimizers
    ]
    if not uses_distributed_optimizer(source):
        found = [_plain(source, inner) for inner in _record(source, 0).optimizers]
        if is_chained != (len(found) > 1):
            raise ConfigError(
                f"--for-ep={for_ep}: the run had --expert-model-parallel-size {own_ep}, and without "
                "--use-distributed-optimizer its state fits only jobs that also have experts on several "
                "ranks, or also not. Leave out --for-ep, or give --what weights."
            )
        return dict(enumerate(found)) if is_chained else found[0]
    groups = [group for inner in records for group in _groups(inner)]
    shared = [each for each in groups if not each.get("is_expert_parallel")]
    expert = [each for each in groups if each.get("is_expert_parallel")]
    if not is_chained:
        return _distributed(_marked([*shared, *expert], is_expert=False), records[0])
    return {
        0: _distributed(shared, records[0]),
        1: _distributed(_marked(expert or shared, is_expert=True), records[0]),
    }


def _marked(groups: list[dict[str, Any]], *, is_expert: bool) -> list[dict[str, Any]]:
    return [
        {**group, "is_expert_parallel": is_expert} if "is_expert_parallel" in group else group
        for group in groups
    ]


def _distributed(groups: list[dict[str, Any]], record: OptimizerRecord) -> dict[str, Any]:
    """Return the state of one distributed optimizer: each of the ranks' groups once."""
    different: list[dict[str, Any]] = []
    for group in groups:
        if group not in different:
            different.append(group)
    return {
        "optimizer": {"param_groups": different},
        "param_state_sharding_type": _FULLY_RESHARDABLE,
        **_scaler(record),
    }


def _plain(source: RunState, record: OptimizerRecord) -> dict[str, Any]:
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
