"""The place of a rank in its job. Commands and the agent of a node read it without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_ft.config.config import MoeFtConfig
from moe_ft.launches import Launch
from moe_ft.saying import say
from moe_ft.topology import Topology


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
