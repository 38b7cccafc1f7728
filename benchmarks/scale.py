"""Parts of a start and of an iteration that grow with the ranks, at sizes that no machine here has.

Placements and recoveries are planned by the functions of the product, on one core. Agreement is counted, not
timed: connections of a rank, and messages one after the other, of which a time on one machine says nothing.
"""

import argparse
import pickle
import time
import tracemalloc
from collections.abc import Callable, Sequence

from benchmarks.conditions import versions
from benchmarks.output import markdown_table, parse_options, show, spread
from moe_ft.format.identity import Identity, Start
from moe_ft.planning.levels import divide, most_connections, plan_levels
from moe_ft.planning.placement import place_replicas, plan_node_memory
from moe_ft.planning.recovery import Plan, Version, plan_recovery, plan_to_keep
from moe_ft.planning.shares import Common, share_out
from moe_ft.recovery.inventory import Inventory, merge_packed, pack
from moe_ft.topology import RankInfo, Topology

_SIZES = (64, 512, 4096, 16384)
_RANKS_PER_NODE, _NUM_STAGES, _FACTOR = 8, 8, 2
_GOAL_S, _GOAL_BYTES = 5.0, 200 << 20
_NUM_SETTINGS = 150  # of an identity
_SETTINGS_TEXT = "{" + ",".join(f'"--setting-{number}":{number}' for number in range(150)) + "}"
_LAYOUTS = (
    "stages on blocks of nodes",
    "a stage on each node",
    "each stage on all nodes",
)


def _stage_of(layout: str, rank: int, num_ranks: int) -> int:
    if layout == _LAYOUTS[0]:
        return rank * _NUM_STAGES // num_ranks
    return rank // _RANKS_PER_NODE if layout == _LAYOUTS[1] else rank % _RANKS_PER_NODE


def _topology(layout: str, num_ranks: int) -> Topology:
    return Topology(
        ranks=tuple(
            RankInfo(
                rank=rank,
                node=f"node{rank // _RANKS_PER_NODE}",
                stage=_stage_of(layout, rank, num_ranks),
                pid=1,
                address=None,
                region_bytes=100 << 20,
            )
            for rank in range(num_ranks)
        )
    )


def _place(topology: Topology) -> None:
    plan_node_memory(topology, place_replicas(topology, _FACTOR), 2, 2)


def _measure(layout: str, num_ranks: int, num_times: int) -> list[object]:
    topology, seconds = _topology(layout, num_ranks), []
    for _ in range(num_times):
        start = time.perf_counter()
        _place(topology)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    _place(topology)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    is_met = max(seconds) < _GOAL_S and peak_bytes < _GOAL_BYTES
    size = f"{peak_bytes / 2**20:.1f}"
    return [layout, f"{num_ranks:,}", spread(seconds), size, "yes" if is_met else "no"]


class _Recovery:
    """Work of rank 0 in a start: each rank has left two windows, in its own memory and at its peers."""

    def __init__(self, num_ranks: int) -> None:
        self._topology = _topology(_LAYOUTS[0], num_ranks)
        peers = place_replicas(self._topology, _FACTOR)
        settings = {f"--setting-{number}": number for number in range(_NUM_SETTINGS)}
        self._identity = Identity(
            job_id="job",
            lineage="run",
            history=(Start(number=0, resumed_at=0, name="first"),),
            fingerprint=settings,
            world_size=num_ranks,
            strategy="sparse",
            replay_settings=settings,
        )
        self._nodes = {node: Inventory() for node in self._topology.nodes}
        for rank in range(num_ranks):
            for holder in (rank, *peers[rank]):
                for window in range(2):
                    self._leave(rank, holder, window)
        self.tables = [pack(each) for each in self._nodes.values()]
        self.num_versions = sum(len(each.versions) for each in self._nodes.values())
        self._nodes.clear()  # the ranks of nodes have them, not rank 0
        self._found = Inventory()
        self._plans: list[Plan] = []
        self.shared: tuple[Common, list[bytes]] | None = None

    def _leave(self, rank: int, holder: int, window: int) -> None:
        """Leave a window of a rank in the memory of a holder."""
        node = self._topology.ranks[holder].node
        where = f"rank_{rank:05d}" if holder == rank else f"replica_{rank:05d}_{holder:05d}"
        identity = self._nodes[node].add_identity(f"memory of node {node}", self._identity)
        self._nodes[node].versions.append(
            Version(
                rank=rank,
                iteration=100 + 10 * window,
                lineage=identity.lineage,
                history=identity.history,
                node=node,
                path=f"{where}/region_{window}.json",
                is_replica=holder != rank,
                window=10,
                replay_settings=_SETTINGS_TEXT,
            )
        )

    def merge(self) -> None:
        """Merge what the nodes have sent."""
        self._found = merge_packed(self.tables)

    def plan(self) -> None:
        """Plan the ways to recover."""
        ranks = self._topology.ranks
        nodes, stages = [each.node for each in ranks], [each.stage for each in ranks]
        self._plans, _ = plan_recovery(self._found.versions, nodes, stages)

    def cut_up(self) -> None:
        """Give each rank its share."""
        best, num_ranks = self._plans[0], len(self._topology.ranks)
        kept = plan_to_keep(best, self._plans)
        self.shared = share_out(best, kept, num_ranks, needs_elsewhere=True)

    def largest_message_bytes(self) -> int:
        """Return the size of the largest message that a rank sends or gets."""
        assert self.shared is not None
        common, shares = self.shared
        (members,) = plan_levels(range(len(shares)))[-1]
        leaders = {rank * _RANKS_PER_NODE: table for rank, table in enumerate(self.tables)}
        parts = [*divide(leaders, members), *divide(dict(enumerate(shares)), members)]
        return max(len(pickle.dumps(each)) for each in (common, *parts))


