"""Local recoveries with changed flags, damaged logs, lossy state and slow ranks; jobs that have none."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.parallel_state import get_pipeline_model_parallel_group

import pretrain_gpt_moe
from megatron.fault_tolerance.seams import replay
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.format.records import Counted
from tests.demo_model import event_flags
from tests.faulty_runs import fault_flags
from tests.harness import JobResult, digests, events, run_training
from tests.local_recoveries import ALL, DENSE, LOGGED, PP2, PP3, PP4, Case
from tests.references import References


@pytest.mark.rest
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("--lr", "5e-4")),
        (
            ("--eval-interval", "5", "--eval-iters", "1", "--moe-router-force-load-balancing"),
            ("--eval-interval", "1000"),
        ),
    ],
    ids=["learning-rate", "evaluation"],
)
def test_iterations_that_ran_with_other_flags_are_not_run_again_by_one_stage_alone(
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    before: Sequence[str],
    after: Sequence[str],
) -> None:
    """The stage of the dead rank would make another state than the one that the others have."""
    found = {}
    for recovery in ("auto", "global"):
        changes = {"lr_decay_style": "constant"}
        case = Case(layout={"pp": 2}, faults=(), stages=[ALL], strategy=DENSE, changes=changes)
        flags = [
            *(*case.base(dataset_flags), *before, *DENSE, *LOGGED, "--moe-ft-recovery", recovery),
            *("--moe-ft-job-id", recovery, "--moe-ft-memory-dir", str(memory_dir)),
            *(*event_flags(tmp_path / recovery / "events"), *fault_flags(["kill:1@7:backward"])),
        ]
        for count, changed in enumerate(((), after)):
            result = run_training(
                [*flags, *changed],
                case.world_size,
                log_dir=tmp_path / recovery / f"start_{count}",
                env={"TORCHELASTIC_RESTART_COUNT": str(count)},
            )
        result.check()
        (event,) = events(tmp_path / recovery / "events", 0, "recovery")
        assert (event["scope"], event["target_iteration"]) == ("global", 4)
        found[recovery] = digests(tmp_path / recovery / "events", case.world_size)
    assert found["auto"] == found["global"]


@pytest.mark.rest
def test_state_that_is_not_exact_is_named_by_a_rank_that_has_restored_it(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path
) -> None:
    """The node's lowest rank continues from its breakpoint, which is exact."""
    case = Case(
        layout=PP2,
        faults=("kill:3@6:forward",),
        stages=[[1]],
        strategy=(*DENSE, "--moe-ft-state-dtype", "exp_avg=bf16", "--moe-ft-allow-lossy"),
    )
    results = case.run(case.base(dataset_flags), tmp_path, memory_dir)
    results[-1].check()
    case.check(tmp_path)
    warning = "recovered state was stored as exp_avg as bf16: it is not exact"
    said = [warning in results[-1].output(rank) for rank in range(case.world_size)]
    assert said == [False, False, True, False]


def _note(*what: object) -> None:
    print("noted:", *what, flush=True)


def _noting_replays(flags: list[str]) -> None:
    """Train, and print the first use of the pipeline's group, when ranks meet and what runs again."""
    barrier, answering = Agreement.barrier, replay._answering
    used: list[str] = []

    def noting_use(name: str) -> None:
        original = getattr(dist, name)

        def use(first: Any, *given: Any, **named: Any) -> Any:
            group = named.get("group") if name == "all_reduce" else first[0].group
            if not used and group is get_pipeline_model_parallel_group(check_initialized=False):
                used.append(name)
                _note("uses", name)
            return original(first, *given, **named)

        setattr(dist, name, use)

    noting_use("all_reduce")
    noting_use("batch_isend_irecv")

    def meet(self: Agreement) -> None:
        barrier(self)
        _note("met")

    def run_again(loop: Any, borders: Any, after: Counted) -> Any:
        _note("runs", after.iteration - 1)
        return answering(loop, borders, after)

    Agreement.barrier = meet  # type: ignore[method-assign]
    replay._answering = run_again
    pretrain_gpt_moe.main(flags)


def _noted(result: JobResult, rank: int) -> list[str]:
    lines = result.output(rank).splitlines()
    return [line.removeprefix("noted: ") for line in lines if line.startswith("noted: ")]


@pytest.mark.rest
def test_ranks_that_wait_open_links_and_meet_the_others_before_each_iteration_of_their_replay(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path
) -> None:
    case = Case(
        layout=PP4,
        faults=("lose-node:1@5:backward",),
        stages=[[0, 1]],
        nodes=[("node0", "node0", "node1", "node1"), ("node2", "node2", "node1", "node1")],
    )
    last = case.run(case.base(dataset_flags), tmp_path, memory_dir, train=_noting_replays)[-1]
    last.check()
    case.check(tmp_path)
    (recovery,) = events(tmp_path / "events", 0, "recovery")
    first, target = recovery["restored_iteration"], recovery["target_iteration"]
    assert (first, target) == (target - recovery["replayed_iterations"], 5)
    again = range(first, target)

    def in_replay(rank: int) -> list[str]:
        runs = case.stage_of(rank) in (0, 1)
        return [each for i in again for each in ("met", *([f"runs {i}"] if runs else []))]

    for rank in range(case.world_size):
        at_the_ends = ["met", "met"]  # of the recovery and of the run
        assert _noted(last, rank) == ["uses all_reduce", *in_replay(rank), *at_the_ends]


def _committing_last_log_when_told(flags: list[str]) -> None:
    """Train; in the first start the logs of the last iterations take until somebody waits for them."""
    commit, flush, is_waited_for = BoundaryLog._commit, BoundaryLog.flush, threading.Event()

    def commit_later(self: BoundaryLog, taking: Any, copied: Any) -> None:
        if (taking.slot.iteration or 0) >= 5:
            is_waited_for.wait()
        commit(self, taking, copied)

    def note_and_flush(self: BoundaryLog, timeout_s: float) -> bool:
        is_waited_for.set()
        return flush(self, timeout_s)

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        BoundaryLog._commit = commit_later  # type: ignore[method-assign]
        BoundaryLog.flush = note_and_flush  # type: ignore[method-assign]
    pretrain_gpt_moe.main(flags)


@pytest.mark.rest
def test_log_of_the_last_iteration_is_committed_before_a_rank_leaves(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, references: References
) -> None:
    case = Case(
        layout=PP3,
        faults=("kill:1@6:forward",),
        stages=[[1]],
        strategy=DENSE,
        changes={"num_layers": 3},
    )
    base = case.base(dataset_flags)
    case.run(base, tmp_path, memory_dir, train=_committing_last_log_when_told)[-1].check()
    case.check(tmp_path)
    assert [each["target_iteration"] for each in events(tmp_path / "events", 0, "recovery")] == [6]
    assert digests(tmp_path / "events", 3) == references.digests(base, 3)


def test_job_with_tied_embeddings_refuses_to_promise_local_recoveries(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path
) -> None:
    case = Case(
        layout=PP2,
        faults=(),
        stages=[],
        changes={"untie_embeddings_and_output_weights": False},
    )
    flags = ["--moe-ft-recovery", "local", "--moe-ft-memory-dir", str(memory_dir)]
    result = run_training(
        [*case.base(dataset_flags), *case.strategy, *LOGGED, *flags, "--moe-ft-job-id", "test"],
        case.world_size,
        log_dir=tmp_path,
    )
    assert any(result.exit_codes)
    said = result.log_paths[0].read_text()
    assert "no --untie-embeddings-and-output-weights" in said
    assert "give --moe-ft-recovery auto" in said
