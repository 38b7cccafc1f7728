"""State that another layout has left: its places in the model, which version of each unit is there, progress.

A version counts only if all of a unit is there in it, in the ranges of whatever ranks that were. Pure:
planning/transfer.py plans what moves, recovery/transfer.py reads it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from moe_ft.errors import PlanError
from moe_ft.format.entries import GlobalPlace
from moe_ft.format.records import ExpertProgress, Gaps
from moe_ft.planning.transfer import Block, Dims, Part, plan_transfer

VersionNumber = tuple[int, int]  # incarnation, iteration: the greater, the later


class ModelTensor(NamedTuple):
    """One tensor of the model; those of experts, stacked in Megatron's checkpoints, are tensors of their own.

    Attributes:
        key: in Megatron's checkpoints.
        stacked_at: position in what is stacked; empty for anything else.
        kind: of state, such as ``param`` or ``exp_avg``.
    """

    key: str
    stacked_at: Dims
    kind: str


def blocks_of(places: Iterable[GlobalPlace], shape: Dims, kind: str) -> list[Block]:
    """Return the blocks of a rank's tensor of a shape."""
    found = []
    for place in places:
        stacked = len(place.shape) - len(place.extent)
        tensor = ModelTensor(place.key, place.offset[:stacked], kind)
        found.append(Block(tensor, place.offset[stacked:], place.extent, shape, place.start))
    return found


def wholes_of(places: Iterable[GlobalPlace], kind: str) -> list[Block]:
    """Return the whole tensors of the model that a rank's tensor is part of."""
    found = []
    for place in places:
        stacked = len(place.shape) - len(place.extent)
        whole = place.shape[stacked:]
        tensor = ModelTensor(place.key, place.offset[:stacked], kind)
        found.append(Block(tensor, (0,) * len(whole), whole, whole, (0,) * len(whole)))
    return found


def complete_versions(
    parts: Mapping[VersionNumber, Sequence[Part]], wanted: Sequence[Part]
) -> list[VersionNumber]:
    """Return the versions in which all of what is wanted is there, the newest first.

    Args:
        parts: what there is of these tensors, by version.
    """

    def has_all(found: Sequence[Part]) -> bool:
        plan = plan_transfer(found, wanted, lambda _: (None,), lambda *_: 0, lambda owner: 0)
        return not plan.missing

    return [version for version in sorted(parts, reverse=True) if has_all(parts[version])]


def merge_progress(found: Sequence[ExpertProgress]) -> ExpertProgress | None:
    """Return the progress of the experts of all stages together; None if nobody has counted any.

    Args:
        found: of the ranks that were, the lowest first. Those of one stage have noted the same.

    Raises:
        PlanError: if stages select experts in different ways.
    """
    if not found:
        return None
    choices = {(each.k_snapshot, each.k_persist, each.least_k, each.interval) for each in found}
    if len(choices) > 1:
        raise PlanError(f"stages save different numbers of experts: {sorted(choices)}")
    tokens: dict[str, tuple[int, ...]] = {}
    gaps: dict[str, tuple[Gaps, ...]] = {}
    owed: dict[str, tuple[int, ...]] = {}
    for each in found:
        tokens |= each.routed_tokens
        gaps |= each.gaps
        owed |= each.owed
    left = max(each.boost_left for each in found)
    return msgspec.structs.replace(
        found[0], routed_tokens=tokens, gaps=gaps, owed=owed, boost_left=left
    )
