"""Flags of partial checkpoints, and commands that read them: k, covered parts, refusals, inspect, verify."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

import pretrain_gpt_moe
from moe_ft.cli import main
from moe_ft.engine.agreement import StageSum
from moe_ft.engine.clock import Clock
from moe_ft.engine.snapshots.profile import Stall
from moe_ft.files.storage import Storage
from moe_ft.state.record import RecordTaker
from tests.jobs import CheckpointJob, flip_byte
from tests.partial_runs import PARTIAL, follow, killed_with_storage, recount
from tests.unit.moe_ft.builders import manifest_of

COUNTS_S, RECORD_S = 1000.0, 20.0  # that copying counts and a record take


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_commands_show_versions_of_experts_and_check_older_files(
    job: CheckpointJob, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_with_storage(job, keep=1)
    storage = str(job.storage)
    assert main(["inspect", storage]) == 0
    text = capsys.readouterr().out
    assert "recoveries so far have lost 0 tokens, PLT 0.000 %; one from here loses" in text
    assert main(["verify", storage]) == 0
    assert main(["verify", str(job.memory_dir / "test")]) == 0
    # One checkpoint is kept. The older files that it needs are there, and are checked too.
    (newest,) = job.stored()
    older = [
        path
        for path in job.storage.glob("iter_*/rank_*.safetensors")
        if path.parent.name != f"iter_{newest:07d}"
    ]
    assert older
    flip_byte(older[0], -100)
    capsys.readouterr()
    assert main(["verify", storage]) == 1
    assert "does not match its checksum" in capsys.readouterr().out


@pytest.mark.rest
def test_report_shows_each_recovery_with_its_losses(
    job: CheckpointJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run_with_faults("kill:1@5:backward", flags=(*PARTIAL, "--moe-ft-k-snapshot", "1"))
    (recovery,) = job.events("recovery")
    assert main(["report", str(job.events_dir)]) == 0
    text = capsys.readouterr().out
    assert "lost tokens" in text
    assert f"{100 * recovery['plt']:.3f}" in text
    assert "loss of 5 before" in text


@pytest.mark.rest
def test_master_weights_that_are_always_saved_do_not_rotate(job: CheckpointJob) -> None:
    job.run_with_faults(
        "kill:1@5:backward",
        flags=(*PARTIAL, "--moe-ft-master-always-full", "--moe-ft-k-snapshot", "1"),
        storage=True,
    )
    (recovery,) = job.events("recovery")
    counted = recount(job, 1)
    follow(counted, 0, 0, recovery["restored_iteration"])
    assert recovery["lost_per_expert"] == counted.recover(recovery["restored_iteration"])
    units = manifest_of(Storage(str(job.storage)), 6).units
    assert {"layer.0.expert.0.weights", "layer.0.expert.0.moments"} <= set(units)


@pytest.mark.rest
def test_automatic_k_takes_as_many_experts_as_forward_and_backward_hide(
    job: CheckpointJob,
) -> None:
    job.run_with_faults(
        "kill:1@38:backward",
        flags=("--moe-ft-strategy", "partial", "--train-iters", "40"),
    )
    changes = job.events("strategy")
    assert changes[0]["k_snapshot"] > 1  # copying this model takes almost no time
    assert all(1 <= line["k_snapshot"] <= 4 for line in changes)
    assert job.events("recovery")[0]["k_snapshot"] == changes[0]["k_snapshot"]


@pytest.mark.rest
def test_dynamic_k_doubles_after_recoveries_and_survives_them(job: CheckpointJob) -> None:
    job.run_with_faults(
        "kill:1@5:backward",
        "kill:0@9:backward",
        flags=(
            *PARTIAL,
            *("--train-iters", "12", "--moe-ft-k-snapshot", "1", "--moe-ft-dynamic-k"),
            *("--moe-ft-plt-limit", "0.33"),  # one failure costs a large part of so short a run
        ),
    )
    assert [line["k_snapshot"] for line in job.events("recovery")] == [2, 4]
    assert [line["k_persist"] for line in job.events("recovery")] == [2, 4]


def train_on_slow_copies(flags: list[str]) -> None:
    """Train on a clock that advances only in copies that training waits for. Runs on every rank."""
    now_s = 0.0

    def slow(original: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        @wraps(original)
        def act(*args: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return original(*args)

        return act

    class SlowCopies(Clock):
        def perf_counter(self) -> float:
            return now_s

    make_stall = Stall.__init__
    Stall.__init__ = lambda stall, clock: make_stall(stall, SlowCopies())  # type: ignore[method-assign,assignment]
    StageSum.begin = slow(StageSum.begin, COUNTS_S)  # type: ignore[method-assign]
    RecordTaker.capture = slow(RecordTaker.capture, RECORD_S)  # type: ignore[method-assign]
    pretrain_gpt_moe.main(flags)


def test_copies_that_training_waits_for_are_counted_as_stalls(job: CheckpointJob) -> None:
    job.train = train_on_slow_copies
    job.run(*PARTIAL, "--train-iters", "2").check()  # a snapshot of the second
    stalls = [line["stall_s"] for line in job.events("iteration")]
    assert stalls == [COUNTS_S, COUNTS_S + RECORD_S]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--moe-ft-strategy", "dense"),
            "--moe-ft-strategy=dense cannot continue from",
        ),
        (
            (*PARTIAL, "--moe-ft-k-snapshot", "1", "--moe-ft-master-always-full"),
            "divided differently: '--moe-ft-partial-covers both' there",
        ),
    ],
)
def test_start_that_cannot_use_what_partial_snapshots_left_says_so(
    job: CheckpointJob, flags: tuple[str, ...], message: str
) -> None:
    job.run(*PARTIAL, "--moe-ft-k-snapshot", "1", "--moe-ft-inject-fault", "kill:1@5:backward")
    result = job.run(*flags)
    assert result.exit_codes[0] == 2
    assert message in " ".join(result.output(0).split())
    # Nothing was touched: with its own flags the run continues.
    job.resume(*PARTIAL, "--moe-ft-k-snapshot", "1")
