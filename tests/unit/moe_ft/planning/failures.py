"""Failures of small jobs, as planning sees them: layouts, and what is left of states, logs and records."""

from collections.abc import Collection, Mapping

from moe_ft.planning.couplings import Coupling
from moe_ft.planning.recovery import Version
from moe_ft.planning.remains import PipelineLayout, Remains
from moe_ft.planning.scope import KeptRecord, SentLog
from moe_ft.planning.tiers import MEMORY, STORAGE
from tests.unit.moe_ft.builders import make_history

STARTS = make_history([(0, 0), (1, 2)])


def make_pipelines(
    num_stages: int,
    width: int = 1,
    *,
    is_ring: bool = False,
    couplings: Collection[tuple[int, ...]] = (),
    stages_per_node: int = 1,
    has_common_records: bool = True,
) -> PipelineLayout:
    """Return a layout with ranks in the order of their stages."""
    stages = tuple(tuple(range(stage * width, (stage + 1) * width)) for stage in range(num_stages))
    return PipelineLayout(
        stages=stages,
        node_of=tuple(
            f"node-{stage // stages_per_node}" for stage in range(num_stages) for _ in range(width)
        ),
        is_ring=is_ring,
        couplings=tuple(Coupling(stages=each, reason="a test") for each in couplings),
        has_common_records=has_common_records,
    )


def make_version(
    rank: int, iteration: int, window: int = 1, *, node: str | None = None, start: int = 0
) -> Version:
    """Return one rank's state; a whole one unless it has a longer window."""
    return Version(
        rank=rank,
        iteration=iteration,
        lineage="run-a",
        history=STARTS[: start + 1],
        node=node,
        path=f"rank_{rank}/{iteration}_{window}_{start}.json",
        tier=STORAGE if node is None else MEMORY,
        window=window,
    )


def make_failure(
    pipelines: PipelineLayout,
    at: Mapping[int, int],
    *,
    window: tuple[int, int] = (4, 2),
    lost_nodes: Collection[str] = (),
    is_replicated: bool = True,
) -> Remains:
    """Return the remains of a job in which the newest iteration was completed everywhere but for the state.

    Every rank, also a dead one, had sent all tensors, so its node has the logs. A rank that has a breakpoint
    has the records up to it, and those of its window.

    Args:
        at: the breakpoints, by rank; dead ranks have none.
        window: last iteration and length of the newest complete window, which every rank has.
        lost_nodes: nodes whose memory is gone.
        is_replicated: whether the next node also has the windows of a node's ranks.
    """
    end, length = window
    nodes = tuple(dict.fromkeys(pipelines.node_of))
    next_to = dict(zip(nodes, (*nodes[1:], nodes[0]), strict=True))
    node_of = pipelines.node_of
    versions = [make_version(rank, end, length, node=node) for rank, node in enumerate(node_of)]
    if is_replicated:
        versions += [
            make_version(rank, end, length, node=next_to[node]) for rank, node in enumerate(node_of)
        ]
    versions += [make_version(rank, each, node=node_of[rank]) for rank, each in at.items()]
    newest = max([end, *at.values()])
    logs = [
        SentLog(
            sender=sender,
            receiver=receiver,
            direction=link.direction,
            iteration=iteration,
            node=node_of[sender],
            path=f"log_{sender}/{iteration}.json",
        )
        for link in pipelines.links
        for sender, receiver in pipelines.wires(link)
        for iteration in range(end - length + 1, newest)
    ]
    records = [
        KeptRecord(rank=rank, iteration=each, node=node_of[rank], path=f"records_{rank}.json")
        for rank, last in at.items()
        for each in range(end + 1, last + 1)
    ]
    return Remains(
        versions=[each for each in versions if each.node not in lost_nodes],
        logs=[each for each in logs if each.node not in lost_nodes],
        records=[each for each in records if each.node not in lost_nodes],
    )
