"""Answers of commands on several strategies: as text, as JSON, and as pages with drawings as inline SVG.

Nothing needs a network. presets/page.css has the colours; each command its own page.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import describe_layout, describe_model, table
from moe_ft.planning.time_shares import MEANINGS, Spent, TimeShares

_FOLDER = Path(__file__).parent / "presets"
_ASSUMPTION = ("assumption", "value", "from")
WIDTH, ROW, LEFT = 760, 24, 230  # of drawings, in pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer on a job with several strategies, the best first.

    Attributes:
        headline: it in a sentence.
        headers, rows: of the table of strategies.
        problems: lines on what cannot be.
        shares: of the time, by strategy.
        assumptions: by name, values and where they come from.
        notes: on what is not counted.
        page: file of the folder presets/.
        first, last: what text has after the headline, and before the assumptions.
        values: what JSON has besides.
        parts: what the page has besides, in HTML.
    """

    job: PlannedJob
    headline: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    problems: Sequence[str]
    shares: Mapping[str, TimeShares]
    assumptions: Sequence[tuple[str, str, str]]
    notes: Sequence[str] = ()
    page: str
    first: str = ""
    last: str = ""
    values: Mapping[str, Any]
    parts: Mapping[str, str]

    def as_text(self) -> str:
        """Return the answer as people read it in a terminal."""
        parts = [
            f"{describe_model(self.job.model)}\n{describe_layout(self.job)}",
            *(self.headline, self.first, table(self.rows, self.headers), "\n".join(self.problems)),
            *(shares_table(self.shares) if self.shares else "", self.last),
            table(self.assumptions, _ASSUMPTION),
            "\n".join(f"note: {line}" for line in self.notes),
        ]
        return "\n\n".join(filter(None, parts))

    def as_json(self) -> str:
        """Return the answer for programs. Times are in seconds, sizes in bytes."""
        names = "name", "value", "from"
        assumptions = [dict(zip(names, each, strict=True)) for each in self.assumptions]
        value = {**self.values, "assumptions": assumptions, "notes": list(self.notes)}
        return json.dumps(value, indent=1)

    def as_html(self) -> str:
        """Return the answer as one page without scripts and without anything from elsewhere."""
        parts = {
            "style": (_FOLDER / "page.css").read_text("utf-8"),
            "model": html.escape(describe_model(self.job.model)),
            "layout": html.escape(describe_layout(self.job)),
            "headline": html.escape(self.headline),
            "alternatives": html_table(self.headers, self.rows),
            "problems": "".join(f"<p>{html.escape(line)}</p>" for line in self.problems),
            "assumptions": html_table(_ASSUMPTION, self.assumptions),
            "notes": "".join(f"<li>{html.escape(line)}</li>" for line in self.notes),
        }
        page = Template((_FOLDER / self.page).read_text("utf-8"))
        return page.substitute(parts, **self.parts)


def check_page(path: Path | None) -> None:
    """Raise ConfigError if a page that is asked for cannot be written."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"--html={path} must be in a folder that exists. Make it, or name another file."
        )


def write_page(path: Path | None, answer: Answer) -> None:
    """Write the page of an answer, if one is asked for."""
    if path is None:
        return
    try:
        path.write_text(answer.as_html(), "utf-8")
    except OSError as error:
        raise ConfigError(
            f"--html={path} cannot be written: {error.strerror}. Name another file."
        ) from error


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{line(headers, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def svg(rows: int, content: str) -> str:
    """Return a drawing with so many rows."""
    height = ROW * rows + 6
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{content}</svg>'


def label(x: float, row: int, text: str) -> str:
    """Return text in a row of a drawing."""
    return f'<text x="{x:.1f}" y="{ROW * row + 16}">{html.escape(text)}</text>'


def bar(x: float, width: float, row: int, kind: str) -> str:
    """Return a bar in a row of a drawing, in the colour of its kind."""
    place = f'x="{x:.1f}" y="{ROW * row + 4}" width="{max(0.0, width):.1f}" height="{ROW - 8}"'
    return f'<rect class="{kind}" {place}/>'


def key_of_colours(uses: Sequence[Spent]) -> str:
    """Return the meaning of each colour."""
    return " ".join(f'<span class="key {use}">{use}: {MEANINGS[use]}</span>' for use in uses)


def shares_table(columns: Mapping[str, TimeShares]) -> str:
    """Return what the time of each column goes into, as text, with the sum."""
    rows = [(use, *(f"{each[use]:.2%}" for each in columns.values())) for use in Spent]
    total = [f"{sum(each[use] for use in Spent):.2%}" for each in columns.values()]
    return table([*rows, ("all", *total)], ("time", *columns))
