"""Answers of commands on several strategies: as text, as JSON, and as pages with drawings as inline SVG.

Nothing needs a network. presets/page.css has the colours, presets/comparison.html the page of a comparison.
"""

import html
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moe_ft.errors import ConfigError
from moe_ft.files.private_files import replace_file
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import describe_layout, describe_model
from moe_ft.planning.time_shares import MEANINGS, Spent, TimeShares
from moe_ft.tables import table

_FOLDER = Path(__file__).parent / "presets"
_ASSUMPTION = ("assumption", "value", "from")
WIDTH, ROW, LEFT = 760, 24, 230  # of drawings, in pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class PagePart:
    """Part of an answer; what it has comes in this order.

    Attributes:
        title: on a page.
        lines: sentences, each a paragraph of a page.
        words: to be pasted.
        table: headers and rows.
        drawings: for a page alone, each with its name, which may be empty.
    """

    title: str = ""
    lines: Sequence[str] = ()
    words: str = ""
    table: tuple[Sequence[str], Sequence[Sequence[object]]] | None = None
    drawings: Sequence[tuple[str, Markup]] = ()

    @property
    def text(self) -> str:
        """The part as people read it in a terminal."""
        found = ["\n".join(self.lines), textwrap.indent(self.words, "    ")]
        if self.table is not None:
            found.append(table(self.table[1], self.table[0]))
        return "\n\n".join(filter(None, found))

    @property
    def html_table(self) -> Markup:
        """The table on a page."""
        return Markup() if self.table is None else html_table(*self.table)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Answer of a command on a job with several strategies.

    Attributes:
        command: its name.
        headline: the answer in a sentence.
        parts: what follows.
        assumptions: by name, values and where they come from.
        notes: on what is not counted.
        values: what JSON has besides.
    """

    command: str
    job: PlannedJob
    headline: str
    parts: Sequence[PagePart]
    assumptions: Sequence[tuple[str, str, str]]
    notes: Sequence[str] = ()
    values: Mapping[str, Any]

    @property
    def _last(self) -> Sequence[PagePart]:
        notes = [f"note: {line}" for line in self.notes]
        of_values = PagePart(title="Assumptions", table=(_ASSUMPTION, self.assumptions))
        return [*self.parts, of_values, PagePart(lines=notes)]

    def as_text(self) -> str:
        """Return the answer as people read it in a terminal."""
        job = f"{describe_model(self.job.model)}\n{describe_layout(self.job)}"
        return "\n\n".join(filter(None, (job, self.headline, *(each.text for each in self._last))))

    def as_json(self) -> str:
        """Return the answer for programs. Times are in seconds, sizes in bytes."""
        names = "name", "value", "from"
        assumptions = [dict(zip(names, each, strict=True)) for each in self.assumptions]
        value = {**self.values, "assumptions": assumptions, "notes": list(self.notes)}
        return json.dumps(value, indent=1)

    def as_html(self) -> str:
        """Return the answer as one page without scripts and without anything from elsewhere."""
        return fill_page(
            "comparison.html",
            command=self.command,
            headline=self.headline,
            model=describe_model(self.job.model),
            layout=describe_layout(self.job),
            parts=self._last,
        )

    def print(self, *, as_json: bool) -> None:
        """Print the answer."""
        print(self.as_json() if as_json else self.as_text())


def fill_page(name: str, **parts: object) -> str:
    """Return a page of the folder presets/ with its parts; text that is no Markup is escaped."""
    pages = Environment(
        loader=FileSystemLoader(_FOLDER),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Surrogates, which stand for bytes that are no text, cannot be encoded.
    return pages.get_template(name).render(parts).encode("utf-8", "backslashreplace").decode()


def check_page(path: Path | None) -> None:
    """Raise ConfigError if a page that is asked for cannot be written; one that exists is replaced."""
    if path is None:
        return
    if path.exists() and not path.is_file():
        raise ConfigError(f"--html={path} must be a file, and it is something else. Name a file.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"--html={path} must be in a folder that exists. Make it, or name another file."
        )


def write_page(path: Path | None, text: str) -> None:
    """Write a page, if one is asked for."""
    if path is None:
        return
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(
            f"--html={path} cannot be written: {error.strerror}. Name another file."
        ) from error


def html_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """Return a table."""

    def line(cells: Sequence[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    return Markup(f"<table>{line(headers, 'th')}{''.join(line(row, 'td') for row in rows)}</table>")


def svg(rows: float, content: str, **attributes: str) -> Markup:
    """Return a drawing with so many rows; `attributes` are its further ones, as in ``aria_label``."""
    words = "".join(
        f' {name.replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    height = ROW * rows + 6
    return Markup(f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img"{words}>{content}</svg>')


def label(x: float, row: float, text: str) -> str:
    """Return text in a row of a drawing."""
    return f'<text x="{x:.1f}" y="{ROW * row + 16:.0f}">{html.escape(text)}</text>'


def bar(x: float, width: float, row: int, kind: str) -> str:
    """Return a bar in a row of a drawing, in the colour of its kind."""
    place = f'x="{x:.1f}" y="{ROW * row + 4}" width="{max(0.0, width):.1f}" height="{ROW - 8}"'
    return f'<rect class="{kind}" {place}/>'


def key_of_colours(uses: Sequence[Spent]) -> Markup:
    """Return the meaning of each colour."""
    return Markup(" ").join(
        Markup('<span class="key {0}">{0}: {1}</span>').format(use, MEANINGS[use]) for use in uses
    )


def shares_rows(columns: Mapping[str, TimeShares]) -> list[tuple[str, ...]]:
    """Return what the time of each column goes into, with the sum, as rows of a table."""
    rows = [(use.value, *(f"{each[use]:.2%}" for each in columns.values())) for use in Spent]
    total = [f"{sum(each[use] for use in Spent):.2%}" for each in columns.values()]
    return [*rows, ("all", *total)]
