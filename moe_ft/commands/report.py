"""`python -m moe_ft report`: summarize the event log of a run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from moe_ft.commands.run_summary import NUM_AROUND_RECOVERY, RecoverySummary, RunSummary, summarize


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

    It lists recoveries if there were any, ranks if one did not finish, and the unread parts of the log.
    """
    rows = [
        ("iterations", str(summary.num_iterations)),
        ("starts", str(summary.num_incarnations)),
        ("loss at start", _show(summary.first_loss, ".3f")),
        ("loss at end", _show(summary.last_loss, ".3f")),
        ("seconds per iteration (median)", _show(summary.iteration_s, ".3f")),
        ("tokens per second", _show(summary.tokens_per_s, ",.0f")),
        ("events", str(directory)),
    ]
    text = tabulate(rows, tablefmt="simple", disable_numparse=True)
    if summary.recoveries:
        text += "\n\n" + _recovery_table(summary.recoveries)
    if any(rank.ending != "finished" for rank in summary.ranks):
        ranks = [(r.rank, r.incarnation, r.iteration, r.phase, r.ending) for r in summary.ranks]
        headers = ("rank", "start", "iterations done", "last phase", "how it ended")
        text += "\n\n" + tabulate(ranks, headers=headers, tablefmt="simple", disable_numparse=True)
    if summary.left_out:
        text += "\n\n" + "\n".join(f"left out: {line}" for line in summary.left_out)
    return text


def _recovery_table(recoveries: Sequence[RecoverySummary]) -> str:
    rows = [
        (
            each.incarnation,
            each.target_iteration,
            each.num_replayed,
            each.sources,
            each.kept,
            each.lost_tokens,
            f"{100 * each.plt:.3f}",
            f"{100 * each.total_plt:.3f}",
            _show(each.loss_before, ".3f"),
            _show(each.loss_after, ".3f"),
            _show(each.highest_loss, ".3f"),
        )
        for each in recoveries
    ]
    headers = (
        *(
            "start",
            "continued from",
            "replayed",
            "units from",
            "kept",
            "lost tokens",
            "PLT %",
            "in all %",
        ),
        *(f"loss of {NUM_AROUND_RECOVERY} before", "after", "highest"),
    )
    return tabulate(rows, headers=headers, disable_numparse=True)


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
