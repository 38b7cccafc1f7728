"""Schedules near which mistakes show that few random ones show; power.py looks for mistakes with them."""

import random

import msgspec

from tests.simulation.job import Setup
from tests.simulation.repairs.near import NEAR_OF_REPAIRS
from tests.simulation.repairs.schedule import RepairSchedule
from tests.simulation.schedule import Fault, Schedule
from tests.simulation.shape import Shape
from tests.simulation.soak import AnySchedule

_STAGES = Setup(stages=3, dp=1, ep=1, nodes=1, replication="0", breakpoints=True, upstream_log=True)
_POWER_LOSS = Schedule(
    seed=186,
    setup=msgspec.structs.replace(
        _STAGES,
        stages=2,
        dp=2,
        ep=2,
        strategy="sparse",
        options={"window": "4", "max_window": 3, "unit_order": "decayed"},
        interval="2",
        persist_interval=1,
        dense_interval=1,
        keep=3,
        stop_interval=2,
        recovery="local",
        fan_out=2,
    ),
    faults=(
        Fault(kind="stranger-in-store", start=0, event=0, target=26, amount=0.808),
        Fault(kind="kill-two", start=0, event=29, target=45, amount=0.62, moment="in step"),
        Fault(
            kind="suspend-rank", start=0, event=4, target=26, amount=0.845, moment="in breakpoint"
        ),
        Fault(kind="kill-rank", start=1, event=2, target=50, amount=0.638, moment="after step"),
        Fault(kind="power-loss", start=2, target=58, amount=0.581),
    ),
    switching=0.1,
)
# By mistake. Each change of the product moves the place of an event, so the same faults are tried at other
# places too.
NEAR: dict[str, AnySchedule] = {
    **NEAR_OF_REPAIRS,
    "leader-speaks-for-its-group": Schedule(
        seed=207,
        setup=msgspec.structs.replace(
            _STAGES,
            stages=4,
            nodes=4,
            replication="auto",
            iterations=10,
            strategy="sparse",
            options={"window": "1", "max_window": 5, "unit_order": "count"},
            keep=1,
            stop_interval=1,
            recovery="global",
            fan_out=2,
        ),
        faults=(
            Fault(kind="kill-rank", start=0, event=562, target=42, amount=0.672, moment="link"),
            Fault(
                kind="lose-node", start=1, event=20, target=24, amount=0.769, moment="after step"
            ),
            Fault(kind="stranger-in-store", start=2, event=0, target=13, amount=0.584),
            Fault(kind="move-ranks", start=2, target=54, amount=0.902),
            Fault(kind="terminate", start=2, event=282, target=2, is_after_recovery=True),
        ),
        switching=0.02,
    ),
    "data-left-where-the-replay-began": Schedule(
        seed=135,
        setup=msgspec.structs.replace(
            _STAGES,
            experts=2,
            is_followed=True,
            nodes=2,
            replication="auto",
            keep=1,
            fan_out=2,
            streams=3,
        ),
        faults=(
            Fault(kind="stranger-in-store", start=0, event=0, target=22, amount=0.971),
            Fault(kind="kill-rank", start=0, event=7, target=32, amount=0.56, moment="before step"),
            Fault(kind="kill-rank", start=0, event=2, target=31, amount=0.741, moment="store"),
            Fault(kind="reset", start=1, event=5, target=55, amount=0.93, moment="after step"),
        ),
        switching=0.6,
    ),
    "no-fsync": _POWER_LOSS,
    "no-fsync-of-directories": _POWER_LOSS,
    "pruned-without-reading": Schedule(
        seed=130,
        setup=Setup(
            stages=2,
            dp=1,
            ep=1,
            experts=2,
            iterations=4,
            persist_interval=1,
            keep=3,
            stop_interval=1,
            fan_out=2,
            streams=3,
        ),
        faults=(Fault(kind="flip-storage", start=2), Fault(kind="prune", start=2)),
        switching=0.3,
    ),
    "storage-that-is-away-refuses-a-start": Schedule(
        seed=127,
        setup=Setup(
            dp=1,
            ep=1,
            nodes=1,
            iterations=4,
            replication="0",
            persist_interval=1,
            dense_interval=1,
            stop_interval=2,
            fan_out=2,
        ),
        faults=(
            Fault(kind="kill-all", start=0, event=171),
            Fault(kind="storage-away", start=1, amount=1.0),
        ),
        switching=0.02,
    ),
    "weights-changed-under-a-breakpoint": Schedule(
        seed=138,
        setup=msgspec.structs.replace(
            _STAGES, dp=2, interval="2", iterations=4, upstream_log=False
        ),
        faults=(Fault(kind="terminate", start=0, event=24, moment="in step"),),
        switching=0.1,
    ),
    "torn-breakpoint": Schedule(
        seed=1,
        setup=msgspec.structs.replace(_STAGES, interval="3"),
        faults=(Fault(kind="terminate", start=0, event=13, moment="in step"),),
    ),
    "strangers-believed": Schedule(
        seed=1,
        setup=msgspec.structs.replace(_STAGES, interval="3"),
        faults=(
            Fault(kind="stranger-in-store", start=0, event=0),
            Fault(kind="terminate", start=0, event=13, moment="in step"),
        ),
    ),
    "last-state-dropped": Schedule(
        seed=1,
        setup=msgspec.structs.replace(_STAGES, interval="3"),
        faults=(Fault(kind="kill-this", start=0, event=24, moment="after step"),),
    ),
    "writes-not-read-back": Schedule(
        seed=493,
        setup=Setup(
            dp=1, ep=1, nodes=1, iterations=6, interval="2", replication="0", persist_interval=2
        ),
        faults=(
            Fault(kind="garble-storage", start=0, event=248),
            Fault(kind="kill-all", start=0, event=401),
            Fault(kind="lose-all-memory", start=1),
        ),
        switching=0.02,
    ),
    "base-freed-too-early": Schedule(  # the peer dies in the middle of a step, then its owner's memory
        seed=1,
        setup=Setup(dp=2, ep=1, nodes=2, iterations=6, is_followed=True),
        faults=(
            Fault(kind="kill-all", start=0, event=540),
            Fault(kind="lose-node", start=1, target=0),
        ),
        switching=0.3,
    ),
    "skipped-step-forgotten": Schedule(  # no fault is needed
        seed=128,
        setup=Setup(dp=3, ep=1, layers=2, nodes=2, skips=True, is_followed=True, streams=3),
        faults=(),
        switching=0.6,
    ),
    # A window that peers have and one rank lacks, and the next one under way when an owner is lost.
    "sender-not-heard": Schedule(
        seed=248,
        setup=Setup(dp=2, ep=1, nodes=2, strategy="sparse", options={"window": "3"}),
        faults=(
            Fault(kind="partition", start=0, event=516, target=2, amount=0.8881361531291087),
            Fault(kind="kill-all", start=0, event=604),
            Fault(kind="lose-node", start=1, target=2),
        ),
        switching=0.1,
    ),
    "newest-part-counts": Schedule(
        seed=67,
        setup=Setup(
            dp=3,
            ep=1,
            layers=2,
            is_sharded=False,
            nodes=2,
            strategy="partial",
            options={"k_snapshot": "2", "k_persist": 1, "selection": "sequential"},
            iterations=10,
            breakpoints=True,
            later=(Shape(dp=3, ep=1, layers=2, is_sharded=False), Shape(dp=1, tp=2, layers=2)),
        ),
        faults=(
            Fault(kind="kill-node", start=0, event=18, target=25, moment="phase snapshot"),
            Fault(kind="kill-rank", start=1, event=1, target=20, moment="before step"),
        ),
        switching=0.6,
    ),
    # In the second start each rank has the same experts; it dies soon after its first snapshot.
    "pools-filled-again": Schedule(
        seed=1,
        setup=Setup(
            layers=2,
            nodes=1,
            replication="0",
            strategy="partial",
            options={"k_snapshot": "1", "k_persist": 1, "selection": "sequential"},
            iterations=10,
            later=(Shape(dp=1, tp=2, layers=2),),
        ),
        faults=(
            Fault(kind="kill-all", start=0, event=10, moment="before step"),
            Fault(kind="kill-all", start=1, event=3, moment="before step"),
        ),
    ),
    **dict.fromkeys(  # the second failure comes while experts are owed tokens
        (
            "debts-left-out-of-the-record",
            "breakpoint-owes-what-it-has-paid",
            "lost-tokens-not-made-up",
        ),
        Schedule(
            seed=1,
            setup=Setup(
                layers=2,
                nodes=1,
                replication="0",
                strategy="partial",
                options={"k_snapshot": "1", "k_persist": 1, "selection": "sequential"},
                iterations=10,
                breakpoints=True,
                boost=0.1,
            ),
            faults=(
                Fault(kind="kill-all", start=0, event=10, moment="before step"),
                Fault(kind="terminate", start=1, event=3, moment="before step"),
            ),
        ),
    ),
    "gaps-of-another-layout-left": Schedule(  # both have regions of one size
        seed=1,
        setup=Setup(
            dp=4,
            ep=4,
            layers=2,
            nodes=2,
            iterations=6,
            is_followed=True,
            later=(Shape(stages=2, dp=2, ep=2, layers=1, is_followed=True),),
        ),
        faults=(Fault(kind="kill-all", start=0, event=900),),
    ),
    "gaps-of-another-unit-left": Schedule(  # ranks have parts of experts, of several sizes
        seed=1,
        setup=Setup(
            dp=3,
            ep=1,
            layers=2,
            experts=2,
            nodes=2,
            iterations=10,
            is_followed=True,
            strategy="selective",
            options={"local_budget": "auto", "remote_budget": "744"},
        ),
        faults=(),
    ),
    "damaged-logs-forgotten": Schedule(
        seed=910000788,
        setup=msgspec.structs.replace(
            _STAGES,
            skips=True,
            nodes=3,
            iterations=10,
            strategy="sparse",
            options={"window": "2", "max_window": 5, "unit_order": "decayed"},
            interval="2",
            replication="auto",
            keep=1,
            recovery="local",
            streams=2,
        ),
        faults=(
            Fault(kind="kill-two", start=0, event=15, target=30, amount=0.072, moment="after step"),
            Fault(kind="flip-memory", start=1, target=56, amount=0.543),
        ),
        switching=0.1,
    ),
    "older-files-forgotten": Schedule(
        seed=230,
        setup=Setup(
            dp=1,
            ep=1,
            skips=True,
            nodes=1,
            iterations=10,
            strategy="partial",
            options={
                "k_snapshot": "auto",
                "k_persist": 2,
                "selection": "sequential",
                "dynamic_k": True,
            },
            replication="0",
            persist_interval=2,
            keep=1,
            state_dtype="master=split",
        ),
        faults=(
            Fault(kind="kill-all", start=0, event=316, target=6, amount=0.714),
            Fault(kind="lose-all-memory", start=1, target=32, amount=0.287),
            *[Fault(kind="flip-storage", start=1, target=25, amount=0.18)] * 32,
        ),
        switching=0.6,
    ),
    "damaged-state-planned-with": Schedule(
        seed=535707,
        setup=msgspec.structs.replace(
            _STAGES, stages=4, interval="1", iterations=6, keep=1, stop_interval=5, recovery="local"
        ),
        faults=(
            Fault(kind="power-loss", start=1, target=47, amount=0.359),
            Fault(kind="flip-memory", start=2, target=44, amount=0.942),
        ),
        switching=0.02,
    ),
    "step-past-the-meeting": Schedule(
        seed=62,
        setup=msgspec.structs.replace(_STAGES, interval="2", iterations=10, is_sharded=False),
        faults=(Fault(kind="terminate", start=0, event=20, moment="after step"),),
        switching=0.02,
    ),
    # The second half of a stripe arrives damaged, and its rank sends the whole window with the next snapshot.
    "broken-parity-counts": Schedule(
        seed=2078,
        setup=Setup(
            dp=3,
            ep=1,
            layers=1,
            nodes=3,
            iterations=6,
            strategy="sparse",
            options={"window": "2", "max_window": 4},
            parity=3,
            keep=1,
        ),
        faults=(
            Fault(kind="corrupt", start=0, event=14, moment="phase replicate"),
            Fault(kind="lose-node", start=0, event=13, target=6, moment="after step"),
        ),
        switching=0.02,
    ),
    # One node is lost after the other, as soon as the first window after a recovery has begun.
    "parity-without-what-was-recovered": Schedule(
        seed=55,
        setup=Setup(
            stages=2,
            dp=3,
            ep=1,
            layers=1,
            experts=2,
            nodes=3,
            iterations=6,
            parity=3,
            keep=1,
            streams=3,
            breakpoints=True,
        ),
        faults=(
            Fault(kind="lose-node", start=0, event=2210, target=5),
            Fault(kind="lose-node", start=1, event=174, target=38, is_after_recovery=True),
            Fault(kind="lose-node", start=2, event=185, target=63, is_after_recovery=True),
        ),
        switching=0.3,
    ),
    "breakpoint-overwritten-too-early": Schedule(
        seed=7,
        setup=msgspec.structs.replace(_STAGES, interval="2", iterations=10),
        faults=(
            Fault(kind="kill-rank", start=0, event=19, target=1, moment="in step"),
            Fault(kind="kill-rank", start=1, event=30, target=1, is_after_recovery=True),
        ),
    ),
}


def vary(schedule: AnySchedule, seed: int) -> AnySchedule:
    """Return the same faults at other places, up to half as far again, with another order of threads."""
    rng = random.Random(f"near {seed}")
    place = "time" if isinstance(schedule, RepairSchedule) else "event"
    faults = [
        msgspec.structs.replace(each, **{place: round(before * rng.uniform(0.5, 1.5))})
        if (before := getattr(each, place)) > 0
        else each
        for each in schedule.faults
    ]
    return msgspec.structs.replace(schedule, seed=seed, faults=tuple(faults))
