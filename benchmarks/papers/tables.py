"""Figures of the papers that calculation can reach, ours beside theirs.

    python -m benchmarks.papers.tables [--output docs/results/reproduction.md]

The papers are MoEvement, MoC-System, MoEtion and Lazarus. A parameter that a paper does not print is fitted
once for a table and named as fitted, never for a cell. ettr.py has the tables of ETTR; windows and sizes are
those of windows.py and sizes.py. docs/results/not_reached.md has the other figures.
"""

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.output import markdown_table, read_options, show
from benchmarks.papers import moevement, sizes
from benchmarks.papers.ettr import ettr_parts
from benchmarks.papers.models import ModelShape, Sharding
from benchmarks.papers.moevement import Row, deviation_row
from benchmarks.papers.sizes import PaperLayout, checkpoint_bytes, paper_workload
from benchmarks.papers.windows import BANDWIDTH, memory_rows

# Experts, layers and width of Lazarus' models (its Table 1), and the parameters that it prints.
_LAZARUS = {
    "GPT-S": (8, 12, 768, 521e6),
    "GPT-M": (12, 12, 1024, 1.3e9),
    "GPT-L": (16, 12, 1024, 1.7e9),
}
# Lazarus, Fig. 4, plan A: nodes of each expert. Its text prints the pairs that survive, not the placement.
SPREAD = ({0, 1}, {1, 2, 3}, {0, 3, 4}, {0, 1, 2, 3, 4})
# Lazarus and GPT-2: 1024 tokens, and as many positions.
_LAZARUS_POSITIONS = 1024
# MoC-System, section 6.2.4: width by size, seconds of a GB to the host by device.
_SCALED_WIDTHS = {"Small": 1024, "Medium": 2048, "Large": 3072}
_GB_PER_S = {"A800": 1, "H100": 2}


def moetion_rows() -> Iterator[Row]:
    """Yield sizes of MoEtion, with its 10 bytes of a parameter."""
    # 1.6e9 of the dense model, of which one expert's layers are (58.7 - 1.6) / 63.
    expert = (58.7 - 1.6) / 63
    rest = 58.7 - 64 * expert
    selected = 10 * (rest + 6 * expert)
    yield deviation_row("Fig. 4", "full checkpoint, GB", 58.7 * 10, 587)
    yield deviation_row(
        "Fig. 4", "selective, GB", selected, 61, note="6 of 64 experts: the nearest"
    )
    yield deviation_row("abstract", "times smaller", 587 / selected, 9)
    # 46.7 at 8 experts and 182 at 32 are on one line.
    expert = (182 - 46.7) / 24
    rest = 182 - 32 * expert
    yield deviation_row(
        "Fig. 9", "32 experts, selective, GB", 10 * (rest + 3 * expert), 195, note="3 of 32 experts"
    )
    yield deviation_row(
        "4.1", "% less, at most", 85 * 14 / 16, 75, note="2 of 16 experts, 85 % in experts"
    )
    yield deviation_row("5.2", "gradients alone, times less", (2 + 8) / 2, 5)
    yield deviation_row(
        "abstract", "as often as Gemini, times", 100 / 6, 15, note="100 and 6 of 100 iterations"
    )
    yield deviation_row("1", "as often as CheckFreq, times", 100 / 2, 50)


def lazarus_rows() -> Iterator[Row]:
    """Yield parameters, sizes and odds of Lazarus."""
    for name, (num_experts, num_layers, hidden, printed) in _LAZARUS.items():
        shape = ModelShape(
            num_layers=num_layers,
            hidden_size=hidden,
            num_experts=num_experts,
            moe_layers=tuple(range(num_layers)),
            num_positions=_LAZARUS_POSITIONS,
        )
        yield deviation_row(
            "Table 1", f"{name}, parameters, 1e6", shape.num_parameters / 1e6, printed / 1e6, ".0f"
        )
        if name != "GPT-M":
            size = 14 * shape.expert_parameters / 2**20
            yield deviation_row(
                "6.3", f"{name}, an expert, MiB", size, 63 if name == "GPT-S" else 112
            )
    for plan, places, printed, note in (
        ("A: spread", SPREAD, 5, "one of the placements that leave the 5 pairs which it prints"),
        (
            *("B: the rarest expert's nodes have all", ({0, 1}, {0, 1, 2}, {0, 1, 3}, {0, 1, 4})),
            *(7, "1 - C(3,2) / C(5,2)"),
        ),
    ):
        odds = len(surviving_pairs(places))
        yield deviation_row("Fig. 4", f"{plan}, survivals of 10", odds, printed, ".0f", note)


