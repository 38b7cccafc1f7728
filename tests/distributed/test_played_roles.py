"""Iterations as lists of operations: Megatron's own, bit for bit, also where peers play a lost rank's."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from megatron.training import get_args, training

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.state.digest import digest_state
from tests.demo_model import event_flags
from tests.harness import events, run_training
from tests.jobs import CheckpointJob, Job
from tests.played_roles import (
    COMMON,
    LOST,
    LOST_AT,
    NODES,
    Running,
    lose,
    run,
    wait_for_snapshots,
)
from tests.references import Place
from tests.shares import share_of

ENDED_AT = 4
DEPUTIES = {1: 0, 3: 2}  # none on the node of a lost rank

CASES: dict[str, tuple[int, dict[str, int], Mapping[str, Any]]] = {
    "pp2 dp2": (4, {"pp": 2}, {}),
    "ep2, overlap": (2, {"ep": 2}, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "pp2, fp16, per-token loss, recomputation": (
        2,
        {"pp": 2},
        {"bf16": False, "fp16": True, "initial_loss_scale": 4096, "calculate_per_token_loss": True}
        | {"recompute_granularity": "full", "recompute_method": "uniform"}
        | {"recompute_num_layers": 1, "use_distributed_optimizer": False},
    ),
    "pp4, expert bias, fp32": (
        4,
        {"pp": 4},
        {"bf16": False, "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0}
        | {"moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "none"},
    ),
}


def run_operations(flags: list[str]) -> None:
    """Train by the executor alone. Runs on every rank."""

    def refuse(**_: Any) -> NoReturn:
        raise AssertionError("Megatron's schedule ran")

    def begin(running: Running) -> None:
        if running.iteration == 0:
            running.degradation.run_healthy(running.built)

    with Patches() as patches:
        patches.set(training, "get_forward_backward_func", lambda **_: refuse)
        run(flags, begin)


@pytest.mark.parametrize("case", share_of(CASES, "pp2 dp2"))
def test_operations_in_the_usual_order_train_as_megatron_does_bit_for_bit(
    case: str, place: Place
) -> None:
    num_ranks, layout, changes = CASES[case]
    job = Job(place)
    job.set_model(num_ranks, layout, **{**COMMON, "train_iters": 4, **changes})
    flags = [*job.base, *event_flags(job.events_dir)]
    run_training(flags, num_ranks, log_dir=job.folder, train=run_operations).check()
    assert job.digests() == job.reference()


def run_without(flags: list[str]) -> None:
    """Train until ranks leave, and go on without them. Runs on every rank."""

    def begin(running: Running) -> None:
        if running.iteration == LOST_AT:
            lose(running)

    last = run(flags, begin)
    model, _, scheduler = last.built
    for dead, shard in last.degradation.deputies.shards.items():
        digest = digest_state(model, shard, scheduler, {})
        path = Path(get_args().moe_ft_event_log) / f"shard_{dead}.json"
        path.write_text(json.dumps([int(os.environ["RANK"]), digest.sha256]))


LOSSES: dict[str, tuple[list[int], dict[str, int], Mapping[str, Any]]] = {
    "rank of the last stage": ([3], {"pp": 2}, {}),
    "rank of the first stage, per-token loss": (
        [1],
        {"pp": 2},
        {"calculate_per_token_loss": True},
    ),
    "node with a rank of each stage, expert bias": (
        [1, 3],
        {"pp": 2},
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    ),
    "one of two ranks without stages": ([1], {}, {}),
}


@pytest.mark.parametrize("case", share_of(LOSSES, "rank of the last stage"))
def test_peers_train_without_ranks_as_if_these_had_never_died_bit_for_bit(
    case: str, place: Place
) -> None:
    lost, layout, changes = LOSSES[case]
    num_ranks = 2 * layout.get("pp", 1)
    job = CheckpointJob(place)
    job.set_model(num_ranks, layout, **{**COMMON, "train_iters": 4, **changes})
    run_training(
        job.flags(),
        num_ranks,
        log_dir=job.folder,
        train=run_without,
        env={LOST: json.dumps(lost)},
        nodes=NODES[:num_ranks],
    ).check()
    expected = job.reference()
    for rank in range(num_ranks):
        lines = events(job.events_dir, rank, "state_digest")
        found = [(line["sha256"], line["sha256_all"]) for line in lines]
        assert found == ([] if rank in lost else [expected[rank]])
    for rank in lost:
        path = job.events_dir / f"shard_{rank}.json"
        assert json.loads(path.read_text()) == [DEPUTIES[rank], expected[rank][0]]


def run_until_all_are_lost(flags: list[str]) -> None:
    """Train without ranks for a while, until the others are lost, too. Runs on every rank."""

    def begin(running: Running) -> None:
        if running.iteration == LOST_AT:
            lose(running)
        if running.iteration == ENDED_AT:
            wait_for_snapshots(ENDED_AT)
            os._exit(0)

    run(flags, begin)


def test_job_that_ends_without_a_rank_continues_with_all_ranks_from_its_last_snapshot(
    place: Place,
) -> None:
    job = CheckpointJob(place)
    job.set_model(4, {"pp": 2}, **{**COMMON, "train_iters": 6})
    run_training(
        job.flags(),
        4,
        log_dir=job.folder,
        train=run_until_all_are_lost,
        env={LOST: "[3]"},
        nodes=NODES,
    ).check()
    job.run(nodes=NODES).check()
    assert job.recovered()[-1] == (ENDED_AT, ENDED_AT)
    assert job.digests() == job.reference()
