"""Figures of the papers that calculation can reach, ours beside theirs, and why the others cannot be.

    python -m benchmarks.paper_tables [--output docs/results/reproduction.md]

The papers are MoEvement, MoC-System, MoEtion and Lazarus. A parameter that a paper does not print is fitted
once for a table and named as fitted, never for a cell. benchmarks/paper_ettr.py has the tables of ETTR;
windows and sizes are those of benchmarks/sparse_figures.py and benchmarks/partial_sizes.py.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence

from benchmarks import partial_sizes, sparse_figures
from benchmarks.output import markdown_table, parse_options, show
from benchmarks.paper_ettr import Cell, cells, ettr_parts
from benchmarks.paper_models import ModelShape

Row = tuple[object, ...]

# Experts, layers and width of Lazarus' models (its Table 1), and the parameters that it prints.
_LAZARUS = {
    "GPT-S": (8, 12, 768, 521e6),
    "GPT-M": (12, 12, 1024, 1.3e9),
    "GPT-L": (16, 12, 1024, 1.7e9),
}
# Lazarus, Fig. 4, plan A: nodes of each expert. Its text prints the pairs that survive, not the placement.
SPREAD = ({0, 1}, {1, 2, 3}, {0, 3, 4}, {0, 1, 2, 3, 4})
_SKEWNESS = {0.25: 0.0469, 0.5: 0.0156, 0.75: 0.0052, 0.99: 0.000158}  # MoEvement, Appendix D

# Figures that cannot be calculated: papers and places, and the reason.
NOT_REACHED: tuple[Row, ...] = (
    ("MoEvement", "Table 1", "judgements, no figures"),
    ("MoEvement", "Table 2, sections 5.1, 5.7, 4", "settings: what calculations begin with"),
    (
        "MoEvement",
        "Table 3, MoC-System below 2 h",
        "the overheads, which grow with each failure, are not legible",
    ),
    ("MoEvement", "Table 3, Gemini's intervals", "not legible, but for DeepSeek-MoE in the text"),
    (
        "MoEvement",
        "Tables 3 and 7, recovery times",
        "measured; what its own E[R] gives is 4 to 7 times more",
    ),
    ("MoEvement", "Table 5, Fig. 4, 12", "quality of trained models, routing in training"),
    ("MoEvement", "Table 6, logs", "batches and widths of the models are not printed"),
    (
        "MoEvement",
        "Fig. 1",
        "Gemini's best intervals are not printed; contradicts Table 3 (0.79 against 0.853)",
    ),
    (
        "MoEvement",
        "section 5.3, GCP trace",
        "the six hours of the trace that were used are not printed",
    ),
    (
        "MoEvement",
        "Fig. 11, Gemini; Fig. 13, 16",
        "iteration times, overheads and intervals are not printed",
    ),
    ("MoEvement", "abstract, 31x, 18x, 17x recovery", "no two cells of its tables give these"),
    ("MoEvement", "sections 3.2 to 3.6, thresholds", "choices of the authors, or measured"),
    (
        "MoC-System",
        "Tables 1 (Swin) and 2",
        "settings; widths of the stages of SwinV2 are not all printed",
    ),
    (
        "MoC-System",
        "Tables 3 and 4, accuracy; Fig. 5, 14; section 6.3",
        "quality of trained models",
    ),
    (
        "MoC-System",
        "Fig. 11, 12; 98.9 %, 5.12x, overlaps",
        "times of its cluster, none of which is printed",
    ),
    (
        "MoC-System",
        "Fig. 13, scaling",
        "tokens and experts of a GPU are not printed, and both overlaps need them",
    ),
    (
        "MoC-System",
        "PLT 3.75 %",
        "one measurement; 1,280 iterations, which it does not print, give it exactly",
    ),
    ("MoEtion", "Table 1, Fig. 3, 8, 11", "quality of trained models, routing in training"),
    ("MoEtion", "Fig. 5, 7, 10; B_local 109 GB; 12x", "measured; iteration times are not printed"),
    (
        "MoEtion",
        "46.7B of the 3.8B model, 85 %",
        "contradict its own sizes (at most 30.4B; 96.4 %)",
    ),
    ("MoEtion", "sections 4.1 to 6, 7.1", "settings and thresholds of the authors"),
    ("Lazarus", "Table 2, Fig. 2, 6, 7, 9, 10; 5.7x, 3.4x, 2.3x", "measured on its testbed"),
    (
        "Lazarus",
        "Fig. 8, 41 % and 12 %",
        "the loads of its run and the order of nodes are not printed",
    ),
    (
        "Lazarus",
        "spot trace, 80 minutes",
        "which 80 minutes is not printed; its throughput on fewer nodes neither",
    ),
    (
        "ReCycle",
        "normalised throughput",
        "no figure of it is among ours: only its abstract was at hand",
    ),
)


def _row(
    place: str, what: str, ours: float, paper: float, form: str = ".1f", note: str = ""
) -> Row:
    return place, what, f"{ours:{form}}", f"{paper:{form}}", f"{ours - paper:+{form}}", note


def moevement_rows() -> Iterator[Row]:
    """Yield figures of MoEvement that follow from its text and tables."""
    yield _row("3.2", "frozen operator, % less", 100 * (1 - 2 / 12), 83)
    yield _row(
        "Fig. 6", "first sparse snapshot, % less", 100 * (1 - 32 / 72), 55, note="the mean is 61.1"
    )
    yield _row("5.7", "low precision, % less", 100 * (1 - 4 / 12), 66)
    yield _row("Fig. 9", "from logging, %", 100 * 2 / 8, 23, note="6 micro-batches; 7 give 22.2")
    yield _row("3.5", "frozen experts, % less", 100 / 3, 33, note="one of three products")
    yield _row("3.6", "checkpoints, times as often", 78 / 3, 26)
    for skewness, alpha in _SKEWNESS.items():
        ours = (1 / skewness - 1) / 64
        yield _row(
            "App. D", f"alpha at S = {skewness}", ours, alpha, ".3g", "E[S] = 1 / (64 alpha + 1)"
        )
    ettr = {(each.system, each.case.name, each.mtbf_s): each.ettr for each in cells("table 3")}
    models = dict.fromkeys(each.case.name for each in cells("table 3"))
    for system, printed in (("CheckFreq", 1.4), ("Gemini", 1.3), ("MoC", 7.1)):
        most = max(ettr["MoEvement", name, 600] / ettr[system, name, 600] for name in models)
        yield _row(
            "5.2", f"faster than {system} at 10 min", most, printed, note="quotients of its Table 3"
        )
    low = {(each.system, each.case.name, each.mtbf_s): each.ettr for each in cells("table 7")}
    most = max(low["MoEvement", name, 600] / low["MoC", name, 600] for _, name, _ in low)
    yield _row("abstract", "faster, at most", most, 8, note="quotients of its Table 7")
    yield _row("Fig. 11", "faster than Gemini, 671B, 10 min", 0.86 / 0.55, 1.55, ".2f")


def overhead_rows() -> tuple[float, float, float, list[Row]]:
    """Return GB/s and shares of it, and MoC-System's overheads in MoEvement's Table 7 with these three."""
    own = [each for each in cells("table 7") if each.system == "MoC"]
    size = {each.case.name: sum(each.case.sizes[1:]) * each.case.total for each in own}  # GB
    last = [each for each in own if each.mtbf_s == 600]
    # overhead + T = size / bandwidth (MoC-System, equation 10)
    seconds = [(each.overhead_s or 0.0) + each.case.iteration_s for each in last]
    sizes = [size[each.case.name] for each in last]
    inverse = _slope(sizes, seconds)
    shares = {600.0: 1.0}

    def full_s(cell: Cell) -> float:
        return size[cell.case.name] * inverse - cell.case.iteration_s

    for mtbf_s in (3600.0, 1800.0):
        at = [each for each in own if each.mtbf_s == mtbf_s]
        shares[mtbf_s] = _slope(
            [full_s(each) for each in at], [each.overhead_s or 0.0 for each in at]
        )
    rows = [
        _row(
            each.case.name,
            f"{each.mtbf_s / 60:g} min",
            shares[each.mtbf_s] * full_s(each),
            each.overhead_s or 0.0,
            ".2f",
        )[:5]
        for each in own
    ]
    return 1 / inverse, shares[3600.0], shares[1800.0], rows


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the factor from x to y that fits best."""
    return sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)


