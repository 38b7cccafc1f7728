"""What an event log says about a run: how far it came, how fast, and how each rank ended.

Reads files written by moe_ft/events.py; standard library and tabulate only, no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from moe_ft.errors import ConfigError
from moe_ft.events import TAIL_BYTES, event_path, ranks_with_events, read_events, read_progress

_NUM_AROUND_RECOVERY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """How one rank's last incarnation went.

    Attributes:
        iteration: iterations completed.
        phase: the last phase that the rank entered, empty if unknown.
        ending: "finished", why it stopped, or that it fell silent.
    """

    rank: int
    incarnation: int
    iteration: int
    phase: str
    ending: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySummary:
    """One recovery, and the loss around it; None where the log does not say.

    Attributes:
        target_iteration: where training went on.
        num_replayed: iterations that were run again to get there.
        kept: "exact", or the formats of what was put back from fewer bits than it has.
        lost_tokens, plt: by this recovery; total_plt: by all so far.
        loss_before: median over the last iterations that were kept; loss_after: over the first that follow.
        highest_loss: of the first that follow.
    """

    incarnation: int
    target_iteration: int
    num_replayed: int
    sources: str
    kept: str
    lost_tokens: int
    plt: float
    total_plt: float
    loss_before: float | None
    loss_after: float | None
    highest_loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What a run did, over all its incarnations; None where the log does not say."""

    num_iterations: int
    num_incarnations: int
    first_loss: float | None
    last_loss: float | None
    iteration_s: float | None
    tokens_per_s: float | None
    ranks: tuple[RankSummary, ...]
    recoveries: tuple[RecoverySummary, ...] = ()


def summarize(directory: Path) -> RunSummary:
    """Read all event files of a directory.

    Raises:
        ConfigError: if the directory holds no event log.
    """
    if not directory.is_dir() or not (ranks := ranks_with_events(directory)):
        raise ConfigError(
            f"{directory} holds no event log (rank_00000.jsonl, ...). "
            "Give the directory that --moe-ft-event-log named."
        )
    ends = {
        rank: list(read_events(event_path(directory, rank), last_bytes=TAIL_BYTES))
        for rank in ranks
    }
    summaries = tuple(_summarize_rank(directory, rank, ends[rank]) for rank in ranks if ends[rank])
    if not summaries:
        raise ConfigError(
            f"the event log in {directory} is empty: no rank came as far as training."
        )
    # Every rank has the times; the loss is on the last stage, where the last rank always is.
    events = [
        event
        for event in read_events(event_path(directory, ranks[-1]))
        if event["event"] in ("start", "iteration", "recovery")
    ]
    iterations = [event for event in events if event["event"] != "recovery"]
    # The first iteration of a start pays for warming up.
    steady = [
        event
        for before, event in pairwise(iterations)
        if before["event"] == event["event"] == "iteration"
    ]
    losses = {
        event["iteration"]: float(event["loss"])
        for event in iterations
        if event.get("loss") is not None
    }
    iteration_s = median(event["iteration_s"] for event in steady) if steady else None
    num_tokens = median(event["num_tokens"] for event in steady) if steady else None
    return RunSummary(
        num_iterations=max(summary.iteration for summary in summaries),
        num_incarnations=1 + max(summary.incarnation for summary in summaries),
        first_loss=losses[min(losses)] if losses else None,
        last_loss=losses[max(losses)] if losses else None,
        iteration_s=iteration_s,
        tokens_per_s=num_tokens / iteration_s if iteration_s and num_tokens else None,
        ranks=summaries,
        recoveries=tuple(_summarize_recoveries(events)),
    )