def surviving_pairs(places: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Return the pairs of five nodes that have all experts, given the nodes of each expert."""
    pairs = itertools.combinations(range(5), 2)
    return [pair for pair in pairs if all({*pair} & nodes for nodes in places)]


def scaling_rows() -> Iterator[Row]:
    """Yield snapshots and checkpoints of MoC-System's Fig. 13, with both ways of counting bytes.

    All 24 layers have experts, gated ones, and 32,000 words: LLaMA's, neither of which the paper prints.
    """
    for name, num_gpus in (
        ("Medium", 64),
        ("Medium", 256),
        ("Medium", 1024),
        ("Small", 256),
        ("Large", 256),
    ):
        width = _SCALED_WIDTHS[name]
        shape = ModelShape(
            num_layers=24,
            hidden_size=width,
            num_experts=num_gpus,
            moe_layers=tuple(range(24)),
            ffn_hidden_size=6 * width,  # three matrices of 4 x width have as many as two of 6
            vocab_size=32000,
            num_positions=0,
            has_bias=False,
        )
        snapshots, files = list[list[float]](), list[float]()
        for k, sharding in ((num_gpus, Sharding.NONE), (num_gpus // 8, Sharding.ADAPTIVE)):
            layout = PaperLayout(dp=num_gpus, ep=num_gpus, sharding=sharding)
            models = list(sizes.BYTE_MODELS.values())
            each = [
                paper_workload(shape, k, model, layout).bottleneck_bytes / 1e9 for model in models
            ]
            snapshots.append(each)
            files += [checkpoint_bytes(shape, k, model) / 1e12 for model in models]
        (full, _), partial = snapshots
        yield (
            name,
            f"{num_gpus:,}",
            f"{shape.num_parameters / 1e9:,.0f}",
            *(f"{full / speed:.1f}" for speed in _GB_PER_S.values()),
            *(
                " / ".join(f"{size / speed:.1f}" for size in partial)
                for speed in _GB_PER_S.values()
            ),
            f"{files[0]:.2f}",
            f"{files[2]:.2f} / {files[3]:.2f}",
        )


def parts() -> list[str]:
    """Return all paragraphs and tables."""
    headers = ("place", "what", "ours", "paper", "deviation", "")
    windows, (speed, hour, half, overheads) = moevement.windows(), moevement.overhead_rows()
    memory = ("model", "W", "Gemini: 26", "X", "26 + (W-1)", "24 + 2(W-1)", "as cut", "26 + 2(W-1)")
    return [
        "## MoEvement",
        *ettr_parts(),
        "Other figures",
        markdown_table(moevement.moevement_rows(), headers),
        f"W_sparse with Algorithm 1 as printed, {moevement.count_right(windows)}. One bandwidth is fitted to "
        f"all: {BANDWIDTH} GB/s.",
        markdown_table(
            windows, ("place", "model", "Algorithm 1", "our windows", "paper", "deviation")
        ),
        "Table 6, host memory in bytes per parameter",
        markdown_table(memory_rows(), memory),
        f"Table 7, overhead of MoC-System in seconds. Fitted: {speed:.2f} GB/s for the whole model, and "
        f"{hour:.3f} and {half:.3f} of the overhead at 10 minutes.",
        markdown_table(overheads, ("model", "MTBF", "ours", "paper", "deviation")),
        "## MoC-System",
        markdown_table(sizes.model_rows(), ("what", "ours", "paper", "verdict")),
        "Fig. 10a: a checkpoint with k experts, % of a full one. The printed figure follows if the master "
        "weights of all experts are saved.",
        markdown_table(
            sizes.size_rows(),
            ("model", "bytes", "k", "MB", "%", "paper", "verdict"),
        ),
        "Table 3, relative sizes at k = 1",
        markdown_table(
            sizes.table_3_rows(),
            ("experts left out of", "paper", "eq. 6", "verdict", "master in full", "verdict"),
        ),
        "Fig. 10b to d, % less than the bottleneck without sharding, over the cases",
        markdown_table(
            sizes.range_rows(),
            ("sharding", "bytes", "k", "unit", "ours, %", "paper, %", "lower end", "upper end"),
        ),
        "What moe_ft saves of these models: 12 bytes of a parameter, of each rank what it owns. With the "
        "distributed optimizer an expert lies on one rank or two, and --moe-ft-sharding changes nothing",
        markdown_table(
            sizes.training_rows(),
            (
                *("model", "case", "k", "MB", "mean of a rank, MB", "bottleneck, MB"),
                *(f"not distributed, {sharding}, MB" for sharding in Sharding),
            ),
        ),
        "Fig. 13: seconds of a snapshot (a to e) and TB of a checkpoint (f), which the paper only draws. 1/8 "
        "of the experts of a layer: eq. 6 / master in full. Assumed are gated experts in all layers and "
        "32,000 words, as LLaMA has.",
        markdown_table(
            scaling_rows(),
            (
                *("size", "GPUs", "1e9 parameters", "Base-Async, A800", "H100"),
                *("MoC-Async, A800", "H100", "all, TB", "1/8, TB"),
            ),
        ),
        "## MoEtion",
        markdown_table(moetion_rows(), headers),
        "## Lazarus",
        markdown_table(lazarus_rows(), headers),
    ]


def main() -> None:
    """Print the page."""
    options = read_options()
    show(parts(), options.output)


if __name__ == "__main__":
    main()
