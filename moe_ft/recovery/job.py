"""What a start is told of the job, and what it tells of its recovery."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_ft.format.records import IterationRecord
from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.recovery import Tier
from moe_ft.recovery.conversion import Conversion
from moe_ft.state.parameters import StatePlaces
from moe_ft.strategies.interface import JobLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """What the training loop tells about the job and this rank.

    Attributes:
        stage: this rank's pipeline rank.
        places, groups: this rank's places, and Megatron's ProcessGroupCollection.
        fingerprint: the settings that state depends on, by flag.
        replay_settings: those that what an iteration computes depends on, besides.
        experts: of the model, and how many tokens they get.
        iteration: where training goes on if nothing is recovered (--load may have set it).
        began_with: what begins a run from the weights of another, such as --finetune, with its values; empty
            without.
        is_deterministic: whether a replay computes the same bits.
        timeout_s: of the job's process groups.
    """

    rank: int
    world_size: int
    stage: int
    places: StatePlaces
    groups: Any
    fingerprint: dict[str, Any]
    replay_settings: dict[str, Any]
    experts: ExpertFacts
    iteration: int
    began_with: str
    is_deterministic: bool
    timeout_s: float


@dataclass(kw_only=True, slots=True)
class Recovery:
    """What a start recovered, for the training loop and the event log.

    Attributes:
        iteration: where training goes on.
        record: the record of that state; None if nothing was recovered.
        conversion: what must be run again before; None if nothing.
        start, writer: numbers of this start, and of the one that wrote what was recovered.
        sources: number of units by tier.
        phases_s: seconds by phase.
        problems: what was looked at and rejected, and why.
        loss: what it cost; None where every snapshot holds every unit.
        lossy: by key of this rank's tensors that were kept in fewer bits than they have: how.
    """

    iteration: int
    record: IterationRecord | None = None
    start: int = 0
    writer: int = 0
    conversion: Conversion | None = None
    sources: Mapping[Tier, int] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    is_deterministic: bool = True
    loss: JobLoss | None = None
    lossy: Mapping[str, str] = field(default_factory=dict)
