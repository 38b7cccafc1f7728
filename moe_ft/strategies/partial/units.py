"""Division of a rank's units into those that every snapshot holds and those that rotate."""

from collections.abc import Iterable
from dataclasses import replace

from moe_ft.units import Part, UnitId, UnitKind


def divide_units(
    units: Iterable[UnitId], covers: str, *, master_always_full: bool
) -> tuple[list[UnitId], list[UnitId]]:
    """Divide units into those that every snapshot holds and those that rotate.

    Args:
        covers: what of an expert rotates: weights, optimizer or both (the paper's W, O and WO).
        master_always_full: whether fp32 master weights are in every snapshot nevertheless.

    Returns:
        Both. An expert of which only a part rotates is in both, in two parts.
    """
    always, rotating = [], []
    weights_rotate = covers in ("weights", "both") and not master_always_full
    moments_rotate = covers in ("optimizer", "both")
    for unit in units:
        if unit.kind is not UnitKind.EXPERT:
            always.append(unit)
        elif weights_rotate and moments_rotate:
            rotating.append(unit)
        else:
            weights, moments = (replace(unit, part=part) for part in (Part.WEIGHTS, Part.MOMENTS))
            (rotating if weights_rotate else always).append(weights)
            (rotating if moments_rotate else always).append(moments)
    return always, rotating
