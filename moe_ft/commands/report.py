"""`moe_ft report`: summarize a run from its event log: how far it came, how fast, and how each rank ended.

The words are here, of the text and of the tables of the page. report_summary.py has the numbers,
report_page.py draws, report_run.py reads the log.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

from moe_ft.commands.pages import check_page, shares_rows, write_page
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.commands.report_page import Cells, as_html
from moe_ft.commands.report_run import read_run
from moe_ft.commands.report_summary import (
    RecoveryFacts,
    RepairFacts,
    ReportedJob,
    RunReport,
    as_json,
    summarize_run,
)
from moe_ft.commands.report_trace import open_trace
from moe_ft.config.fields import size_text
from moe_ft.saying import some_of
from moe_ft.tables import table, terminal_width

_MOST_HOSTS = 8
_RECOVERIES = (
    *("start", "continued from", "replayed", "units from", "kept", "lost tokens", "PLT %", "MTL %"),
    *("in all %", "loss before", "after", "highest"),
)
_REPAIRS = (
    *("start", "replaced ranks", "that hung", "nodes", "shared", "in iteration", "seconds"),
)
_RANKS = ("rank", "start", "iterations done", "last phase", "how it ended", "idle s")


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
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="also write a trace of all ranks for Perfetto (ui.perfetto.dev) or chrome://tracing",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    directory = Path(options.run_dir)
    check_page(options.html)
    with nullcontext() if options.trace is None else open_trace(options.trace) as trace:
        all_ranks = options.json or options.html is not None or trace is not None
        run = read_run(directory, all_ranks=all_ranks, trace=trace)
    report = summarize_run(run, directory)
    if options.html is not None:
        write_page(options.html, as_html(run, tables_of(report)))
    print(as_json(report) if options.json else render(report, terminal_width()))
    return 0


def render(report: RunReport, width: int | None = None) -> str:
    """Return the report as text, in lines of a width; ranks are listed if one did not finish."""
    tables = tables_of(report)
    if all(rank.ending == "finished" for rank in report.ranks):
        del tables["ranks"]
    facts, *others = (table(rows, headers, width=width) for headers, rows in tables.values())
    left_out = "\n".join(f"left out: {line}" for line in report.left_out)
    shares = table(shares_rows({"share": report.time_shares}), ("time", "share"))
    return "\n\n".join(filter(None, [facts, shares, *others, left_out]))


def tables_of(report: RunReport) -> dict[str, Cells]:
    """Return headers and rows of each table that has rows: facts, recoveries, repairs, ranks."""
    found: dict[str, Cells] = {"facts": ((), [*_facts(report)])}
    if report.recoveries:
        found["recoveries"] = _RECOVERIES, [*map(_recovery, report.recoveries)]
    if report.repairs:
        found["repairs"] = _REPAIRS, [*map(_repair, report.repairs)]
    ranks = [
        (each.rank, each.start, each.iteration, each.phase or "", each.ending, _number(each.idle_s))
        for each in report.ranks
    ]
    return {**found, "ranks": (_RANKS, ranks)}


def _facts(report: RunReport) -> Iterator[tuple[str, str]]:
    yield from _job(report.job)
    yield "time", f"{_clock(report.first_event_unix_s)} to {_clock(report.last_event_unix_s)}"
    planned = report.job.train_iterations
    yield "iterations", f"{report.last_iteration}" + (f" of {planned}" if planned else "")
    repairs = f", {len(report.repairs)} of them repairs in place" if report.repairs else ""
    yield "starts", f"{report.num_starts}{repairs}"
    yield "loss at start", _number(report.first_loss)
    yield "loss at end", _number(report.last_loss)
    yield "seconds per iteration (median)", _number(report.iteration_s)
    yield "tokens per second", _number(report.tokens_per_s, ",.0f")
    idle = [each.idle_s for each in report.ranks if each.idle_s is not None]
    between = f"{min(idle):.3f} to {max(idle):.3f}" if idle else "-"
    yield "seconds idle, by rank (median)", between
    if report.verdict:
        yield "verdict", report.verdict
    for each in report.slow_ranks:
        yield "slow rank", str(each)
    if report.hangs:
        yield "hangs", ", ".join(f"{num} in {name}" for name, num in report.hangs.items())
    if report.corruptions:
        accused = (f"{num} of rank {rank}" for rank, num in report.corruptions.items())
        yield "findings of corruption", ", ".join(accused)
    if skipped := report.skipped_batches:
        yield "batches left out", f"{len(skipped)}: {_list(skipped, 'iteration {0} ({1})')}"
    yield from _checkpoints(report)
    yield "events", report.event_log


def _job(job: ReportedJob) -> Iterator[tuple[str, str]]:
    """Yield rows on what was run, as far as the log says so."""
    if job.name or job.strategy:
        yield "job", f"{job.name or 'without a name'}, strategy {job.strategy or '-'}"
    sizes = [
        (job.num_layers, "{:,} layers"),
        (job.hidden_size, "hidden size {:,}"),
        (job.num_experts, "{:,} experts"),
        (job.seq_length, "sequences of {:,} tokens"),
    ]
    if model := ", ".join(words.format(size) for size, words in sizes if size):
        yield "model", model
    if job.num_ranks:
        degrees = {name: getattr(job, name) for name in ("tp", "pp", "ep", "etp", "dp")}
        layout = ", ".join(f"{name} {num}" for name, num in degrees.items() if num)
        yield "layout", f"{job.num_ranks} ranks" + (f": {layout}" if layout else "")
    if job.hosts:
        yield "hosts", f"{len(job.hosts)}: {some_of(job.hosts, _MOST_HOSTS)}"
    versions = {
        "moe_ft": job.moe_ft_version,
        "Megatron": job.megatron_version,
        "torch": job.torch_version,
    }
    if known := ", ".join(f"{name} {version}" for name, version in versions.items() if version):
        yield "versions", known


def _checkpoints(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the numbers of ranks, what one has sent to peers, what failures would have lost, and slots."""
    if report.rank_changes:
        parts = [str(report.rank_changes[0].from_ranks)]
        for each in report.rank_changes:
            waiting = f" ({len(each.waiting_ranks)} wait)" if each.waiting_ranks else ""
            parts.append(f"{each.to_ranks} from iteration {each.iteration}{waiting}")
        yield "ranks", ", ".join(parts)
    if report.peer_state_bytes:
        sent = f"{size_text(report.peer_state_bytes)}, {size_text(report.peer_gradient_bytes)}"
        yield "state, gradients to peers", f"{sent} (last rank)"
    for tier, tokens in report.mean_tokens_at_risk.items():
        yield f"tokens not in {tier} (mean)", f"{tokens:,.0f}"
    if (slots := report.expert_slots) is not None:
        moved = f"{slots.num_moved_replicas} replicas moved"
        yield (
            "tables of slots",
            f"{slots.num_tables} new ones in {slots.num_layers} layers, {moved}",
        )
        ratios = f"{slots.imbalance_before:.2f} and {slots.imbalance_after:.2f}"
        yield "busiest rank over the mean", f"{ratios}, before new tables and with them (mean)"
        sent = f"{size_text(slots.sent_bytes)} of gradients and weights"
        yield "sent for slots, by a rank", f"{sent}, 0 B of the optimizer's state"


