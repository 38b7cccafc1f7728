"""Events, digests and numbers of a run have all their fields, and one incarnation on all ranks."""

import errno
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.training import global_vars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import moe_ft
from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from megatron.fault_tolerance.seams.versions import RECOMMENDED
from moe_ft.config.config import MemoryConfig, MoeFtConfig
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.events import EventLog
from moe_ft.faults import Phase
from moe_ft.loop.listeners import Built, LoopState, Repair
from moe_ft.loop.progress import Digests, ProgressListener
from moe_ft.state.digest import digest_state
from tests.harness import events, run_ranks
from tests.unit.fault_tolerance.loops import ended, events_in, last_event

CONFIG = MoeFtConfig(
    memory=MemoryConfig(job_id="lm"), observability=ObservabilityConfig(event_log="somewhere")
)


@pytest.fixture
def progress(event_log: EventLog, loop_args: Namespace) -> ProgressListener:
    return ProgressListener(CONFIG, MegatronLoop(), LoopState(iteration=5, stall_s=0.5), event_log)


def test_start_names_the_layout_and_where_training_begins(
    progress: ProgressListener, event_log: EventLog
) -> None:
    progress.after_recovery()
    line = last_event(event_log)
    assert line.pop("pid") > 0
    assert line.pop("host")
    assert line == {
        "event": "start",
        "iteration": 5,
        "megatron": RECOMMENDED,
        "world_size": 1,
        "tp": 1,
        "pp": 1,
        "ep": 1,
        "etp": 1,
        "dp": 2,
        "stage": 0,
        "seq_length": 32,
        "job": "lm",
        "strategy": "none",
        "moe_ft": moe_ft.__version__,
        "torch": str(torch.__version__),
        "num_layers": 2,
        "hidden_size": 16,
        "num_experts": 4,
        "train_iterations": 10,
        "state_dtype": dict(CONFIG.precision.packings),
        "lossy": {},
    }


