"""Figures of MoEvement that follow from its text and tables: ratios, logs, windows, overheads.

ettr.py has its tables of ETTR, windows.py its windows and host memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.papers.ettr import Cell, cells, from_formulas
from benchmarks.papers.windows import TABLE_3, TABLE_7, own_window, printed_window
from moe_ft.planning.boundary_log import PipelineTraffic

Row = tuple[object, ...]

# MoEvement, section 5.1: stages of models that train with batches of 512 x 2048 tokens, 32 in a micro-batch;
# Table 6, Y, in GB. Their width, which is not printed, is that of the published models.
_LOGS = {"QWen-MoE": (6, 12.4), "DeepSeek-MoE": (12, 21.1)}
_LOGGED_BATCHES, _LOGGED_SHAPE = 512 // 32, (2048, 32, 2048)
# Fig. 13
_SPARSE_ALONE = {"MoE-LLaVa": 0.57, "GPT-MoE": 0.43, "QWen-MoE": 0.37, "DeepSeek-MoE": 0.49}
_GCP_MTBF_S = 19 * 60  # section 5.3
_SKEWNESS = {0.25: 0.0469, 0.5: 0.0156, 0.75: 0.0052, 0.99: 0.000158}  # MoEvement, Appendix D


def deviation_row(
    place: str, what: str, ours: float, paper: float, form: str = ".1f", note: str = ""
) -> Row:
    """Return ours beside theirs, and the deviation."""
    return place, what, f"{ours:{form}}", f"{paper:{form}}", f"{ours - paper:+{form}}", note


def moevement_rows() -> Iterator[Row]:
    """Yield figures of MoEvement that follow from its text and tables."""
    yield deviation_row("3.2", "frozen operator, % less", 100 * (1 - 2 / 12), 83)
    yield deviation_row(
        "Fig. 6", "first sparse snapshot, % less", 100 * (1 - 32 / 72), 55, note="the mean is 61.1"
    )
    yield deviation_row("5.7", "low precision, % less", 100 * (1 - 4 / 12), 66)
    yield deviation_row(
        "Fig. 9", "from logging, %", 100 * 2 / 8, 23, note="6 micro-batches; 7 give 22.2"
    )
    yield deviation_row("3.5", "frozen experts, % less", 100 / 3, 33, note="one of three products")
    yield deviation_row("3.6", "checkpoints, times as often", 78 / 3, 26)
    for skewness, alpha in _SKEWNESS.items():
        ours = (1 / skewness - 1) / 64
        yield deviation_row(
            "App. D", f"alpha at S = {skewness}", ours, alpha, ".3g", "E[S] = 1 / (64 alpha + 1)"
        )
    yield from _recovery_rows()
    for name, (num_stages, printed) in _LOGS.items():
        traffic = PipelineTraffic(
            num_stages=num_stages,
            num_chunks=1,
            num_microbatches=_LOGGED_BATCHES,
            shape=_LOGGED_SHAPE,
            element_bytes=2,
        )
        ours = sum(map(traffic.sent_bytes, range(num_stages))) / 1e9
        note = "contradicts: one iteration alone, of the W and more that are kept; width 2048"
        yield deviation_row("Table 6", f"Y, logs of {name}, GB", ours, printed, note=note)
    ettr = {(each.system, each.case.name, each.mtbf_s): each.ettr for each in cells("table 3")}
    models = dict.fromkeys(each.case.name for each in cells("table 3"))
    for system, printed in (("CheckFreq", 1.4), ("Gemini", 1.3), ("MoC", 7.1)):
        most = max(ettr["MoEvement", name, 600] / ettr[system, name, 600] for name in models)
        yield deviation_row(
            "5.2", f"faster than {system} at 10 min", most, printed, note="quotients of its Table 3"
        )
    low = {(each.system, each.case.name, each.mtbf_s): each.ettr for each in cells("table 7")}
    most = max(low["MoEvement", name, 600] / low["MoC", name, 600] for _, name, _ in low)
    yield deviation_row("abstract", "faster, at most", most, 8, note="quotients of its Table 7")
    yield deviation_row("Fig. 11", "faster than Gemini, 671B, 10 min", 0.86 / 0.55, 1.55, ".2f")
    for cell in cells("table 3"):
        if cell.system == "MoEvement" and cell.mtbf_s == 600:
            ours, printed = from_formulas(cell) or 0.0, _SPARSE_ALONE[cell.case.name]
            note = "contradicts: at 10 min, the shortest MTBF; that of the figure is not printed"
            yield deviation_row(
                "Fig. 13", f"sparse windows alone, {cell.case.name}", ours, printed, ".2f", note
            )
    yield from _trace_rows()


def _recovery_rows() -> Iterator[Row]:
    """Yield how much faster than other systems MoEvement recovers: 5.2 and the abstract, from Table 3."""
    total = {
        (each.system, each.case.name, each.mtbf_s): each.total_s or 0.0 for each in cells("table 3")
    }
    times = {
        system: {
            (name, mtbf_s): total[system, name, mtbf_s] / total["MoEvement", name, mtbf_s]
            for other, name, mtbf_s in total
            if other == system
        }
        for system in ("CheckFreq", "Gemini")
    }
    for system, printed in (("CheckFreq", 31), ("Gemini", 18)):
        found = sorted(times[system].values())
        note = f'contradicts "up to": quotients of its Table 3, {found[0]:.1f} to {found[-1]:.1f}'
        yield deviation_row(
            "5.2", f"recovers faster than {system}, at most", found[-1], printed, note=note
        )
    for place, name, mtbf_s, printed in (
        ("abstract", "GPT-MoE", 1200, 31),
        ("5.2", "DeepSeek-MoE", 1800, 18),
        ("1", "QWen-MoE", 600, 17),
    ):
        whole, part = total["Gemini", name, mtbf_s], total["MoEvement", name, mtbf_s]
        note = f"{whole:.0f} / {part:.0f} s: {name}, {mtbf_s / 60:g} min"
        yield deviation_row(
            place, "Gemini's recoveries, times as long", whole / part, printed, note=note
        )


def _trace_rows() -> Iterator[Row]:
    """Yield the gains in goodput under the GCP trace, by ETTR at its MTBF."""
    own = {
        (each.system, each.mtbf_s): each
        for each in cells("table 3")
        if each.case.name == "DeepSeek-MoE"
    }
    share = (_GCP_MTBF_S - 600) / 600

    def printed_ettr(system: str) -> float:
        return share * own[system, 1200].ettr + (1 - share) * own[system, 600].ettr

    def formula(system: str) -> float:
        return from_formulas(replace(own[system, 7200], mtbf_s=_GCP_MTBF_S)) or 0.0

    for system, printed in (("CheckFreq", 1.25), ("Gemini", 1.15)):
        for ettr, note in (
            (printed_ettr, "ETTR of its Table 3 between 20 and 10 min"),
            (formula, "from intervals 124 and 92, windows and overheads alone, without a restart"),
        ):
            what = f"goodput against {system}, MTBF 19 min"
            yield deviation_row("5.3", what, ettr("MoEvement") / ettr(system), printed, ".2f", note)


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
        deviation_row(
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


def windows() -> list[Row]:
    """Return W_sparse of Tables 3 and 7: Algorithm 1, ours, printed."""
    found = list[Row]()
    for table, cases in ((3, TABLE_3), (7, TABLE_7)):
        for case in cases:
            printed, own = printed_window(case), own_window(case)
            deviation = f"{printed - case.window:+d}"
            found.append((f"Table {table}", case.name, printed, own, case.window, deviation))
    return found


def count_right(rows: Sequence[Row]) -> str:
    """Return how many windows Algorithm 1 gives as printed."""
    return f"{sum(row[2] == row[4] for row in rows)} of {len(rows)}"