def _recovery(recovery: RecoveryFacts) -> tuple[object, ...]:
    return (
        recovery.start,
        recovery.target_iteration,
        recovery.replayed_iterations,
        _list(recovery.num_units_by_source, "{0} {1}"),
        _list(recovery.lossy, "{0} {1}") or "exact",
        recovery.lost_tokens,
        *(f"{100 * each:.3f}" for each in (recovery.plt, recovery.mtl, recovery.total_plt)),
        _number(recovery.loss_before),
        _number(recovery.loss_after),
        _number(recovery.highest_loss_after),
    )


def _repair(repair: RepairFacts) -> tuple[object, ...]:
    return (
        repair.start,
        ", ".join(map(str, repair.dead_ranks)),
        ", ".join(repair.hung_s) or "-",
        _list(repair.hosts_taken_over, "{1} for {0}") or "-",
        ", ".join(map(str, repair.shared_ranks)) or "-",
        repair.broken_iteration,
        f"{repair.repair_s:.1f}",
    )


def _list(values: Mapping[str, object], form: str) -> str:
    return ", ".join(form.format(*each) for each in values.items())


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix_s))


def _number(value: float | None, form: str = ".3f") -> str:
    """Return a number as text, a dash where the log does not say."""
    return "-" if value is None else format(value, form)
