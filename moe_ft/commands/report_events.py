"""Event logs as the report reads them: sampled where there are too many lines, with what was left out.

moe_ft/event_lines.py decodes lines. The sums over a file are in report_rank.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moe_ft.event_lines import Iteration, Line, RouterLoad, decode

_MAX_FILES_NAMED = 8
_HEAD_BYTES = 200  # of a line; its kind and iteration are in there
_KIND, _SAMPLED = b'"event": "', (b'iteration", "iteration": ', b'router_load", "iteration": ')
_WHOLE = (b"}\n", b"}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Iterations of which a reader leaves out the times and loads: all but every n-th one.

    The others are told apart by the beginning of their lines, in a tenth of the time of decoding them.
    """

    every: int = 1
    loads_every: int = 1

    def leaves_out(self, line: bytes) -> type[Line] | None:
        """Return the kind of a whole event that need not be read, None for all other lines."""
        at = line.find(_KIND, 0, _HEAD_BYTES) + len(_KIND)
        if not line.startswith(_SAMPLED, at) or not line.endswith(_WHOLE):
            return None
        is_load = line.startswith(_SAMPLED[1], at)
        every = self.loads_every if is_load else self.every
        if every == 1:
            return None
        first = at + len(_SAMPLED[is_load])
        digits = line[first : line.find(b",", first)]
        if not digits.isdigit() or int(digits) % every == 0:
            return None
        return RouterLoad if is_load else Iteration


@dataclass(kw_only=True, slots=True)
class LeftOut:
    """Parts of an event log that could not be read: files and why, and by rank lines that are no events."""

    files: list[str] = field(default_factory=list)
    num_lines: dict[int, int] = field(default_factory=dict)

    def typed(self, rank: int, lines: Iterable[bytes]) -> Iterator[Line]:
        """Yield a rank's events, and count the lines that are none."""
        self.num_lines[rank] = 0
        for line in lines:
            if (event := decode(line)) is not None:
                yield event
            else:
                self.num_lines[rank] += 1

    def add_file(self, path: Path, error: OSError) -> None:
        """Note a file that cannot be read."""
        line = f"{path.name}: {error.strerror}"
        if line not in self.files:
            self.files.append(line)

    def describe(self) -> tuple[str, ...]:
        """Return a line on each part that was left out."""
        lines = self.files[:_MAX_FILES_NAMED]
        if len(self.files) > len(lines):
            lines.append(f"{len(self.files) - len(lines)} more files")
        if num_lines := sum(self.num_lines.values()):
            what = "line that is no event" if num_lines == 1 else "lines that are no events"
            lines.append(f"{num_lines} {what}, such as a killed rank leaves")
        return tuple(lines)
