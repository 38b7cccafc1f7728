"""Placement of expert replicas: load of the busiest rank, moves, bytes, and lost nodes that are survived.

    python -m benchmarks.papers.expert_placement TRACE.npz [--step N] [--output FILE.md]
    python -m benchmarks.papers.expert_placement --quick

The trace is the routing trace of SmartMoE (github thu-pacman/SmartMoE-AE, moe_trace) as a NumPy archive:
`iterations` [sample] and `tokens` [sample, layer, expert]. Nothing is trained or timed. A table is made of
the tokens of one sample, and gets those of the next.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.output import conditions, markdown_table, parse_options, show
from moe_ft.planning.experts import Counts
from moe_ft.planning.slot_tables import (
    Table,
    allocate,
    balanced,
    contiguous,
    count_moves,
    cut,
    imbalance,
    overlapping,
    recovery_probability,
    replicas_of,
    stock,
)

_MOST_DEAD = 5
_WEIGHT_BYTES, _GRADIENT_BYTES, _STATE_BYTES = 2, 4, 12  # of a parameter


class Shape(NamedTuple):
    """Ranks of a layer and slots of each."""

    num_ranks: int
    slots: int


# Models of the Lazarus paper: experts, layers and the step whose load is taken; 10 nodes of 6 slots, f = 2.
PAPER = {"GPT-S": (8, 12, 200), "GPT-L": (16, 12, 200), "GPT-L later": (16, 12, 2500)}
PAPER_SHAPE = Shape(10, 6)

Place = Callable[[Sequence[int], Shape], Table]


def eplb(load: Sequence[int], shape: Shape) -> Table:
    """Return the table of EPLB's global policy, written from its published description.

    A further replica goes to the expert with the most tokens for each replica. Replicas are then packed,
    those with the most tokens first, into the rank with the fewest tokens that has room.
    """
    counts = [1] * len(load)
    for _ in range(shape.num_ranks * shape.slots - len(load)):
        counts[max(range(len(load)), key=lambda each: load[each] / counts[each])] += 1
    rows: list[list[int]] = [[] for _ in range(shape.num_ranks)]
    work = [0.0] * shape.num_ranks
    for expert in sorted(range(len(load)), key=lambda each: -load[each] / counts[each]):
        for _ in range(counts[expert]):
            free = [rank for rank, row in enumerate(rows) if len(row) < shape.slots]
            rank = min(free, key=lambda each: work[each])
            rows[rank].append(expert)
            work[rank] += load[expert] / counts[expert]
    return tuple(map(tuple, rows))


def of_lazarus(minimum: int) -> Place:
    """Return the placement with Lazarus' replicas, and as equal work as can be."""
    return lambda load, shape: balanced(load, shape.num_ranks, shape.slots, minimum)


PLACEMENTS: dict[str, Place] = {
    "Lazarus, f = 1": of_lazarus(1),
    "Lazarus, f = 2": of_lazarus(2),
    "SYMI": lambda load, shape: contiguous(load, shape.num_ranks, shape.slots),
    "EPLB": eplb,
}


def spread(counts: Sequence[int], num_ranks: int) -> Table:
    """Return a table whose replicas go around the ranks, expert after expert."""
    dealt = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return tuple(tuple(dealt[rank::num_ranks]) for rank in range(num_ranks))


