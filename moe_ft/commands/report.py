"""`python -m moe_ft report`: summarize the event log of a run."""

import argparse
from dataclasses import astuple
from pathlib import Path

from tabulate import tabulate

from moe_ft.commands.run_summary import RunSummary, show, summarize


def add_report_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its argument."""
    parser = commands.add_parser("report", help="summarize the event log of a run")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of --moe-ft-event-log")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the summary."""
    directory = Path(options.run_dir)
    print(render(summarize(directory), directory))
    return 0


def render(summary: RunSummary, directory: Path) -> str:
    """Return the summary as text.

    It lists recoveries and repairs if there were any, ranks if one did not finish, and
    the unread parts of the log.
    """
    rows = [
        ("iterations", str(summary.num_iterations)),
        ("starts", _starts(summary)),
        ("loss at start", show(summary.first_loss)),
        ("loss at end", show(summary.last_loss)),
        ("seconds per iteration (median)", show(summary.iteration_s)),
        ("tokens per second", show(summary.tokens_per_s, ",.0f")),
        ("events", str(directory)),
    ]
    text = tabulate(rows, tablefmt="simple", disable_numparse=True)
    if summary.recoveries:
        text += "\n\n" + tabulate(summary.recoveries, headers="keys", disable_numparse=True)
    if summary.repairs:
        text += "\n\n" + tabulate(summary.repairs, headers="keys", disable_numparse=True)
    if any(rank.ending != "finished" for rank in summary.ranks):
        ranks = map(astuple, summary.ranks)
        headers = ("rank", "start", "iterations done", "last phase", "how it ended")
        text += "\n\n" + tabulate(ranks, headers=headers, tablefmt="simple", disable_numparse=True)
    if summary.left_out:
        text += "\n\n" + "\n".join(f"left out: {line}" for line in summary.left_out)
    return text


def _starts(summary: RunSummary) -> str:
    if not summary.repairs:
        return str(summary.num_incarnations)
    return f"{summary.num_incarnations}, {len(summary.repairs)} of them repairs in place"
