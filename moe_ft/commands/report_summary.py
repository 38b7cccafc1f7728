"""Values that `moe_ft report` gives of a run: text, page and JSON have their numbers from here.

docs/report.md lists the fields, with the descriptions that stand here; what JSON has is stable, and `SCHEMA`
goes up where a field changes its meaning or goes. report_run.py reads the log, report.py has the words.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moe_ft.commands.report_run import ReportedRun
from moe_ft.commands.report_sums import LossesAround
from moe_ft.event_lines import HangLine, RepairLine, StartLine
from moe_ft.loop.event_fold import SlotSums
from moe_ft.loop.stragglers import Straggler
from moe_ft.planning.time_shares import TimeShares

SCHEMA = 1


class ReportedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job, as its last start has told it."""

    name: Annotated[str | None, Meta(description="`--moe-ft-job-id`, or what stands in for it")]
    strategy: Annotated[str | None, Meta(description="`--moe-ft-strategy`")]
    moe_ft_version: Annotated[str | None, Meta(description="of the last start, as the others")]
    megatron_version: Annotated[str | None, Meta(description="null for a custom loop")]
    torch_version: Annotated[str | None, Meta(description="PyTorch, with its CUDA version")]
    hosts: Annotated[
        tuple[str, ...], Meta(description="on which ranks ran, in all starts; sorted by name")
    ]
    num_ranks: Annotated[int | None, Meta(description="the world size")]
    tp: Annotated[int | None, Meta(description="tensor-parallel size")]
    pp: Annotated[int | None, Meta(description="pipeline-parallel size")]
    ep: Annotated[int | None, Meta(description="expert-parallel size")]
    etp: Annotated[int | None, Meta(description="tensor-parallel size of experts")]
    dp: Annotated[int | None, Meta(description="data-parallel size")]
    num_layers: Annotated[int | None, Meta(description="null for a custom loop")]
    hidden_size: Annotated[int | None, Meta(description="null for a custom loop")]
    num_experts: Annotated[int | None, Meta(description="of an MoE layer")]
    seq_length: Annotated[int | None, Meta(description="tokens of a sequence")]
    train_iterations: Annotated[int | None, Meta(description="that are planned")]


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Last start of a rank."""

    rank: Annotated[int, Meta(description="global rank")]
    start: Annotated[int, Meta(description="its number, from 0")]
    iteration: Annotated[int, Meta(description="the last one that is complete")]
    phase: Annotated[str | None, Meta(description="the last one that it entered")]
    ending: Annotated[str, Meta(description="how it ended, in words")]
    idle_s: Annotated[float | None, Meta(description="median of its last 20 iterations")]


class RecoveryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A recovery."""

    start: Annotated[int, Meta(description="number of the start that recovered")]
    unix_s: Annotated[float, Meta(description="when it was complete")]
    target_iteration: Annotated[int, Meta(description="training continued after this one")]
    replayed_iterations: Annotated[int, Meta(description="replayed to build the state")]
    num_units_by_source: Annotated[
        dict[str, int], Meta(description="units of state by where they were: memory, peer, storage")
    ]
    lossy: Annotated[
        dict[str, str], Meta(description="state that was not kept exactly, and as what")
    ]
    lost_tokens: Annotated[int, Meta(description="whose updates this recovery dropped")]
    plt: Annotated[float, Meta(description="their share of the tokens so far (PLT)")]
    mtl: Annotated[float, Meta(description="the share of the layer that lost most (MTL)")]
    total_plt: Annotated[float, Meta(description="PLT of all recoveries so far")]
    loss_before: Annotated[float | None, Meta(description="median of the 5 iterations before")]
    loss_after: Annotated[float | None, Meta(description="median of the 5 iterations after")]
    highest_loss_after: Annotated[float | None, Meta(description="the highest of these")]


class RepairFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A repair in place; the recovery of the same start belongs to it."""

    start: Annotated[int, Meta(description="number of the start")]
    unix_s: Annotated[float, Meta(description="when the broken iteration was finished")]
    dead_ranks: Annotated[tuple[int, ...], Meta(description="that were replaced")]
    hung_s: Annotated[dict[str, float], Meta(description="by dead rank that hung: for how long")]
    hosts_taken_over: Annotated[dict[str, str], Meta(description="by lost host: its spare")]
    shared_ranks: Annotated[
        tuple[int, ...], Meta(description="without a device of their own: peers run their work")
    ]
    broken_iteration: Annotated[int, Meta(description="the one in which they died, from 1")]
    repair_s: Annotated[float, Meta(description="from the death until that iteration was finished")]


class RankChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change of the number of ranks (`--moe-ft-elastic`)."""

    iteration: Annotated[int, Meta(description="after which training continued")]
    from_ranks: Annotated[int, Meta(description="that wrote the state")]
    to_ranks: Annotated[int, Meta(description="that train")]
    waiting_ranks: Annotated[tuple[int, ...], Meta(description="started, and not needed")]