def compact(counts: Sequence[int], num_ranks: int) -> Table:
    """Return a table whose experts are on as few ranks as can be, one after the other."""
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return cut(experts, len(experts) // num_ranks)


@dataclass
class Played:
    """A layer of the trace played with one placement.

    Attributes:
        moves: from table to table: as ranks are numbered, and if only missing replicas move.
        copies: slots of experts with several replicas, whose gradients are summed.
    """

    imbalances: list[float]
    moves: list[tuple[int, int]]
    copies: list[int]


def play(loads: Sequence[Counts], place: Place, shape: Shape, found: Played) -> None:
    """Place the experts of a layer by one sample after the other."""
    previous: Table | None = None
    for load, following in zip(loads, loads[1:], strict=False):
        table = place(load.tolist(), shape)
        found.imbalances.append(imbalance(table, following.tolist()))
        counts = replicas_of(table, len(load)).sum(axis=1)
        found.copies.append(int(counts[counts > 1].sum()))
        if previous is not None:
            missing = counts - replicas_of(previous, len(load)).sum(axis=1)
            found.moves.append((count_moves(previous, table), int(missing.clip(min=0).sum())))
        previous = table


def shapes_of(num_experts: int) -> Iterator[Shape]:
    """Yield 8 and 16 ranks, or fewer, with E/N to 2E/N slots."""
    for num_ranks in (8, 16):
        least = num_experts // num_ranks
        for slots in sorted({least, least + max(1, least // 4), 3 * least // 2, 2 * least}):
            yield Shape(num_ranks, slots)


def trace_tables(tokens: Counts, parameters: int) -> list[str]:
    """Return the tables of imbalance, moves and bytes of the trace."""
    num_layers, num_experts = tokens.shape[1:]
    imbalances, moves, sent = [], [], []
    for shape in shapes_of(num_experts):
        fixed = stock(num_experts, shape.num_ranks)
        name = [f"{shape.num_ranks}", f"{shape.slots}"]
        base = [imbalance(fixed, row.tolist()) for sample in tokens[1:] for row in sample]
        line = [*name, _mean_and_high(base)]
        for label, place in PLACEMENTS.items():
            found = Played([], [], [])
            for layer in range(num_layers):
                play(list(tokens[:, layer]), place, shape, found)
            line.append(_mean_and_high(found.imbalances))
            num_slots = shape.num_ranks * shape.slots
            means = np.mean(found.moves, axis=0)
            moves.append([*name, f"{num_slots}", label, *(f"{each:.1f}" for each in means)])
            if label in ("Lazarus, f = 1", "SYMI") and shape.slots * shape.num_ranks > num_experts:
                sent.append([*name, label, *_bytes(shape, found, float(means[1]), parameters)])
        imbalances.append(line)
    return [
        "Tokens of the busiest rank over the mean: mean and 95th percentile over layers and samples",
        markdown_table(imbalances, ["ranks", "c", "stock EP, c = E/N", *PLACEMENTS]),
        "Replicas of a layer that change their rank from sample to sample",
        markdown_table(
            moves,
            [
                *("ranks", "c", "slots", "placement", "as numbered", "only missing ones"),
            ],
        ),
        f"MB that a rank sends for one layer and iteration, with experts of {parameters / 1e6:.3g}e6 "
        f"parameters, gradients of {_GRADIENT_BYTES} and weights of {_WEIGHT_BYTES} bytes of each, and "
        f"{_STATE_BYTES} of state that moves with the expert",
        markdown_table(
            sent,
            [
                *("ranks", "c", "placement", "homes, any table", "gradients of replicas"),
                *("and moves every iteration", "every 10", "every 200"),
            ],
        ),
    ]


def _bytes(shape: Shape, found: Played, moves: float, parameters: int) -> list[str]:
    """Return the bytes of homes, and those of experts that are moved with their state."""
    others = (shape.num_ranks - 1) / shape.num_ranks
    homes = shape.slots * parameters * (_GRADIENT_BYTES + _WEIGHT_BYTES) * others
    # At most: a ring over r replicas sends 2 (r - 1) / r of the gradients from each.
    copies = float(np.mean(found.copies)) / shape.num_ranks
    summed = 2 * copies * parameters * _GRADIENT_BYTES * others
    moved = moves / shape.num_ranks * parameters * (_STATE_BYTES + _WEIGHT_BYTES)
    numbers = (homes, summed, *(summed + moved / every for every in (1, 10, 200)))
    return [f"{each / 1e6:,.0f}" for each in numbers]


def _mean_and_high(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f} ({np.percentile(values, 95):.2f})"


def survival_table(iterations: Sequence[int], tokens: Counts, num_layers: int | None) -> str:
    """Return how likely all experts have a live replica after the loss of nodes, by placement."""
    rows = []
    for model, (num_experts, layers, step) in PAPER.items():
        sample = int(np.abs(np.array(iterations) - step).argmin())
        # The most loaded experts of each layer, as the paper makes its trace; of every second layer.
        loads = -np.sort(-tokens[sample][:: len(tokens[sample]) // layers or 1], axis=1)
        for name, place in {
            "maximum rank overlap": overlapping,
            "spread": spread,
            "compact": compact,
        }.items():
            tables = []
            for load in loads[: num_layers or layers]:
                slots = PAPER_SHAPE.num_ranks * PAPER_SHAPE.slots
                counts = allocate(load[:num_experts].tolist(), slots, 2)
                tables.append(place(counts, PAPER_SHAPE.num_ranks))
            cells = []
            for dead in range(1, _MOST_DEAD + 1):
                single = np.mean([recovery_probability([each], dead) for each in tables])
                cells.append(f"{recovery_probability(tables, dead):.0%} ({single:.0%})")
            rows.append([model, f"{step}", name, *cells])
    dead_of = [f"{dead} dead" for dead in range(1, _MOST_DEAD + 1)]
    return markdown_table(rows, ["model", "step", "placement", *dead_of])


def load_trace(path: Path | None) -> tuple[list[int], Counts]:
    """Return the iterations of samples, and ``[sample, layer, expert]`` tokens: made up without a path."""
    if path is None:
        drawn = np.random.default_rng(0).zipf(1.5, (3, 24, 32)).clip(max=1000)
        return [1, 200, 2500], drawn.astype(np.int64)
    with np.load(path) as file:
        return file["iterations"].tolist(), file["tokens"].astype(np.int64)


def main() -> None:
    """Count and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE.npz")
    parser.add_argument("--every", type=int, default=5, help="samples from one pair to the next")
    parser.add_argument("--layers", type=int, default=None, help="of the trace that are played")
    parser.add_argument("--parameters", type=int, default=44_040_192, help="of an expert")
    options = parse_options(parser, every=1, layers=2)
    if not (options.trace or options.quick):
        parser.error("TRACE.npz is missing: only --quick makes up its own routing")
    iterations, tokens = load_trace(options.trace)
    played = tokens[:: options.every, : options.layers]
    about = conditions(
        f"{len(played)} samples, from iteration {iterations[0]} to {iterations[-1]}, of "
        f"{played.shape[1]} layers with {played.shape[2]} experts."
    )
    parts = [about, *trace_tables(played, options.parameters)]
    parts += [
        "Chance that every expert has a live replica: of all layers together (mean of single layers)",
        survival_table(iterations, tokens, options.layers),
    ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
