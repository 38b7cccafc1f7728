"""Plots of the tables in docs/benchmarks: medians as bars or points, ranges as lines."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.pictures.svg import Drawing

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
_NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
_RANGE = re.compile(rf"({_NUMBER})(?: \(({_NUMBER}) to ({_NUMBER})\))?")
_NUMBERS = 180  # pixels for the number behind the longest bar
Row = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A number of a table: median or mean, its range, and its cell."""

    text: str
    middle: float
    low: float
    high: float


def tables_of(page: str) -> list[list[Row]]:
    """Return the tables of a page, each as rows by column name; of equal names the first counts."""
    tables: list[list[Row]] = []
    header: list[str] = []
    for line in (PAGES / page).read_text().splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
            tables.append([])
        elif set(line) - set("|-: "):
            tables[-1].append(dict(reversed(list(zip(header, cells, strict=True)))))
    return tables


def table_with(page: str, *columns: str) -> list[Row]:
    """Return the first table of a page that has these columns.

    Raises:
        LookupError: if none has: then the page has changed, and the plot must follow.
    """
    for table in tables_of(page):
        if {*columns} <= {*table[0]}:
            return table
    raise LookupError(f"no table of {page} has the columns {', '.join(columns)}")


def measured(cell: str) -> Measured:
    """Return the number in a cell such as ``1.21 (1.10 to 1.59)``."""
    found = _RANGE.match(cell)
    if found is None:
        raise LookupError(f"{cell!r} is no measured number")
    middle = float(found[1].replace(",", ""))
    return Measured(
        text=cell,
        middle=middle,
        low=float((found[2] or found[1]).replace(",", "")),
        high=float((found[3] or found[1]).replace(",", "")),
    )


def _draw_bars(
    drawing: Drawing,
    rows: Iterable[tuple[str, Measured, str]],
    *,
    top: float,
    left: float,
    longest: float,
    marks: Sequence[float] = (),
) -> None:
    """Draw one bar for each row, its range as a line, a mark if there is one, and its number at the end."""
    right = drawing.width - _NUMBERS
    for index, (label, value, fill) in enumerate(rows):
        y = top + index * 24
        x = [
            left + (right - left) * max(0, at) / longest
            for at in (value.low, value.middle, value.high)
        ]
        drawing.text(left - 10, y + 14, label, size=12, anchor="end")
        drawing.box(left, y + 2, max(1.5, x[1] - left), 16, fill, radius=2)
        drawing.path([(x[0], y + 10), (x[2], y + 10)], "strong")
        end = x[2]
        if index < len(marks):
            mark = left + (right - left) * marks[index] / longest
            drawing.box(mark - 1.5, y, 3, 20, "red", radius=0)
            end = max(end, mark + 2)
        drawing.text(end + 8, y + 14, value.text, ink="soft", size=11)


_KINDS = {
    "restart": ("restart by torchrun", "empty"),
    "restart, keep": ("restart, moe_ft keep", "pale"),
    "repair": ("repair in place", "blue"),
    "repair, whole survivors, sparse": ("repair, sparse", "blue"),
    "NVRx in-process": ("NVRx in-process", "sand"),
    "NVRx in-process, 0.1 s": ("NVRx, 0.1 s intervals", "sand"),
}


def plot_recovery_time() -> Drawing:
    """Plot the seconds from a kill until a new iteration has ended, by kind of answer."""
    column = "to the first new iteration, s"
    table = table_with("recovery_time.md", "ranks", "kind", column)
    drawing = Drawing(
        860,
        478,
        "Seconds from a kill until a new iteration has ended",
        "Repairs in place take one to two seconds, restarts nine to "
        "thirty-seven, with two to eight ranks.",
    )
    drawing.text(20, 32, "Seconds from a kill until a new iteration has ended", size=16, bold=True)
    text = (
        "Median and range of nine kills, in seconds; 2 CPU cores, "
        "gloo, no GPU. NVRx holds three reserve ranks."
    )
    drawing.text(20, 52, text, ink="soft", size=12)
    longest = max(measured(row[column]).high for row in table if row["ranks"] != "2")
    for index, ranks in enumerate(("4", "8")):
        top = 94 + index * 188
        drawing.text(20, top - 8, f"{ranks} ranks", bold=True)
        rows = [
            (*_KINDS[row["kind"]], measured(row[column])) for row in table if row["ranks"] == ranks
        ]
        bars = [(label, value, fill) for label, fill, value in rows]
        _draw_bars(drawing, bars, top=top, left=190, longest=longest)
    drawing.text(20, 466, "From docs/benchmarks/recovery_time.md", ink="soft", size=12)
    return drawing


