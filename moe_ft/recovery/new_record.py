"""Records of a rank that did not exist when a state was written, made from those of all ranks that did.

What belongs to the job is taken over. What belongs to a rank alone is found by its name in the model, made
again, or refused: nothing is left out silently. Random numbers are new, see `seeded_states`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from moe_ft.errors import PlanError
from moe_ft.format.index import Index
from moe_ft.format.records import IterationRecord, OptimizerRecord, RecordTensor
from moe_ft.recovery.meet import Met
from moe_ft.state.packed_values import copied, to_json
from moe_ft.state.parameters import SLOT_BUFFERS
from moe_ft.state.quantized import is_quantized
from moe_ft.state.random_states import seeded_states
from moe_ft.state.record import current_num_microbatches
from moe_ft.state.tensors import inner_optimizers

# Values of a parameter group that say which parameters are in it. The optimizers of experts come and go with
# expert parallelism, so the last one is not compared where nothing fits it. Groups of their own rates differ
# in these alone, which a start may change: they are compared first.
_GROUP = ("wd_mult", "lr_mult", "is_decoupled_lr", "default_config", "is_expert_parallel")
_RATES = ("max_lr", "min_lr", "eps")
_SEEDS_APART = 1_000_003


def make_record(indexes: Mapping[int, Index], met: Met, position: int) -> IterationRecord:
    """Return the record that this rank would have.

    Args:
        indexes: by rank, of one state of another layout.
        position: of the record in each index, from the last one, -1.

    Raises:
        PlanError: if something that ranks had for themselves has no place in this layout.
    """
    records = {rank: index.records[position] for rank, index in sorted(indexes.items())}
    first = records[min(records)]
    if any(each.loop_state != first.loop_state for each in records.values()):
        raise PlanError("state of its own that the training loop keeps on each rank")
    has_scales = any(each.extra_state for each in records.values())
    if has_scales and any(is_quantized(each.parameter) for each in met.live.parameters):
        raise PlanError("scale with which a module casts its FP8 parameters (--fp8-recipe delayed)")
    microbatches = current_num_microbatches()
    if microbatches is None and first is not indexes[min(records)].records[-1]:
        raise PlanError("window of a loop that does not say how many microbatches it has now")
    return msgspec.structs.replace(
        first,
        optimizers=tuple(_optimizers([*records.values()], met)),
        buffers=_buffers(indexes, records, met),
        extra_state={},  # of FP8 modules: they make it again
        tokens_per_expert={},
        rng=seeded_states(_seed(met, first.iteration)),
        num_microbatches=first.num_microbatches if microbatches is None else microbatches,
    )


def _seed(met: Met, iteration: int) -> int:
    """Return a seed that follows from the run's, as Megatron's of a start does, and from the iteration.

    The same state draws the same numbers in the same layout, and not those of the beginning again.
    """
    seed = int(met.facts.fingerprint.get("--seed") or 0) + _SEEDS_APART * iteration
    return seed % (1 << 31) + 100 * met.facts.stage


def _buffers(
    indexes: Mapping[int, Index], records: Mapping[int, IterationRecord], met: Met
) -> dict[str, RecordTensor]:
    """Return the buffers of this rank, by their names in the model.

    Tables of slots are those that a run of this layout begins with.
    """
    found: dict[str, RecordTensor] = {}
    for rank, record in records.items():
        places = indexes[rank].model_places.buffers
        for name, buffer in record.buffers.items():
            if name in places:
                for place in places[name]:
                    found.setdefault(f"{place.key}{place.offset}", buffer)
            elif any(buffer.data) and name.rpartition(".")[2] not in SLOT_BUFFERS:
                raise PlanError(f"buffer {name}, which is no part of Megatron's checkpoints")
    own = {}
    for name, places_now in met.live.model_places.buffers.items():
        keys = [f"{place.key}{place.offset}" for place in places_now]
        if len(keys) != 1 or keys[0] not in found:
            raise PlanError(f"buffer {name}")
        own[name] = found[keys[0]]
    return own


def _optimizers(records: Sequence[IterationRecord], met: Met) -> Iterator[OptimizerRecord]:
    """Yield the records of this rank's optimizers."""
    old = [inner for record in records for inner in record.optimizers]
    if any(inner.scales for inner in old):
        raise PlanError("moments in so few bits that they have scales: give them 16 bits or more")
    groups = [group for inner in old for group in inner.groups]
    steps = {step for inner in old for step in inner.steps.values()}
    if len(steps) > 1:
        raise PlanError(f"number of steps that is the same for all parameters: {sorted(steps)}")
    scaler = next((inner.scaler for inner in old if inner.scaler is not None), None)
    found_inf = next((inner.found_inf for inner in old if inner.found_inf is not None), None)
    for inner in inner_optimizers(met.live.built[1]):
        yield OptimizerRecord(
            groups=tuple(_group_like(each, groups) for each in inner.optimizer.param_groups),
            steps={"*": next(iter(steps))} if steps else {},
            scaler=scaler,
            found_inf=found_inf,
        )


def _group_like(live: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that a group of the optimizer gets: those of one with such parameters."""
    values = {name: to_json(copied(live[name])) for name in (*_GROUP, *_RATES) if name in live}
    own = {name: values[name] for name in _GROUP if name in values}
    for names in ((*_RATES, *_GROUP), (*_RATES, *_GROUP[:-1]), _GROUP, _GROUP[:-1]):
        wanted = {name: values[name] for name in names if name in values}
        for group in groups:
            if all(group.get(name) == value for name, value in wanted.items()):
                return {**group, **own}
    raise PlanError(f"group of the optimizer with {own}")
