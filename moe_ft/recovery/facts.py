"""Facts that a training loop passes to a start about a job and a rank, and the place of the rank in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.voices import Voice
from moe_ft.launches import Launch
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.couplings import CouplingReport
from moe_ft.planning.experts import ExpertFacts
from moe_ft.saying import say
from moe_ft.state.parameters import StatePlaces
from moe_ft.state.random_states import Randomness
from moe_ft.topology import Topology


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
        voice: of this rank while ranks are dead; None in a healthy job.
        randomness: random numbers of this rank; None for those of its process.
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
    voice: Voice | None = None
    randomness: Randomness | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A rank's place: its job, its node, and its node's memory directory."""

    config: MoeFtConfig
    job_id: str
    node: str
    node_dir: Path
    rank: int
    topology: Topology
    launch: Launch

    @property
    def is_lowest_on_node(self) -> bool:
        """True if this rank does what is done once per node."""
        return self.topology.lowest_on_node(self.node).rank == self.rank


def say_for_node(site: Site, lines: Sequence[str]) -> None:
    """Print, of ``[rank]`` lines, that of the lowest rank of this node that has one, on that rank."""
    speakers = [info.rank for info in site.topology.on_node(site.node) if lines[info.rank]]
    if speakers and site.rank == min(speakers):
        say(lines[site.rank])