def moetion_rows() -> Iterator[Row]:
    """Yield sizes of MoEtion, with its 10 bytes of a parameter."""
    # 1.6e9 of the dense model, of which one expert's layers are (58.7 - 1.6) / 63.
    expert = (58.7 - 1.6) / 63
    rest = 58.7 - 64 * expert
    selected = 10 * (rest + 6 * expert)
    yield _row("Fig. 4", "full checkpoint, GB", 58.7 * 10, 587)
    yield _row("Fig. 4", "selective, GB", selected, 61, note="6 of 64 experts: the nearest")
    yield _row("abstract", "times smaller", 587 / selected, 9)
    # 46.7 at 8 experts and 182 at 32 are on one line.
    expert = (182 - 46.7) / 24
    rest = 182 - 32 * expert
    yield _row(
        "Fig. 9", "32 experts, selective, GB", 10 * (rest + 3 * expert), 195, note="3 of 32 experts"
    )
    yield _row("4.1", "% less, at most", 85 * 14 / 16, 75, note="2 of 16 experts, 85 % in experts")
    yield _row("5.2", "gradients alone, times less", (2 + 8) / 2, 5)
    yield _row(
        "abstract", "as often as Gemini, times", 100 / 6, 15, note="100 and 6 of 100 iterations"
    )
    yield _row("1", "as often as CheckFreq, times", 100 / 2, 50)


