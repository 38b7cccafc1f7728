"""Scalable pictures for light and dark screens, written as text that is the same for the same drawing.

A drawing has a background of its own, so it is readable wherever it is embedded. Text that would leave the
picture, or the box that it is in, is refused here: nobody looks at every picture after every change.
"""

from collections.abc import Iterable
from html import escape

# By class: fill on light and on dark screens.
_FILLS = {
    "paper": ("#ffffff", "#15181d"),
    "panel": ("#f3f5f8", "#20252c"),
    "empty": ("#e6e9ee", "#2b313a"),
    "blue": ("#4c78d0", "#5b8def"),
    "pale": ("#bcd0f2", "#2f4a78"),
    "green": ("#3f9d5c", "#4fb56f"),
    "mint": ("#c3e6cd", "#27583a"),
    "amber": ("#e0a030", "#d99a2b"),
    "sand": ("#f6e2b8", "#5f4a1c"),
    "red": ("#cf4444", "#e06363"),
    "rose": ("#f4c7c7", "#6b3030"),
    "violet": ("#8a63c9", "#a285dd"),
}
_INKS = {"ink": ("#1c2128", "#e6e9ee"), "soft": ("#57606a", "#a5afba")}
# Text on strong fills, and on amber, which is light on both.
_ON = {"on": ("#ffffff", "#10141a"), "dark": ("#1c2128", "#10141a")}
_LINES = {
    "line": ("#9aa3ad", "#67717d"),
    "strong": ("#1c2128", "#e6e9ee"),
    "cross": ("#b3261e", "#ff7b72"),
}
_EM = 0.56  # width of a letter, on average a little less in the fonts named below
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is, in pixels; rather too much."""
    return len(text) * size * _EM


def _style() -> str:
    def rules(index: int) -> str:
        fills = [f".{name}{{fill:{pair[index]}}}" for name, pair in (_FILLS | _INKS | _ON).items()]
        lines = [f".{name}{{stroke:{pair[index]}}}" for name, pair in _LINES.items()]
        return "".join(fills + lines)

    fixed = f"text{{font-family:{_FONT}}}.line,.strong{{fill:none;stroke-width:1.2}}"
    fixed += ".dashed{stroke-dasharray:4 3}.head{stroke:none}.cross{fill:none;stroke-width:3.5}"
    heads = "".join(f".head.{name}{{fill:{pair[0]}}}" for name, pair in (("line", _LINES["line"]),))
    dark_head = f".head.line{{fill:{_LINES['line'][1]}}}"
    return (
        f"<style>{fixed}{rules(0)}{heads}"
        f"@media (prefers-color-scheme: dark){{{rules(1)}{dark_head}}}</style>"
    )


class Drawing:
    """One picture, drawn from back to front; lengths are pixels from its upper left corner."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        """Begin with an empty sheet.

        Args:
            title: its name, for readers that cannot see it.
            description: the sentence that such readers get instead of the picture.
        """
        self.width, self.height = width, height
        self._parts: list[str] = [
            f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
        ]
        self.box(0, 0, width, height, "paper", radius=8)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, radius: float = 3
    ) -> None:
        """Fill a rectangle."""
        self._parts.append(
            f'<rect class="{fill}" x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
            f'height="{_number(height)}" rx="{_number(radius)}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        ink: str = "ink",
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
        room: float | None = None,
    ) -> None:
        """Write one line, whose baseline is at y.

        Args:
            anchor: start, middle or end: where x is on the line.
            room: the width of the box around it.

        Raises:
            ValueError: if it does not fit there or in the picture.
        """
        width = text_width(text, size)
        left = x - {"start": 0, "middle": 0.5, "end": 1}[anchor] * width
        if left < 0 or left + width > self.width or not size <= y <= self.height:
            raise ValueError(
                f"{text!r} leaves the picture: {left:.0f} to {left + width:.0f}, {y:.0f}"
            )
        if room is not None and width > room:
            raise ValueError(f"{text!r} takes {width:.0f} of {room:.0f} pixels")
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text class="{ink}" x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def label(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        lines: Iterable[str],
        *,
        ink: str = "ink",
        size: float = 13,
    ) -> None:
        """Fill a rectangle and write lines into its middle, the first one bold if there are several."""
        self.box(x, y, width, height, fill)
        lines = list(lines)
        step = size * 1.35
        top = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.36
        for index, line in enumerate(lines):
            is_head = index == 0 and len(lines) > 1
            middle = x + width / 2
            self.text(
                middle,
                top + index * step,
                line,
                ink=ink,
                size=size,
                anchor="middle",
                bold=is_head,
                room=width - 4,
            )

    def path(self, points: Iterable[tuple[float, float]], line: str = "line") -> None:
        """Draw straight lines from point to point."""
        steps = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{line}" points="{steps}"/>')

    def arrow(self, *points: tuple[float, float], line: str = "line") -> None:
        """Draw such lines with a head at the last point, at which a level or upright line ends."""
        self.path(points, line)
        (fx, fy), (x, y) = points[-2:]
        along = (x > fx) - (x < fx), (y > fy) - (y < fy)
        back = x - 7 * along[0], y - 7 * along[1]
        side = 4 * along[1], 4 * along[0]
        corners = (
            (x, y),
            (back[0] + side[0], back[1] + side[1]),
            (back[0] - side[0], back[1] - side[1]),
        )
        steps = " ".join(f"{_number(px)},{_number(py)}" for px, py in corners)
        self._parts.append(f'<polygon class="head line" points="{steps}"/>')

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        """Write what fills mean, in one row."""
        for fill, meaning in entries:
            self.box(x, y - 10, 12, 12, fill)
            self.text(x + 17, y, meaning, ink="soft", size=12)
            x += 17 + text_width(meaning, 12) + 16

    def render(self) -> str:
        """Return the file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n'
            f"{_style()}\n" + "\n".join(self._parts) + "\n</svg>\n"
        )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
