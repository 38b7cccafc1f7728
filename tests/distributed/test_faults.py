"""Injected faults fire where they should, once, and the report names the right rank."""

from pathlib import Path

import pytest

from moe_ft.faults import ITERATION_PHASES, Phase
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import JobResult, events, run_training
from tests.shares import share_of

RANKS = 4
FAILED, KILLED, TERMINATED = 1, -9, 128 + 15


def fault_flags(fault: str, dataset_flags: list[str], folder: Path) -> list[str]:
    return [
        *model_flags(train_iters=3),
        *layout_flags({"pp": 2, "ep": 2}),
        *dataset_flags,
        *event_flags(folder),
        *("--moe-ft-inject-fault", fault, "--moe-ft-fault-report-grace-s", "2"),
    ]


def run_with_fault(fault: str, dataset_flags: list[str], folder: Path, *flags: str) -> JobResult:
    return run_training([*fault_flags(fault, dataset_flags, folder), *flags], RANKS, log_dir=folder)


@pytest.mark.parametrize("phase", share_of(ITERATION_PHASES, Phase.IN_STEP))
def test_killed_rank_dies_in_its_phase_and_the_others_report_it(
    phase: Phase, dataset_flags: list[str], tmp_path: Path
) -> None:
    result = run_with_fault(f"kill:3@1:{phase}", dataset_flags, tmp_path)
    assert result.exit_codes[3] == KILLED
    assert set(result.exit_codes[:3]) <= {FAILED, TERMINATED}
    fired = events(tmp_path, 3)[-1]
    assert (fired["event"], fired["kind"], fired["phase"], fired["iteration"]) == (
        "fault_injected",
        "kill",
        phase,
        1,
    )
    first, *others = (events(tmp_path, rank)[-1]["silent_ranks"] for rank in range(3))
    assert first == [3]
    assert all(each in ([3], None) for each in others), "None: the store of rank 0 had ended"
    said = "".join(map(result.output, range(3)))
    assert said.count("heard nothing from rank 3 (last in iteration 1") == 1


def test_death_of_the_rank_that_keeps_the_store_is_reported(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    result = run_with_fault("kill:0@1:backward", dataset_flags, tmp_path)
    assert result.exit_codes[0] == KILLED
    assert all(events(tmp_path, rank)[-1]["event"] == "stopped" for rank in (1, 2, 3))
    assert (
        "the job's store does not answer (rank 0 (last in iteration 1, backward) keeps"
        in result.output(1)
    )


@pytest.mark.rest
@pytest.mark.parametrize("phase", ITERATION_PHASES)
def test_exception_ends_the_rank_with_a_traceback_in_its_phase(
    phase: Phase, dataset_flags: list[str], tmp_path: Path
) -> None:
    flags = [*model_flags(train_iters=3), *dataset_flags, *event_flags(tmp_path)]
    fault = f"exception:0@1:{phase}"
    result = run_training([*flags, "--moe-ft-inject-fault", fault], 1, log_dir=tmp_path)
    assert result.exit_codes == (FAILED,)
    assert f"InjectedFaultError: --moe-ft-inject-fault {fault}" in result.output(0)
    stopped = events(tmp_path, 0)[-1]
    assert (stopped["event"], stopped["phase"], stopped["silent_ranks"]) == ("stopped", phase, [])


@pytest.mark.parametrize("phase", share_of(ITERATION_PHASES, Phase.BACKWARD))
def test_hang_ends_by_the_timeout_and_the_report_names_the_hung_rank(
    phase: Phase, dataset_flags: list[str], tmp_path: Path
) -> None:
    timeout = ("--distributed-timeout-seconds-after-init", "10")
    result = run_with_fault(f"hang:2@1:{phase}", dataset_flags, tmp_path, *timeout)
    assert (
        result.exit_codes[2] == TERMINATED
    )  # the launcher ended this rank after the others had given up
    stopped = [events(tmp_path, rank, "stopped")[-1] for rank in (0, 1, 3)]
    assert any(line["timed_out"] and 2 in line["silent_ranks"] for line in stopped)
    outputs = "".join(result.output(rank) for rank in (0, 1, 3))
    assert f"2 (last in iteration 1, {phase})" in outputs
    assert "probably hung" in outputs
    assert events(tmp_path, 2, "stopped")[-1]["phase"] == phase
