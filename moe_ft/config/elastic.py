"""Settings of experts whose replicas follow their load, and of jobs whose number of ranks changes."""

from dataclasses import dataclass
from typing import ClassVar

from moe_ft.config.fields import STRATEGY, Bounds, ConfigPart, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig(ConfigPart):
    """Slots of experts, whose state lies on all ranks; any number of ranks."""

    TITLE: ClassVar[str] = "any number of nodes, replicas of experts"
    PAGE: ClassVar[str] = "elastic.md"
    elastic: bool = setting(
        False,
        "train with the ranks that a start has, fewer or more than before: data parallelism changes, samples "
        "of an iteration do not, and ranks that are left over wait",
        needs=(STRATEGY, "layout=any"),
    )
    expert_slots: int = setting(
        0,
        "slots of each rank in an MoE layer: an expert may have several, and they move to where tokens go; "
        "0 = each expert where Megatron puts it",
        metavar="C",
        bounds=Bounds(at_least=0),
        remedy="Give the slots of a rank, or leave the flag out",
        page="expert_slots.md",
    )
    rebalance_interval: int = setting(
        0,
        "choose the experts of the slots again every N iterations, by their tokens; 0 = never",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations, or leave the flag out",
        needs=("expert_slots",),
        page="expert_slots.md",
    )
    min_replicas: int = setting(
        1,
        "slots that every expert of a layer has at least",
        metavar="F",
        bounds=Bounds(at_least=1),
        remedy="Give a number of slots, or leave the flag out",
        needs=("expert_slots",),
        page="expert_slots.md",
    )