class Rank:
    """The rank that prints the log lines, and what the start before has left of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def leave(self, iteration: int, phase: Phase, *, has_ended: bool = False) -> None:
        """Enter a phase, and perhaps end training."""
        log = EventLog(self._folder, 0)
        log.start()
        progress = ProgressListener(CONFIG, MegatronLoop(), LoopState(iteration=iteration), log)
        progress.enter_phase(iteration, phase)
        if has_ended:
            progress._loop.iteration += 1
            progress.end_training()
        log.close()

    def left_out(self, iteration: int) -> list[int]:
        """Start again at an iteration; return the ones whose log lines are named."""
        log = EventLog(self._folder, 0)
        progress = ProgressListener(CONFIG, MegatronLoop(), LoopState(iteration=iteration), log)
        progress.before_setup()
        log.start()
        progress.after_recovery()
        return [line["iteration"] for line in events_in(log) if line["event"] == "left_out"]


def test_log_line_of_the_recovered_iteration_is_named_if_the_rank_ended_before_it(
    tmp_path: Path, loop_args: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(tmp_path)
    rank.leave(3, Phase.BETWEEN)
    assert rank.left_out(4) == [4]
    assert "the log line of iteration 4 may be missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("left", "phase", "recovered", "has_ended"),
    [
        (3, Phase.FORWARD, 4, False),
        (3, Phase.BETWEEN, 2, False),
        (3, Phase.BETWEEN, 4, True),
        (4, Phase.BETWEEN, 5, False),
    ],
    ids=["next iteration", "older state", "end of training", "no line is due"],
)
def test_log_line_that_was_printed_or_will_be_is_not_named(
    tmp_path: Path,
    loop_args: Namespace,
    left: int,
    phase: Phase,
    recovered: int,
    has_ended: bool,
) -> None:
    rank = Rank(tmp_path)
    rank.leave(left, phase, has_ended=has_ended)
    assert rank.left_out(recovered) == []


def test_iteration_has_its_loss_tokens_and_times(
    progress: ProgressListener, event_log: EventLog
) -> None:
    progress.after_iteration(ended(6, losses={"lm loss": torch.tensor(1.5)}))
    last = last_event(event_log)
    assert last.pop("resident_bytes") > 0
    assert last == {
        "event": "iteration",
        "iteration": 6,
        "iteration_s": 2.0,
        "stall_s": 0.5,
        "idle_s": None,
        "exchange_s": None,
        "stage": 0,
        "loss": 1.5,
        "num_tokens": 8 * 32,
        "device_bytes": None,
        "phases_s": {},
    }
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.BEFORE_STEP, Phase.BETWEEN):
        progress.enter_phase(6, phase)
    progress.after_iteration(ended(7))
    assert [*last_event(event_log)["phases_s"]] == ["forward", "backward"], "those that had an end"
    progress.after_iteration(ended(8))
    assert last_event(event_log)["phases_s"] == {}, "those of this iteration"
    assert last_event(event_log)["loss"] is None, "this stage computes none"


def test_what_only_tells_of_a_run_cannot_end_it(
    progress: ProgressListener, event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """Board, terminal and process of a rank that has no descriptor, and no room, left."""

        def __getattr__(self, name: str) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", Full())
    monkeypatch.setattr(psutil, "Process", Full)
    monkeypatch.setattr(sys, "stderr", Full())
    progress.after_iteration(ended(6, losses={"lm loss": torch.tensor(1.5)}))
    last = last_event(event_log)
    assert (last["iteration"], last["resident_bytes"]) == (6, None)


@pytest.mark.parametrize(
    ("is_saved", "reason"),
    [(True, "exit flag"), (False, "exit flag, the last state is not on storage")],
)
def test_end_says_whether_the_last_state_is_safe(
    is_saved: bool, reason: str, event_log: EventLog
) -> None:
    ProgressListener(
        CONFIG, MegatronLoop(), LoopState(iteration=9, is_saved=is_saved), event_log
    ).end("exit flag", 0)
    line = last_event(event_log)
    assert (line["event"], line["iteration"], line["reason"]) == ("end", 9, reason)
    assert line["peak_device_memory_bytes"] >= 0


@pytest.mark.parametrize(
    ("stages", "num_replayed", "recovered", "scope", "repeated"),
    [((), 0, 5, "global", 2), ((0, 2), 3, 5, "local", 5), ((), 0, 8, "global", 0)],
)
def test_repair_names_the_dead_ranks_and_where_training_ran_again(
    stages: tuple[int, ...],
    num_replayed: int,
    recovered: int,
    scope: str,
    repeated: int,
    event_log: EventLog,
) -> None:
    loop = LoopState(iteration=5, stages_alone=stages, num_replayed=num_replayed)
    ProgressListener(CONFIG, MegatronLoop(), loop, event_log).after_repair(
        Repair(
            number=2,
            iteration=7,
            recovered=recovered,
            dead_ranks=(1, 3),
            hung_s={3: 61.5},
            is_replacement=True,
            taken_over={"node1": "spare"},
            shared=(2,),
            phases_s={"notice": 0.25, "swap": 0.5},
        )
    )
    assert last_event(event_log) == {
        "event": "repair",
        "iteration": 5,
        "round": 2,
        "dead_ranks": [1, 3],
        "hung_s": {"3": 61.5},
        "is_replacement": True,
        "taken_over": {"node1": "spare"},
        "shared": [2],
        "broken_iteration": 7,
        "recovered_iteration": recovered,
        "scope": scope,
        "stages": list(stages),
        "repeated_iterations": repeated,
        "seconds": 0.75,
        "phases_s": {"notice": 0.25, "swap": 0.5},
    }


def test_run_without_a_log_reads_no_loss(loop_args: Namespace, tmp_path: Path) -> None:
    log = EventLog(tmp_path, 3)
    progress = ProgressListener(MoeFtConfig(), MegatronLoop(), LoopState(), log)
    progress.after_setup(([], None, None))
    progress.after_recovery()
    # A loss is on the device: reading it would wait, and this one cannot be read.
    progress.after_iteration(ended(losses={"lm loss": torch.empty(1, device="meta")}))
    progress.end("finished", 0)
    assert list(tmp_path.iterdir()) == []


def open_logs(folder: str) -> None:
    """Open the log of this rank, of which only that of rank 1 has been written before."""
    cpu_device.install()
    dist.init_process_group("gloo")
    log = EventLog(Path(folder), dist.get_rank())
    if log.rank == 1:
        log.start()
        log.incarnation = 6
        log.write("iteration", 1)
        log.close()
    ProgressListener(CONFIG, MegatronLoop(), LoopState(), log).after_setup(([], None, None))
    log.write("opened", 0)
    dist.destroy_process_group()


def test_all_ranks_have_the_same_incarnation(tmp_path: Path) -> None:
    run_ranks(open_logs, 2, str(tmp_path), log_dir=tmp_path).check()
    assert [events(tmp_path, rank, "opened")[0]["incarnation"] for rank in (0, 1)] == [7, 7]


def test_times_of_an_iteration_are_in_tensorboard_also_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = SummaryWriter(str(tmp_path))
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", board)
    loop, log = LoopState(stall_s=0.25), EventLog(tmp_path, 3)
    ProgressListener(MoeFtConfig(), MegatronLoop(), loop, log).after_iteration(ended(6))
    board.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert {
        name: [(each.step, each.value) for each in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    } == {
        "moe-ft/iteration_s": [(6, 2.0)],
        "moe-ft/stall_s": [(6, 0.25)],
        "moe-ft/time/productive": [(6, 0.875)],
        "moe-ft/time/blocked": [(6, 0.125)],
        **{f"moe-ft/time/{use}": [(6, 0.0)] for use in ("redone", "recovering", "waiting")},
    }


class _Numbers(MegatronLoop):
    """A loop that keeps the numbers that are written."""

    def __init__(self) -> None:
        self.last: Mapping[str, float] = {}

    @override
    def write_numbers(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        self.last = numbers


def test_shares_of_the_time_are_those_of_report_also_after_a_restart(
    tmp_path: Path, loop_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 102.5, 112.5, 114.5, 116.5])
    monkeypatch.setattr("moe_ft.loop.progress.time.time", lambda: next(clock))
    for first, last in ((1, 3), (2, 4)):  # the second start has the state of iteration 1
        numbers, log = _Numbers(), EventLog(tmp_path, 0)
        progress = ProgressListener(
            CONFIG, numbers, LoopState(stall_s=0.5, replay_s=first - 1), log
        )
        progress.before_setup()
        log.start()
        log.incarnation = first - 1
        with monkeypatch.context() as logged:  # `time` of events: not on this clock
            logged.setattr(log, "write", lambda *args, **values: None)
            progress.after_recovery()
            for iteration in range(first, last):
                progress.after_iteration(ended(iteration))
                progress.enter_phase(iteration, Phase.FORWARD)
        log.close()
    # 2 and 2.5 s; 10 s until iteration 2 again, of which it takes 2 and its replay 1; 2 s for iteration 3.
    spent = {"productive": 1.5 + 2.0 + 1.5, "blocked": 1.5, "redone": 1.0 + 2.0, "recovering": 7.0}
    shares = {f"time/{use}": seconds / 16.5 for use, seconds in spent.items()}
    assert {name: numbers.last[name] for name in shares} == pytest.approx(shares)


EVERY = ObservabilityConfig(event_log="somewhere", state_digest_interval=3)
LAST = ObservabilityConfig(event_log="somewhere", state_digest=True)


class _Scheduler:
    """As much of Megatron's as a digest reads."""

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": 12}


