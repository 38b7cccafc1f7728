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
from moe_ft.engine.background import EngineEvent
from moe_ft.events import EventLog, event_path, read_events
from moe_ft.loop.checkpoints import Checkpoints, StateSeam
from moe_ft.loop.faults import Faults
from moe_ft.loop.leaving import BreakpointWriter
from moe_ft.loop.listeners import Listeners, LoopState
from moe_ft.loop.routers import Routers
from moe_ft.planning.tiers import MEMORY, PEER
from moe_ft.recovery.checkpointing import RecoveryOutcome
from moe_ft.state.record import IterationFacts
from moe_ft.strategies.partial.strategy import PartialLoss
from tests.unit.fault_tolerance.loops import ended, events_in, last_event

DENSE = MoeFtConfig(strategy=StrategyConfig(strategy="dense"))
RECOVERY = RecoveryOutcome(
    iteration=12,
    start=2,
    writer=1,
    sources={MEMORY: 3, PEER: 4},
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
    checkpoints._write_report(EngineEvent(event="snapshot", iteration=6, fields=fields))
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
    checkpoints._write_report(EngineEvent(event="snapshot", iteration=6, fields=fields, time_s=5.5))
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


TOKENS = {"layer.0": torch.tensor([5, 3])}


class _Engine:
    """Keeps the states that it is asked to act on; training stands still for 0.25 seconds each."""

    def __init__(self) -> None:
        self.acted: list[IterationFacts] = []
        self.seconds: list[float] = []

    def act(self, facts: IterationFacts, iteration_s: float) -> float:
        self.acted.append(facts)
        self.seconds.append(iteration_s)
        return 0.25


class Run:
    """An engine at the seam of a loop that has made the state of iteration 6."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.engine = args, _Engine()
        self.loop = LoopState(iteration=6, grad_norm=1.5)
        self.seam = StateSeam(MegatronLoop(), self.loop, self.engine.act, lambda: TOKENS)


@pytest.fixture
def run(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(MegatronLoop, "num_operations_of", lambda loop, samples: 50.0 * samples)
    loop_args.num_floating_point_operations_so_far = 1000.0
    return Run(loop_args)


def test_state_is_passed_at_once_with_samples_that_the_loop_has_not_counted(run: Run) -> None:
    run.args.consumed_train_samples = 40
    run.seam.end_iteration(ended(6))
    (facts,) = run.engine.acted
    assert (facts.iteration, facts.counters.consumed_train_samples, facts.grad_norm) == (6, 48, 1.5)
    assert facts.counters.num_microbatches == 2
    assert facts.tokens_per_expert is TOKENS
    assert run.engine.seconds == [2.0]
    assert run.loop.stall_s == 0.25


def test_operations_are_added_to_the_count_of_earlier_starts(run: Run) -> None:
    for iteration in (6, 7):
        run.seam.end_iteration(ended(iteration))
    found = [facts.num_floating_point_operations for facts in run.engine.acted]
    assert found == [1400.0, 1800.0]


def test_state_that_is_evaluated_is_passed_when_the_loop_continues(run: Run) -> None:
    run.args.do_valid = True
    run.seam.end_iteration(ended(6))
    assert run.engine.acted == []
    assert run.loop.stall_s == 0.0
    run.args.consumed_train_samples, run.args.consumed_valid_samples = 48, 4  # by the loop
    for _ in range(2):  # once is enough
        run.seam.pass_postponed()
    (facts,) = run.engine.acted
    assert facts.iteration == 6
    counters = facts.counters
    assert (counters.consumed_train_samples, counters.consumed_valid_samples) == (48, 4)
    assert run.engine.seconds == [2.0]
    assert run.loop.stall_s == 0.25


@pytest.mark.parametrize("flags", [{"save": "folder", "save_interval": 3}, {"exit_interval": 6}])
def test_state_that_is_saved_or_the_last_is_passed_when_that_is_over(
    run: Run, flags: dict[str, object]
) -> None:
    vars(run.args).update(flags)
    assert run.seam.facts_ahead(8) is not None
    run.loop.iteration = 5
    assert run.seam.facts_ahead(8) is None
    run.loop.iteration = 6
    run.seam.end_iteration(ended(6))
    assert run.engine.acted == []
    run.seam.pass_postponed()
    assert [facts.iteration for facts in run.engine.acted] == [6]


def test_last_facts_do_not_include_a_batch_that_was_skipped_later(run: Run) -> None:
    run.args.consumed_train_samples = 40
    run.seam.end_iteration(ended(6))
    run.args.consumed_train_samples = 56  # 8 of the iteration, 8 of a skipped batch
    assert run.seam.last_facts() is run.engine.acted[0]
    assert run.seam.last_facts().counters.consumed_train_samples == 48


def test_last_facts_are_the_current_ones_if_nothing_was_trained(run: Run) -> None:
    run.args.consumed_train_samples = 40
    facts = run.seam.last_facts()
    assert (facts.iteration, facts.counters.consumed_train_samples) == (6, 40)
    assert facts.num_floating_point_operations == 1000.0