def lazarus_rows() -> Iterator[Row]:
    """Yield parameters, sizes and odds of Lazarus."""
    for name, (num_experts, num_layers, hidden, printed) in _LAZARUS.items():
        shape = ModelShape(
            num_layers=num_layers,
            hidden_size=hidden,
            num_experts=num_experts,
            moe_layers=tuple(range(num_layers)),
        )
        yield _row(
            "Table 1", f"{name}, parameters, 1e6", shape.num_parameters / 1e6, printed / 1e6, ".0f"
        )
        if name != "GPT-M":
            size = 14 * shape.expert_parameters / 2**20
            yield _row("6.3", f"{name}, an expert, MiB", size, 63 if name == "GPT-S" else 112)
    for plan, places, printed, note in (
        ("A: spread", SPREAD, 5, "one of the placements that leave the 5 pairs which it prints"),
        (
            *("B: the rarest expert's nodes have all", ({0, 1}, {0, 1, 2}, {0, 1, 3}, {0, 1, 4})),
            *(7, "1 - C(3,2) / C(5,2)"),
        ),
    ):
        odds = len(surviving_pairs(places))
        yield _row("Fig. 4", f"{plan}, survivals of 10", odds, printed, ".0f", note)


def surviving_pairs(places: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Return the pairs of five nodes that have all experts, given the nodes of each expert."""
    pairs = itertools.combinations(range(5), 2)
    return [pair for pair in pairs if all({*pair} & nodes for nodes in places)]


def _windows() -> list[Row]:
    bandwidth = sparse_figures.BANDWIDTHS[0]
    found = list[Row]()
    for table, cases in ((3, sparse_figures.TABLE_3), (7, sparse_figures.TABLE_7)):
        for case in cases:
            printed = sparse_figures.printed_window(case, bandwidth)
            own = sparse_figures.own_window(case, bandwidth)
            found.append(
                (
                    f"Table {table}",
                    case.name,
                    printed,
                    own,
                    case.window,
                    f"{printed - case.window:+d}",
                )
            )
    return found


def _count_right(rows: Sequence[Row]) -> str:
    return f"{sum(row[2] == row[4] for row in rows)} of {len(rows)}"


def parts() -> list[str]:
    """Return all paragraphs and tables."""
    headers = ("place", "what", "ours", "paper", "deviation", "")
    windows, (speed, hour, half, overheads) = _windows(), overhead_rows()
    memory = ("model", "W", "Gemini: 26", "X", "26 + (W-1)", "24 + 2(W-1)", "as cut", "26 + 2(W-1)")
    return [
        "## MoEvement",
        *ettr_parts(),
        "Other figures",
        markdown_table(moevement_rows(), headers),
        f"W_sparse with Algorithm 1 as printed, {_count_right(windows)}. One bandwidth is fitted to all: "
        f"{sparse_figures.BANDWIDTHS[0]} GB/s.",
        markdown_table(
            windows, ("place", "model", "Algorithm 1", "our windows", "paper", "deviation")
        ),
        "Table 6, host memory in bytes per parameter",
        markdown_table(sparse_figures.memory_rows(), memory),
        f"Table 7, overhead of MoC-System in seconds. Fitted: {speed:.2f} GB/s for the whole model, and "
        f"{hour:.3f} and {half:.3f} of the overhead at 10 minutes.",
        markdown_table(overheads, ("model", "MTBF", "ours", "paper", "deviation")),
        "## MoC-System",
        markdown_table(partial_sizes.model_rows(), ("what", "ours", "paper", "verdict")),
        "Fig. 10a: a checkpoint with k experts, % of a full one. The printed figure follows if the master "
        "weights of all experts are saved.",
        markdown_table(
            (row for row in partial_sizes.size_rows() if row[2] == 1),
            ("model", "bytes", "k", "MB", "%", "paper", "verdict"),
        ),
        "Table 3, relative sizes at k = 1",
        markdown_table(
            partial_sizes.table_3_rows(),
            ("experts left out of", "paper", "eq. 6", "verdict", "master in full", "verdict"),
        ),
        "Fig. 10b to d, % less than the bottleneck without sharding, over the cases",
        markdown_table(
            partial_sizes.range_rows(),
            ("sharding", "bytes", "k", "unit", "ours, %", "paper, %", "lower end", "upper end"),
        ),
        "## MoEtion",
        markdown_table(moetion_rows(), headers),
        "## Lazarus",
        markdown_table(lazarus_rows(), headers),
        "## Not reached",
        markdown_table(NOT_REACHED, ("paper", "figures", "reason")),
    ]


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options = parse_options(parser)
    show(parts(), options.output)


if __name__ == "__main__":
    main()
