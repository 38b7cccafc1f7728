"""Lines of a job that matter to its reader: those of moe_ft, iterations with their losses, and errors.

COMMAND 2>&1 | tee all.log | python examples/job_lines.py

Megatron prints about 900 lines of arguments and parameters before it trains.
"""

import io
import re
import sys
from collections.abc import Iterable, Iterator

_NOTABLE = re.compile(
    r"error|exception|\bfail|killed|segmentation|core dumped|validation loss at", re.IGNORECASE
)
_NOT_NOTABLE = ("INFO:", "\t")  # of Megatron, whose parameters may have any name
_OWN = re.compile(r' moe_ft: |"logger": "moe_ft"|Traceback \(most recent call last\):')
_RANK = re.compile(r"^\[rank\d+\]: ")  # before lines of a traceback


def essential_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield what a reader of a job should see of its lines, without their ends."""
    are_arguments = continues = False
    for each in lines:
        line = _RANK.sub("", each.rstrip())
        if "- arguments -" in line or "- end of arguments -" in line:
            are_arguments = "- arguments -" in line
        elif " iteration " in line and "| consumed samples:" in line:
            yield _iteration(line)
        elif are_arguments and line.startswith("  "):
            continue
        elif _OWN.search(line):
            continues = line.endswith(":")
            yield line
        elif (continues and line.startswith(" ")) or (
            _NOTABLE.search(line) and not line.startswith(_NOT_NOTABLE)
        ):
            yield line


def _iteration(line: str) -> str:
    """Return the number and the loss in a log line of Megatron."""
    parts = [part.strip() for part in line.split("|")]
    number = " ".join(parts[0].split("]")[-1].replace("/", " of ").split())
    losses = (part.split()[-1] for part in parts if "loss: " in part)
    return number + "".join(f", loss {float(each):.3f}" for each in list(losses)[:1])


if __name__ == "__main__":
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    for shown in essential_lines(sys.stdin):
        print(shown, flush=True)