class TierSums(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots of all ranks that were read, in one tier."""

    num_snapshots: Annotated[int, Meta(description="a rank's part counts as one")]
    bytes: Annotated[int, Meta(description="in all")]
    total_s: Annotated[float, Meta(description="that they took, added up")]
    longest_s: Annotated[float, Meta(description="of the slowest")]


class ExpertSlots(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of expert slots."""

    num_tables: Annotated[int, Meta(description="new ones")]
    num_layers: Annotated[int, Meta(description="that got one")]
    num_moved_replicas: Annotated[int, Meta(description="by all of them")]
    imbalance_before: Annotated[float, Meta(description="busiest rank over the mean, before each")]
    imbalance_after: Annotated[float, Meta(description="the same with it")]
    sent_bytes: Annotated[int, Meta(description="by the rank that sent most")]


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run over all its starts; null where the log does not say."""

    schema: Annotated[int, Meta(description="version of this format")] = SCHEMA
    event_log: Annotated[str, Meta(description="the directory")]
    job: Annotated[ReportedJob, Meta(description="name, strategy, model, layout")]
    first_event_unix_s: Annotated[float, Meta(description="seconds since 1970")]
    last_event_unix_s: Annotated[float, Meta(description="seconds since 1970")]
    last_iteration: Annotated[int, Meta(description="the furthest that a rank has completed")]
    num_starts: Annotated[int, Meta(description="the first one, restarts and repairs")]
    iteration_s: Annotated[float | None, Meta(description="median of all iterations")]
    tokens_per_s: Annotated[float | None, Meta(description="of the whole job, while it trained")]
    first_loss: Annotated[float | None, Meta(description="null also if it is not finite")]
    last_loss: Annotated[float | None, Meta(description="null also if it is not finite")]
    is_last_loss_finite: Annotated[bool | None, Meta(description="false for NaN and infinity")]
    time_shares: Annotated[
        TimeShares, Meta(description="productive, blocked, redone, recovering, waiting: 1 in all")
    ]
    badput_shares: Annotated[
        dict[str, float], Meta(description="the same, by the names of ml-goodput-measurement")
    ]
    ranks: Annotated[tuple[RankEnd, ...], Meta(description="all that left events, ascending")]
    slow_ranks: Annotated[
        tuple[Straggler, ...],
        Meta(description="the slowest of each stage, as the last start ended"),
    ]
    recoveries: Annotated[tuple[RecoveryFacts, ...], Meta(description="in their order")]
    repairs: Annotated[tuple[RepairFacts, ...], Meta(description="in their order")]
    skipped_batches: Annotated[
        dict[str, str],
        Meta(description="by iteration that was left out: the failure that came twice"),
    ]
    rank_changes: Annotated[tuple[RankChange, ...], Meta(description="in their order")]
    verdict: Annotated[
        str | None,
        Meta(description="on the end of the last start, if it failed: who was first, and how"),
    ]
    hangs: Annotated[dict[str, int] | None, Meta(description="by section of the loop")]
    corruptions: Annotated[
        dict[int, int], Meta(description="findings by accused rank, in what was read")
    ]
    tiers: Annotated[dict[str, TierSums], Meta(description="by tier: memory, peers, storage")]
    read_bytes: Annotated[dict[str, int], Meta(description="that recoveries read, by place")]
    peer_state_bytes: Annotated[int, Meta(description="sent to peers by the last rank")]
    peer_gradient_bytes: Annotated[int, Meta(description="sent to peers by the last rank")]
    mean_tokens_at_risk: Annotated[
        dict[str, float],
        Meta(description="by tier: tokens that a loss of all before it would cost"),
    ]
    expert_slots: Annotated[ExpertSlots | None, Meta(description="null without slots")]
    left_out: Annotated[tuple[str, ...], Meta(description="parts of the log that were not read")]


def summarize_run(run: ReportedRun, directory: Path) -> RunReport:
    """Return what a run comes to."""
    history = run.history
    corruptions = set().union(*(row.corruptions for row in run.rows))
    hangs = Counter[str]()
    for fold in run.folds.values():
        hangs.update({label: num for (kind, label), num in fold.counts.items() if kind is HangLine})
    return RunReport(
        event_log=str(directory).encode(errors="backslashreplace").decode(),  # it may be no text
        job=_job(run.last_start, run.hosts),
        first_event_unix_s=run.frame.first_s,
        last_event_unix_s=run.frame.last_s,
        last_iteration=run.num_iterations,
        num_starts=1 + max(each.fold.incarnation for each in run.ends.values()),
        iteration_s=history.iteration_s.value,
        tokens_per_s=history.tokens_per_s,
        first_loss=history.first_loss,
        last_loss=history.last_loss,
        is_last_loss_finite=None if history.last_loss is None else math.isfinite(history.last_loss),
        time_shares=run.shares,
        badput_shares={name.lower(): share for name, share in run.shares.badput.items()},
        ranks=tuple(
            RankEnd(
                rank=rank,
                start=each.fold.incarnation,
                iteration=each.fold.iteration,
                phase=each.phase or None,
                ending=each.ending,
                idle_s=each.fold.recent_idle_s,
            )
            for rank, each in run.ends.items()
        ),
        slow_ranks=tuple(run.stragglers),
        recoveries=tuple(map(_recovery, history.recoveries)),
        repairs=tuple(map(_repair, history.repairs)),
        skipped_batches=history.skipped,
        rank_changes=tuple(
            RankChange(
                iteration=each.iteration,
                from_ranks=each.from_,
                to_ranks=each.to,
                waiting_ranks=each.waiting,
            )
            for each in history.changes
        ),
        verdict=run.verdict or None,
        hangs=dict(hangs) if len(run.folds) == len(run.ends) else None,
        corruptions=Counter(rank for _, _, ranks in sorted(corruptions) for rank in ranks),
        tiers={
            tier.value: TierSums(
                num_snapshots=each.num,
                bytes=each.num_bytes,
                total_s=each.seconds,
                longest_s=each.longest_s,
            )
            for tier, each in run.tiers.items()
        },
        read_bytes=dict(run.read_bytes),
        peer_state_bytes=history.state_bytes,
        peer_gradient_bytes=history.gradient_bytes,
        mean_tokens_at_risk=history.mean_tokens_at_risk,
        expert_slots=_slots([each.slots for each in run.folds.values() if each.slots.num]),
        left_out=run.left_out,
    )


def as_json(report: RunReport) -> str:
    """Return the report for programs."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def _job(start: StartLine | None, hosts: tuple[str, ...]) -> ReportedJob:
    known: dict[str, Any] = {} if start is None else msgspec.structs.asdict(start)
    known |= {
        "name": known.get("job"),
        "num_ranks": known.get("world_size"),
        **{f"{each}_version": known.get(each) for each in ("moe_ft", "megatron", "torch")},
    }
    # An older log lacks some of them: 0 and an empty text are no sizes and no names.
    known |= {name: known.get(name) or None for name in ReportedJob.__struct_fields__}
    return ReportedJob(
        **{name: known[name] for name in ReportedJob.__struct_fields__ if name != "hosts"},
        hosts=hosts,
    )


def _recovery(around: LossesAround) -> RecoveryFacts:
    event, before, after = around.event, around.before, around.after
    return RecoveryFacts(
        start=event.incarnation,
        unix_s=event.time,
        target_iteration=event.target_iteration,
        replayed_iterations=event.replayed_iterations,
        num_units_by_source=event.sources,
        lossy=event.lossy,
        lost_tokens=event.lost_tokens,
        plt=event.plt,
        mtl=event.mtl,
        total_plt=event.total_plt,
        loss_before=median(before) if before else None,
        loss_after=median(after) if after else None,
        highest_loss_after=max(after, default=None),
    )


def _repair(event: RepairLine) -> RepairFacts:
    return RepairFacts(
        start=event.incarnation,
        unix_s=event.time,
        dead_ranks=event.dead_ranks,
        hung_s=event.hung_s,
        hosts_taken_over=event.taken_over,
        shared_ranks=event.shared,
        broken_iteration=event.broken_iteration + 1,  # as log lines count
        repair_s=event.seconds,
    )


def _slots(ranks: Sequence[SlotSums]) -> ExpertSlots | None:
    """Return the sums over ranks that have got tables: one of each stage."""
    if not ranks:
        return None
    mean = max(1, sum(each.mean for each in ranks))
    return ExpertSlots(
        num_tables=sum(each.num for each in ranks),
        num_layers=len(set().union(*(each.layers for each in ranks))),
        num_moved_replicas=sum(each.num_moved for each in ranks),
        imbalance_before=sum(each.most_before for each in ranks) / mean,
        imbalance_after=sum(each.most_after for each in ranks) / mean,
        sent_bytes=max(each.sent_bytes for each in ranks),
    )
