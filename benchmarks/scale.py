"""Parts of a start and of an iteration that grow with the ranks, at sizes that no machine here has.

Placements are planned by the function of the product, on one core. Agreement is counted, not timed:
connections of a rank, and messages one after the other, of which a time on one machine says nothing.
"""

import argparse
import time
import tracemalloc

from benchmarks.conditions import versions
from benchmarks.output import markdown_table, parse_options, show, spread
from moe_ft.planning.levels import most_connections, plan_levels
from moe_ft.planning.placement import place_replicas, plan_node_memory
from moe_ft.topology import RankInfo, Topology

_SIZES = (64, 512, 4096, 16384)
_RANKS_PER_NODE, _NUM_STAGES, _FACTOR = 8, 8, 2
_GOAL_S, _GOAL_BYTES = 5.0, 200 << 20
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
    counted = [_count(size) for size in _SIZES]
    parts = [
        f"One core; median (range) of {options.times}. {versions()}.",
        f"Peers of all ranks and the memory of all nodes, {_RANKS_PER_NODE} ranks a node, {_FACTOR} replicas",
        markdown_table(placed, headers),
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
