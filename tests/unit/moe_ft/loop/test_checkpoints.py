"""Checkpoints write what was recovered and reported; without a strategy they do nothing.

Recoveries and snapshots of whole jobs are in tests/distributed.
"""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from megatron.training import global_vars

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.background import Report
from moe_ft.events import EventLog, event_path, read_events
from moe_ft.loop.checkpoints import Checkpoints
from moe_ft.loop.faults import Faults
from moe_ft.loop.leaving import BreakpointWriter
from moe_ft.loop.listeners import Listeners, LoopState
from moe_ft.loop.routers import Routers
from moe_ft.planning.recovery import Tier
from moe_ft.recovery.checkpointing import RecoveryOutcome
from moe_ft.strategies.partial.strategy import PartialLoss
from tests.unit.fault_tolerance.loops import events_in, last_event

DENSE = MoeFtConfig(strategy=StrategyConfig(strategy="dense"))
RECOVERY = RecoveryOutcome(
    iteration=12,
    start=2,
    writer=1,
    sources={Tier.MEMORY: 3, Tier.PEER: 4},
    needed_bytes=30,
    read_bytes={"a": 20, "b": 15},
    phases_s={"plan": 0.5},
    problems=["storage: damaged"],
    is_deterministic=False,
    lossy={"exp_avg": "bf16"},
    blocked_by="iteration 14: stage 1 has no record",
)
LOSS = PartialLoss(
    lost_tokens=7,
    plt=0.25,
    mtl=0.25,
    repeated_tokens=2,
    total_lost_tokens=9,
    total_plt=0.5,
    total_mtl=0.5,
    per_expert={"layer.0": (3, 4)},
    k_snapshot=2,
    k_persist=1,
)


class _Wandb:
    """As much of W&B as Megatron's writer: keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, float], int]] = []

    def log(self, scalars: dict[str, float], iteration: int) -> None:
        self.lines.append((scalars, iteration))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> _Wandb:
    writer = _Wandb()
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", writer)
    return writer


def checkpoints_of(config: MoeFtConfig, log: EventLog, loop: LoopState) -> Checkpoints:
    training, routers = MegatronLoop(), Routers(config, log)
    faults, breakpoints = Faults([], log), BreakpointWriter(loop, log)
    return Checkpoints(config, training, loop, log, faults, routers, breakpoints)


@pytest.fixture
def checkpoints(event_log: EventLog) -> Checkpoints:
    return checkpoints_of(DENSE, event_log, LoopState())


def test_recovery_has_every_field(
    checkpoints: Checkpoints, event_log: EventLog, wandb: _Wandb
) -> None:
    checkpoints._write_recovery(RECOVERY, 2)
    assert last_event(event_log) == {
        "event": "recovery",
        "iteration": 12,
        "scope": "global",
        "stages": [],
        "reason": "iteration 14: stage 1 has no record",
        "target_iteration": 12,
        "restored_iteration": 10,
        "replayed_iterations": 2,
        "start": 2,
        "writer": 1,
        "lost_tokens": 0,
        "plt": 0.0,
        "sources": {"memory": 3, "peer": 4},
        "needed_bytes": 30,
        "read_bytes": {"a": 20, "b": 15},
        "phases_s": {"plan": 0.5},
        "deterministic": False,
        "lossy": {"exp_avg": "bf16"},
        "problems": ["storage: damaged"],
    }
    assert wandb.lines == []


def test_line_of_the_first_rank_says_where_training_continues(
    checkpoints: Checkpoints, event_log: EventLog, capsys: pytest.CaptureFixture[str]
) -> None:
    event_log.rank = 0
    checkpoints._write_recovery(RECOVERY, 0)
    line = "moe_ft: training continues after iteration 12, whose state comes from memory and peer"
    assert capsys.readouterr().err == f"{line}\n"
    checkpoints._write_recovery(replace(RECOVERY, stages=(1, 2)), 2)
    ran = "stages that have run iterations again: 1, 2"
    assert capsys.readouterr().err == f"{line}; {ran}\n"
    event_log.rank = 1
    checkpoints._write_recovery(RECOVERY, 0)
    assert capsys.readouterr().err == ""


def test_recovery_that_lost_tokens_says_how_many_and_where(
    checkpoints: Checkpoints, event_log: EventLog, wandb: _Wandb
) -> None:
    checkpoints._write_recovery(replace(RECOVERY, loss=LOSS), 0)
    line = last_event(event_log)
    assert {name: line[name] for name in ("lost_tokens", "plt", "repeated_tokens")} == {
        "lost_tokens": 7,
        "plt": 0.25,
        "repeated_tokens": 2,
    }
    assert (line["total_lost_tokens"], line["total_plt"]) == (9, 0.5)
    assert line["lost_per_expert"] == {"layer.0": [3, 4]}
    assert (line["k_snapshot"], line["k_persist"]) == (2, 1)
    assert wandb.lines == [({"moe-ft/plt": 0.5, "moe-ft/lost_tokens": 7}, 12)]


def test_report_of_a_thread_is_an_event_and_its_numbers_are_scalars(
    checkpoints: Checkpoints, event_log: EventLog, wandb: _Wandb
) -> None:
    fields = {"seconds": 0.5, "bytes": 7, "part": "persist"}
    checkpoints._write_report(Report(event="snapshot", iteration=6, fields=fields))
    assert last_event(event_log) == {"event": "snapshot", "iteration": 6, **fields}
    assert wandb.lines == [({"moe-ft/snapshot/seconds": 0.5, "moe-ft/snapshot/bytes": 7.0}, 6)]


@pytest.mark.parametrize("is_logged", [False, True])
def test_snapshot_is_logged_with_its_time_and_with_its_experts_if_loads_are(
    is_logged: bool, event_log: EventLog, loop_args: Namespace
) -> None:
    observability = ObservabilityConfig(event_log="events", router_log=is_logged)
    checkpoints = checkpoints_of(
        replace(DENSE, observability=observability), event_log, LoopState()
    )
    fields = {"bytes": 7, "experts": {"layer.0": [1]}}
    checkpoints._write_report(Report(event="snapshot", iteration=6, fields=fields, time_s=5.5))
    (line,) = read_events(event_path(event_log.directory, event_log.rank))
    assert (line["time"], line["bytes"], "experts" in line) == (5.5, 7, is_logged)


@pytest.mark.parametrize(("config", "optimizer"), [(MoeFtConfig(), "any"), (DENSE, None)])
def test_run_without_a_strategy_or_an_optimizer_takes_no_checkpoint(
    config: MoeFtConfig, optimizer: object, event_log: EventLog, loop_args: Namespace
) -> None:
    loop = LoopState()
    with Listeners(loop, [checkpoints_of(config, event_log, loop)]) as listeners:
        listeners.before_setup()
        listeners.after_setup(([], optimizer, None), 5)
        listeners.replay_if_due()
        listeners.begin_iteration(5)
        listeners.before_step()
        listeners.end_iteration({"lm loss": torch.ones(1)}, is_skipped=False, num_samples=8)
        listeners.end_training()
        listeners.end("finished")
        listeners.failed(ValueError("the shapes do not match"))
    assert loop.iteration == 6
    assert loop.is_saved
    assert loop.stall_s == 0.0
    assert events_in(event_log) == []
