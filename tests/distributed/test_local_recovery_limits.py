"""Local recoveries with changed flags, damaged logs, lossy state and slow ranks; jobs that have none."""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.parallel_state import get_pipeline_model_parallel_group

import pretrain_gpt_moe
from megatron.fault_tolerance.seams import replay
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.format.records import Counted
from tests.harness import JobResult, digests, events, run_training
from tests.local_recoveries import ALL, DENSE, PP4, TWO_STAGES_PER_NODE, Case
from tests.references import Place


@pytest.mark.rest
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("--lr", "5e-4", "--override-opt_param-scheduler")),
        (
            ("--eval-interval", "5", "--eval-iters", "1", "--moe-router-force-load-balancing"),
            ("--eval-interval", "1000"),
        ),
    ],
    ids=["learning-rate", "evaluation"],
)
def test_iterations_that_ran_with_other_flags_are_not_run_again_by_one_stage_alone(
    place: Place, before: Sequence[str], after: Sequence[str]
) -> None:
    """The stage of the dead rank would make another state than the one that the others have."""
    found = []
    for recovery in ("auto", "global"):
        case = Case(
            layout={"pp": 2},
            faults=("kill:1@7:backward",),
            stages=(ALL,),
            strategy=DENSE,
            flags=before,
            changes={"lr_decay_style": "constant"},
            recovery=recovery,
        )
        own = replace(place, folder=place.folder / recovery, memory_dir=place.memory_dir / recovery)
        for count, changed in enumerate(((), after)):
            result = run_training(
                [*case.flags_of(own), *changed],
                case.world_size,
                log_dir=own.folder / f"start_{count}",
                env={"TORCHELASTIC_RESTART_COUNT": str(count)},
            )
        result.check()
        (event,) = events(own.folder / "events", 0, "recovery")
        assert (event["scope"], event["target_iteration"]) == ("global", 4)
        found.append(digests(own.folder / "events", case.world_size))
    assert found[0] == found[1]


@pytest.mark.rest
def test_state_that_is_not_exact_is_named_by_a_rank_that_has_restored_it(place: Place) -> None:
    """The node's lowest rank continues from its breakpoint, which is exact."""
    case = Case(
        faults=("kill:3@6:forward",),
        stages=((1,),),
        strategy=(*DENSE, "--moe-ft-state-dtype", "exp_avg=bf16", "--moe-ft-allow-lossy"),
    )
    result = case.run(place)
    warning = "recovered state was stored as exp_avg as bf16: it is not exact"
    said = [warning in result.output(rank) for rank in range(case.world_size)]
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
    place: Place,
) -> None:
    case = Case(
        layout=PP4,
        faults=("lose-node:1@5:backward",),
        stages=((0, 1),),
        nodes=TWO_STAGES_PER_NODE,
    )
    last = case.run(place, train=_noting_replays)
    (recovery,) = events(place.folder / "events", 0, "recovery")
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

    def note_and_flush(self: BoundaryLog, timeout_s: float = 60.0) -> bool:
        is_waited_for.set()
        return flush(self, timeout_s)

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        BoundaryLog._commit = commit_later  # type: ignore[method-assign]
        BoundaryLog.flush = note_and_flush  # type: ignore[method-assign]
    pretrain_gpt_moe.main(flags)


@pytest.mark.rest
def test_log_of_the_last_iteration_is_committed_before_a_rank_leaves(place: Place) -> None:
    case = Case(
        layout={"pp": 3},
        faults=("kill:1@6:forward",),
        stages=((1,),),
        strategy=DENSE,
        changes={"num_layers": 3},
    )
    case.run(place, train=_committing_last_log_when_told)
    (recovery,) = events(place.folder / "events", 0, "recovery")
    assert recovery["target_iteration"] == 6
    case.check_end(place)


def test_job_with_tied_embeddings_refuses_to_promise_local_recoveries(place: Place) -> None:
    case = Case(faults=(), changes={"untie_embeddings_and_output_weights": False})
    result = run_training(case.flags_of(place), case.world_size, log_dir=place.folder)
    assert any(result.exit_codes)
    said = result.output(0)
    assert "no --untie-embeddings-and-output-weights" in said
    assert "give --moe-ft-recovery auto" in said