def _summarize_recoveries(events: list[dict[str, Any]]) -> Iterator[RecoverySummary]:
    losses: dict[int, float] = {}  # as the last attempt at each iteration had them
    for position, event in enumerate(events):
        if event["event"] == "iteration" and event.get("loss") is not None:
            losses[event["iteration"]] = float(event["loss"])
        if event["event"] != "recovery":
            continue
        target = event["target_iteration"]
        losses = {iteration: loss for iteration, loss in losses.items() if iteration <= target}
        before = [losses[iteration] for iteration in sorted(losses)][-_NUM_AROUND_RECOVERY:]
        after = [
            float(line["loss"])
            for line in events[position:]
            if line["event"] == "iteration"
            and line["incarnation"] == event["incarnation"]
            and line.get("loss") is not None
        ][:_NUM_AROUND_RECOVERY]
        yield RecoverySummary(
            incarnation=event["incarnation"],
            target_iteration=target,
            num_replayed=event["replayed_iterations"],
            sources=", ".join(f"{tier} {count}" for tier, count in event["sources"].items()),
            kept=", ".join(f"{key} {as_}" for key, as_ in event.get("lossy", {}).items())
            or "exact",
            lost_tokens=event["lost_tokens"],
            plt=event["plt"],
            total_plt=event.get("total_plt", 0.0),
            loss_before=median(before) if before else None,
            loss_after=median(after) if after else None,
            highest_loss=max(after, default=None),
        )


def _summarize_rank(directory: Path, rank: int, events: list[dict[str, Any]]) -> RankSummary:
    last = events[-1]
    incarnation = last["incarnation"]
    progress = read_progress(directory, rank)
    own = [event for event in events if event["incarnation"] == incarnation]
    done = [event["iteration"] for event in own if event["event"] in ("start", "iteration")]
    return RankSummary(
        rank=rank,
        incarnation=incarnation,
        iteration=max(done, default=0),
        phase=str(progress.phase) if progress and progress.incarnation == incarnation else "",
        ending=_ending(last),
    )


def _ending(last: dict[str, Any]) -> str:
    if last["event"] == "end":
        return str(last["reason"])
    if last["event"] == "stopped":
        silent = last["silent_ranks"]
        missed = f"; heard nothing from {', '.join(map(str, silent))}" if silent else ""
        return f"stopped: {str(last['reason'])[:60]}{missed}"
    if last["event"] == "fault_injected":
        return f"fell silent after an injected {last['kind']}"
    return "fell silent: running, killed or hung"


def render(summary: RunSummary, directory: Path) -> str:
    """Return the summary as text, with recoveries if there were any and ranks if one did not finish."""

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        ("iterations", str(summary.num_iterations)),
        ("starts", str(summary.num_incarnations)),
        ("loss at start", show(summary.first_loss, ".3f")),
        ("loss at end", show(summary.last_loss, ".3f")),
        ("seconds per iteration (median)", show(summary.iteration_s, ".3f")),
        ("tokens per second", show(summary.tokens_per_s, ",.0f")),
        ("events", str(directory)),
    ]
    text = tabulate(rows, tablefmt="simple", disable_numparse=True)
    if summary.recoveries:
        recoveries = [
            (
                each.incarnation,
                each.target_iteration,
                each.num_replayed,
                each.sources,
                each.kept,
                each.lost_tokens,
                f"{100 * each.plt:.3f}",
                f"{100 * each.total_plt:.3f}",
                show(each.loss_before, ".3f"),
                show(each.loss_after, ".3f"),
                show(each.highest_loss, ".3f"),
            )
            for each in summary.recoveries
        ]
        headers_: tuple[str, ...] = (
            "start",
            "went on from",
            "replayed",
            "units from",
            "kept",
            "lost tokens",
            "PLT %",
            "in all %",
        )
        headers_ += (f"loss of {_NUM_AROUND_RECOVERY} before", "after", "highest")
        text += "\n\n" + tabulate(recoveries, headers=headers_, disable_numparse=True)
    if any(rank.ending != "finished" for rank in summary.ranks):
        ranks = [(r.rank, r.incarnation, r.iteration, r.phase, r.ending) for r in summary.ranks]
        headers = ("rank", "start", "iterations done", "last phase", "how it ended")
        text += "\n\n" + tabulate(ranks, headers=headers, tablefmt="simple", disable_numparse=True)
    return text