def _recover(num_ranks: int, num_times: int) -> list[object]:
    recovery = _Recovery(num_ranks)
    steps: Sequence[Callable[[], None]] = (recovery.merge, recovery.plan, recovery.cut_up)
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(num_times):
        for step, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    message = recovery.largest_message_bytes() / 2**20
    recovery = _Recovery(num_ranks)
    tracemalloc.start()
    for step in (recovery.merge, recovery.plan, recovery.cut_up):
        step()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    is_met = sum(map(max, seconds)) < _GOAL_S and peak_bytes < _GOAL_BYTES
    return [
        f"{num_ranks:,}",
        f"{recovery.num_versions:,}",
        *map(spread, seconds),
        f"{peak_bytes / 2**20:.1f}",
        f"{message:.2f}",
        "yes" if is_met else "no",
    ]


def _count(num_ranks: int) -> list[object]:
    """Return the connections and messages of an agreement in levels, next to those of one group."""
    levels = plan_levels(range(num_ranks))
    # gloo's all-reduce sends around a ring twice, its broadcast along a tree.
    up = sum(2 * (len(level[0]) - 1) for level in levels)
    down = sum((len(level[0]) - 1).bit_length() for level in levels[:-1])
    others = [
        f"{num_ranks - 1:,}",
        most_connections(num_ranks),
        f"{2 * (num_ranks - 1):,}",
        up + down,
    ]
    return [f"{num_ranks:,}", len(levels), *others]


def main() -> None:
    """Measure and count, and show both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="of each plan (default 5)")
    options = parse_options(parser, times=1)
    sizes = _SIZES[:2] if options.quick else _SIZES
    placed = [_measure(layout, size, options.times) for layout in _LAYOUTS for size in sizes]
    headers = ("stages", "ranks", "s", "MiB at most", "< 5 s and 200 MiB")
    recovered = [_recover(size, options.times) for size in sizes]
    counted = [_count(size) for size in _SIZES]
    parts = [
        f"One core; median (range) of {options.times}. {versions()}.",
        f"Peers of all ranks and the memory of all nodes, {_RANKS_PER_NODE} ranks a node, {_FACTOR} replicas",
        markdown_table(placed, headers),
        "Recovery, on rank 0: tables of all nodes become plans, the best one shares of all ranks. Each "
        f"rank has left two windows in its own memory and {_FACTOR} replicas of each",
        markdown_table(
            recovered,
            (
                "ranks",
                "versions",
                "merge s",
                "plan s",
                "cut up s",
                "MiB at most",
                "largest message MiB",
                "< 5 s and 200 MiB",
            ),
        ),
        "Agreement of all ranks: connections of the rank that has most, and messages one after the other",
        markdown_table(
            counted,
            (
                "ranks",
                "levels",
                "connections, one group",
                "in levels",
                "messages, one group",
                "in levels ",
            ),
        ),
    ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
