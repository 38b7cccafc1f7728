"""Parts of the pages that commands write: tables, and drawings as inline SVG. Nothing needs a network.

presets/page.css has the colours; each command its own page.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from moe_ft.errors import ConfigError
from moe_ft.planning.report import table
from moe_ft.planning.time_shares import MEANINGS, Spent, TimeShares

_FOLDER = Path(__file__).parent / "presets"
WIDTH, ROW, LEFT = 760, 24, 230  # of drawings, in pixels


def fill_page(name: str, **parts: str) -> str:
    """Return a page of the folder presets/ with its parts, which are HTML."""
    style = (_FOLDER / "page.css").read_text("utf-8")
    return Template((_FOLDER / name).read_text("utf-8")).substitute(parts, style=style)


def check_page(path: Path | None) -> None:
    """Raise ConfigError if a page that is asked for cannot be written."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"--html={path} must be in a folder that exists. Make it, or name another file."
        )


def write_page(path: Path, text: str) -> None:
    """Write a page."""
    try:
        path.write_text(text, "utf-8")
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
