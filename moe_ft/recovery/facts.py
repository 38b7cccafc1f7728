"""Facts that a training loop passes to a start about a job and a rank."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_ft.launches import Launch
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.couplings import CouplingReport
from moe_ft.planning.experts import ExpertFacts
from moe_ft.state.parameters import StatePlaces


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """Facts about the job and this rank.

    Attributes:
        launch: start of the ranks that this process belongs to.
        stage: pipeline rank.
        fingerprint: settings that the state depends on, by flag.
        replay_settings: further settings that the result of an iteration depends on, by flag.
        record_settings: settings that decide what the records of iterations hold, and which states are
            evaluated, by flag.
        read_files: returns facts to replace, with settings that are in files. Rank 0 alone calls it: in
            blends there are thousands.
        script_settings: digests of a training script's own flags; nobody can tell what depends on them.
        iteration: where training continues if nothing is recovered; --load may have set it.
        began_with: flags with values that begin a run from the weights of another run, such as --finetune;
            empty without.
        is_deterministic: whether a replay computes the same bits.
        is_evaluated: whether the loop may evaluate the state of an iteration.
        waiting_ranks: ranks of the launcher that take no part, as they do not fit.
        evaluation_samples: of an iteration of an evaluation.
        couplings: stages that run iterations again together; None if what the pipeline sends is not logged.
    """

    launch: Launch
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
    record_settings: dict[str, Any] = field(default_factory=dict)
    read_files: Callable[[], dict[str, Any]] = dict
    script_settings: dict[str, str] = field(default_factory=dict)
    traffic: PipelineTraffic | None = None
    couplings: CouplingReport | None = None
    waiting_ranks: tuple[int, ...] = ()
    evaluation_samples: int = 0
    is_evaluated: Callable[[int], bool] = lambda iteration: False