def plot_stall() -> Drawing:
    """Plot what a checkpoint costs training, next to PyTorch DCP in its best form."""
    table = table_with("stall.md", "candidate", "blocked s", "cost s")
    drawing = Drawing(
        860,
        356,
        "What a checkpoint of 512 MiB per rank costs training",
        "Seconds that training waits, and that its iterations take longer: moe_ft beside its peers.",
    )
    drawing.text(
        20,
        32,
        "A checkpoint of 512 MiB per rank to storage: what training pays",
        size=16,
        bold=True,
    )
    text = (
        "Seconds, median and range; 2 ranks on 2 CPU cores. "
        "Forward and backward sleep, as if a GPU worked."
    )
    drawing.text(20, 52, text, ink="soft", size=12)
    for index, (column, says) in enumerate(
        (
            ("blocked s", "the training thread waits"),
            ("cost s", "iterations until it is complete take longer by"),
        )
    ):
        top = 94 + index * 126
        drawing.text(20, top - 8, says, bold=True)
        rows = [
            (
                "DCP async, best form"
                if row["candidate"].startswith("DCP")
                else row["candidate"].partition(" (")[0].replace(" async", ""),
                measured(row[column]),
                "blue" if row["candidate"].startswith("moe_ft") else "sand",
            )
            for row in table
        ]
        longest = max(value.high for _, value, _ in rows)
        _draw_bars(drawing, rows, top=top, left=230, longest=longest)
    drawing.text(
        20, 344, "From docs/benchmarks/stall.md; below zero is noise.", ink="soft", size=12
    )
    return drawing


def plot_lossy_quality() -> Drawing:
    """Plot validation loss after lossy recoveries against the proportion of lost tokens."""
    table = table_with("partial_quality.md", "case", "PLT %, by seed", "minus no faults")
    drawing = Drawing(
        860,
        400,
        "Validation loss after three lossy recoveries",
        "Up to eight percent of lost tokens the loss is that of runs "
        "without failures; at forty percent it is worse.",
    )
    drawing.text(
        20,
        32,
        "Validation loss after three lossy recoveries, minus that without failures",
        size=16,
        bold=True,
    )
    text = (
        "Strategy partial, a small GPT (4 layers, 8 experts, 200 "
        "iterations). Mean and range of three seeds."
    )
    drawing.text(20, 52, text, ink="soft", size=12)
    low, high, left, right, top, bottom = -0.02, 0.045, 90, 820, 76, 340

    def y(loss: float) -> float:
        return bottom - (loss - low) / (high - low) * (bottom - top)

    def x(plt: float) -> float:
        return left + math.log(plt / 0.5) / math.log(120) * (right - left)

    (control,) = (row for row in table if row["case"].endswith("lr x 1.001"))
    control_value = measured(control["minus no faults"])
    height = y(control_value.low) - y(control_value.high)
    drawing.box(left, y(control_value.high), right - left, height, "panel", radius=0)
    drawing.text(
        left + 8, y(control_value.high) + 14, "learning rate changed by 0.1 %", ink="soft", size=11
    )
    for tick in (-0.02, 0.0, 0.02, 0.04):
        drawing.path([(left, y(tick)), (right, y(tick))], "strong" if tick == 0 else "line dashed")
        drawing.text(left - 8, y(tick) + 4, f"{tick:+.2f}", ink="soft", size=12, anchor="end")
    for tick in (1, 3.75, 10, 40):
        drawing.path([(x(tick), bottom), (x(tick), bottom + 5)], "strong")
        drawing.text(x(tick), bottom + 20, f"{tick:g} %", ink="soft", size=12, anchor="middle")
    for row in table:
        plts = [float(each) for each in row["PLT %, by seed"].split(", ")]
        if min(plts) > 0:
            at, value = x(sum(plts) / len(plts)), measured(row["minus no faults"])
            drawing.path([(at, y(value.low)), (at, y(value.high))], "strong")
            drawing.box(at - 5, y(value.middle) - 5, 10, 10, "blue", radius=5)
    drawing.text(
        right,
        bottom + 36,
        "lost tokens (PLT) of the planned run",
        ink="soft",
        size=12,
        anchor="end",
    )
    drawing.text(20, 390, "From docs/benchmarks/partial_quality.md", ink="soft", size=12)
    return drawing


def plot_local_recovery() -> Drawing:
    """Plot the time that a stage alone takes for an iteration, as a share of a replay of all stages."""
    column = "last, local / global"
    table = table_with("local_recovery.md", "S", "M", column, "expected")
    rows = [row for row in table if row["stages are"] == "sleeping"]
    drawing = Drawing(
        860,
        120 + 24 * len(rows),
        "Replay of one stage against a replay of all",
        "One stage alone takes the share of the time that the bubble leaves it.",
    )
    drawing.text(
        20,
        32,
        "An iteration that runs again in one stage: share of the time that all stages take",
        size=16,
        bold=True,
    )
    text = (
        "S stages, M micro-batches; the red mark is M / (M + S - 1). 2 "
        "CPU cores, gloo, no GPU; stages sleep."
    )
    drawing.text(20, 52, text, ink="soft", size=12)
    bars = [(f"S = {row['S']}, M = {row['M']}", measured(row[column]), "blue") for row in rows]
    marks = [float(row["expected"]) for row in rows]
    _draw_bars(drawing, bars, top=80, left=130, longest=1.0, marks=marks)
    y = drawing.height - 14
    drawing.text(20, y, "From docs/benchmarks/local_recovery.md", ink="soft", size=12)
    return drawing