class _Optimizer:
    """As much of Megatron's as a digest reads."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.optimizer = torch.optim.SGD([weight], lr=0.5)
        self.chained_optimizers = [self]
        self.grad_scaler = None


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)  # without a GPU
    model = torch.nn.Linear(2, 2)
    return [model], _Optimizer(model.weight), _Scheduler()


def digests_of(config: ObservabilityConfig, log: EventLog, built: Built) -> Digests:
    digests = Digests(config, MegatronLoop(), LoopState(iteration=6), log)
    digests.after_setup(built)
    return digests


def test_digest_of_an_iteration_counts_the_samples_that_megatron_will_add(
    event_log: EventLog, built: Built, loop_args: Namespace
) -> None:
    loop_args.consumed_train_samples, loop_args.consumed_valid_samples = 40, 4
    digests_of(EVERY, event_log, built).after_iteration(ended(6))
    counters = {"iteration": 6, "consumed_train_samples": 48, "consumed_valid_samples": 4}
    expected = digest_state(*built, counters)
    assert last_event(event_log) == {
        "event": "state_digest",
        "iteration": 6,
        "sha256": expected.sha256,
        "sha256_all": expected.sha256_all,
    }


def test_digest_of_the_end_equals_that_of_the_last_iteration(
    event_log: EventLog, built: Built, loop_args: Namespace
) -> None:
    loop_args.consumed_train_samples = 40
    digests_of(EVERY, event_log, built).after_iteration(ended(6))
    loop_args.consumed_train_samples = 48
    digests_of(LAST, event_log, built).after_training()
    first, second = events_in(event_log)
    assert first["sha256_all"] == second["sha256_all"]


def test_other_iterations_have_no_digest(
    event_log: EventLog, built: Built, loop_args: Namespace
) -> None:
    digests = digests_of(EVERY, event_log, built)
    digests.after_iteration(ended(5))
    digests.after_training()
    digests_of(LAST, event_log, built).after_iteration(ended(6))
    assert events_in(event_log) == []
