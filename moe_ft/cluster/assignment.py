"""Assignment of a rank: what the cluster tells a process of a rank when it is forked.

One process of a rank has one assignment, from its begin to its end. What changes later, such as the round
that the rank has joined last, is in member.py. Standard library only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Place of one process of a rank in its job, and the process whose place it takes, if there was one.

    Times are seconds since 1970.

    Attributes:
        rank: number in the job, from 0.
        local_rank: number among the ranks of this node, from 0.
        world_size: number of ranks of the job.
        node: name of the node on which this process runs.
        start: number of this start of all ranks, from 0, as its launcher counts them.
        begun_from: number of the start before it; -1 for the first one.
        round: round of repairs since which the rank is on this node; 0 if it was there from the start.
        died_s: when the process died, or its node was heard last, whose place this one takes; None for the
            first process of a rank in a start.
        hung_s: seconds for which that process had hung when it was killed for it; 0 if it was not.
        lost_node: node on which that process ran, if it is lost; else empty.
        host_rank: rank of this node whose device this process shares; None if it has one of its own.
        is_watched: whether a coordinator calls silent nodes lost, for which it needs a while.
        max_restarts: starts of all ranks that may follow, in a row without a finished iteration.
        fewest_nodes: with which the job can train; 0 if none may be missing.
        store: number of the node that keeps the job's store.
        meet: host and port of that store.
        token: secret of the start, which signs what ranks write in the job's store.
    """

    rank: int
    local_rank: int
    world_size: int
    node: str
    start: int = 0
    begun_from: int = -1
    round: int = 0
    died_s: float | None = None
    hung_s: float = 0.0
    lost_node: str = ""
    host_rank: int | None = None
    is_watched: bool = False
    max_restarts: int = 0
    fewest_nodes: int = 0
    store: int = 0
    meet: tuple[str, int] = ("", 0)
    token: str = ""

    @property
    def is_replacement(self) -> bool:
        """True if this process takes the place of one that has died, or whose node is lost."""
        return self.died_s is not None
