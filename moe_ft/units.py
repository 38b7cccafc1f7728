"""Units: the smallest parts of a model that are checkpointed separately, and their global names.

A unit is one expert of one layer, one layer's router, one layer's non-expert part, the embedding, the
final norm or the output layer. Names use global layer and expert numbers, so that they mean the same
on every rank and in every layout. state/parameters.py assigns parameters to units.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from moe_ft.errors import PlanError


class UnitKind(StrEnum):
    """Kinds of units."""

    EMBEDDING = "embedding"
    NON_EXPERT = "non-expert"  # of one layer: attention, norms, dense MLP, shared experts
    ROUTER = "router"
    EXPERT = "expert"
    FINAL_NORM = "final-norm"
    OUTPUT = "output"
    OTHER = "other"  # parameters that a GPT usually does not have


class Level(StrEnum):
    """Extent of a unit in a snapshot."""

    FULL = "full"  # fp32 master weights and optimizer moments
    COMPUTE = "compute"  # the weights that the forward pass uses
    NONE = "none"


class UnitPart(StrEnum):
    """Parts of an expert whose weights and moments are saved separately."""

    WHOLE = ""
    WEIGHTS = "weights"
    MOMENTS = "moments"


_LAYER_KINDS = (UnitKind.NON_EXPERT, UnitKind.ROUTER, UnitKind.EXPERT)
_NAME = re.compile(
    r"(?P<block>layer|mtp)\.(?P<layer>\d+)\.(?P<kind>non-expert|router|expert)"
    r"(\.(?P<expert>\d+)(\.(?P<part>weights|moments))?)?"
)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class UnitId:
    """The global name of a unit.

    Attributes:
        block: "layer" for the decoder's layers, "mtp" for multi-token prediction layers.
        layer: global index of the layer from 0; -1 outside of layers.
        expert: global index of the expert in its layer; -1 for other units.
        part: of an expert whose weights and moments are saved separately.
    """

    kind: UnitKind
    block: str = "layer"
    layer: int = -1
    expert: int = -1
    part: UnitPart = UnitPart.WHOLE

    @property
    def whole(self) -> "UnitId":
        """The unit that a part belongs to."""
        return self if self.part is UnitPart.WHOLE else replace(self, part=UnitPart.WHOLE)

    @property
    def layer_name(self) -> str:
        """The name of its layer, as in ``layer.3``."""
        return f"{self.block}.{self.layer}"

    def __str__(self) -> str:
        if self.kind not in _LAYER_KINDS:
            return self.kind.value
        name = f"{self.block}.{self.layer}.{self.kind}"
        if self.kind is not UnitKind.EXPERT:
            return name
        return f"{name}.{self.expert}.{self.part}" if self.part else f"{name}.{self.expert}"


def parse_unit(text: str) -> UnitId:
    """Return the unit with a name, the inverse of ``str``.

    Raises:
        PlanError: if no unit has that name.
    """
    match = _NAME.fullmatch(text)
    if match is not None:
        kind = UnitKind(match["kind"])
        if (kind is UnitKind.EXPERT) == (match["expert"] is not None):
            expert = -1 if match["expert"] is None else int(match["expert"])
            return UnitId(
                kind=kind,
                block=match["block"],
                layer=int(match["layer"]),
                expert=expert,
                part=UnitPart(match["part"] or ""),
            )
    elif text in list(UnitKind) and text not in list(_LAYER_KINDS):
        return UnitId(kind=UnitKind(text))
    raise PlanError(f"'{text}' is not the name of a unit, such as layer.3.expert.7 or embedding")
