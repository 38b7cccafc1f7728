"""`moe_ft report`: summarize a run from its event log: how far it came, how fast, and how each rank ended.

As text, as JSON, or as a page with pictures, which report_page.py draws. report_run.py reads the log.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from moe_ft.commands.pages import check_page, shares_table, write_page
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.commands.report_course import Row, show
from moe_ft.commands.report_page import as_html
from moe_ft.commands.report_run import RankSummary, Run, read_run
from moe_ft.format.encoding import convert_leaves, finite_or_name
from moe_ft.planning.time_shares import TimeShares
from moe_ft.tables import table


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Course of a run over all its incarnations; None where the log does not say.

    Attributes:
        recoveries: rows of a table for people.
        repairs: rows of another one; each has a recovery of the same start.
        hangs: by section of the loop; None if not all ranks were read.
        shares: of the time from the first iteration to the last.
        snapshots: rows on what one rank has sent, on tokens that are not everywhere, and on slots.
        left_out: a line on each part of the log that could not be read.
    """

    num_iterations: int
    num_incarnations: int
    first_loss: float | None
    last_loss: float | None
    iteration_s: float | None
    tokens_per_s: float | None
    ranks: tuple[RankSummary, ...]
    recoveries: tuple[Row, ...]
    repairs: tuple[Row, ...]
    hangs: Mapping[str, int] | None
    shares: TimeShares
    snapshots: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]


def summarize_run(run: Run) -> RunSummary:
    """Return what a run comes to in a few numbers."""
    course = run.course
    return RunSummary(
        num_iterations=run.num_iterations,
        num_incarnations=1 + max(each.incarnation for each in run.ranks),
        first_loss=course.first_loss,
        last_loss=course.last_loss,
        iteration_s=course.iteration_s,
        tokens_per_s=course.tokens_per_s,
        ranks=run.ranks,
        recoveries=tuple(course.recovery_rows()),
        repairs=tuple(course.repair_rows()),
        hangs=run.hangs,
        shares=run.shares,
        snapshots=(*course.snapshot_rows(), *run.total.slots.rows()),
        left_out=run.left_out,
    )


def add_report_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = add_command(
        commands,
        "report",
        "summarize the event log of a run",
        "How far it came, how fast, what failures and checkpoints have cost, how each rank ended. The run "
        "may still train.",
        "runs/my_job/events --html run.html",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of --moe-ft-event-log")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a page with pictures")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    directory = Path(options.run_dir)
    check_page(options.html)
    run = read_run(directory, all_ranks=options.json or options.html is not None)
    summary = summarize_run(run)
    if options.html is not None:
        write_page(options.html, as_html(run, _facts(summary, directory)))
    print(_as_json(run, summary) if options.json else render(summary, directory))
    return 0


def render(summary: RunSummary, directory: Path) -> str:
    """Return the summary as text; ranks are listed if one did not finish."""
    text = table(_facts(summary, directory))
    text += "\n\n" + shares_table({"share": summary.shares})
    if summary.recoveries:
        text += "\n\n" + rows_table(summary.recoveries)
    if summary.repairs:
        text += "\n\n" + rows_table(summary.repairs)
    if any(rank.ending != "finished" for rank in summary.ranks):
        ranks = map(astuple, summary.ranks)
        headers = ("rank", "start", "iterations done", "last phase", "how it ended", "idle s")
        text += "\n\n" + table(ranks, headers)
    if summary.left_out:
        text += "\n\n" + "\n".join(f"left out: {line}" for line in summary.left_out)
    return text


def rows_table(rows: Sequence[Row]) -> str:
    """Return rows as a table."""
    return table([[*row.values()] for row in rows], [*rows[0]])


def _idle(summary: RunSummary) -> str:
    known = [each.idle_s for each in summary.ranks if each.idle_s is not None]
    return f"{min(known):.3f} to {max(known):.3f}" if known else "-"


def _hangs(summary: RunSummary) -> Iterator[tuple[str, str]]:
    if summary.hangs:
        yield "hangs", ", ".join(f"{num} in {name}" for name, num in summary.hangs.items())


def _starts(summary: RunSummary) -> str:
    if not summary.repairs:
        return str(summary.num_incarnations)
    return f"{summary.num_incarnations}, {len(summary.repairs)} of them repairs in place"


def _facts(summary: RunSummary, directory: Path) -> list[tuple[str, str]]:
    return [
        ("iterations", str(summary.num_iterations)),
        ("starts", _starts(summary)),
        ("loss at start", show(summary.first_loss)),
        ("loss at end", show(summary.last_loss)),
        ("seconds per iteration (median)", show(summary.iteration_s)),
        ("tokens per second", show(summary.tokens_per_s, ",.0f")),
        ("seconds idle, by rank (median)", _idle(summary)),
        *_hangs(summary),
        *summary.snapshots,
        ("events", str(directory)),
    ]


def _as_json(run: Run, summary: RunSummary) -> str:
    """Return the summary for programs, with bytes and seconds by tier."""
    tiers = {
        tier: {name: getattr(each, name) for name in ("num", "num_bytes", "seconds", "longest_s")}
        for tier, each in run.total.traffic.items()
    }
    value = asdict(summary) | {"badput": summary.shares.badput, "tiers": tiers}
    return json.dumps(convert_leaves(value, finite_or_name), indent=1)
