"""Event logs of runs, for tests of their summaries."""

from pathlib import Path

from moe_ft.commands.report_run import read_run
from moe_ft.commands.report_summary import RunReport, summarize_run
from moe_ft.events import EventLog
from moe_ft.faults import Phase


def write_run(directory: Path, rank: int, losses: list[float], incarnation: int = 0) -> EventLog:
    """Write a start and one iteration per loss, half a second and 100 tokens each; return the log."""
    log = EventLog(directory, rank)
    log.start()
    log.incarnation = incarnation
    log.write("start", 0)
    for done, loss in enumerate(losses, 1):
        seconds = 9.0 if done == 1 else 0.5
        log.write("iteration", done, iteration_s=seconds, loss=loss, num_tokens=100)
        log.progress(done - 1, Phase.BETWEEN)
    return log


def summarize(directory: Path) -> RunReport:
    """Return the summary that `moe_ft report` prints."""
    return summarize_run(read_run(directory, all_ranks=False), directory)
