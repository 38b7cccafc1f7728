"""Iterations as lists of operations: Megatron's own, bit for bit, also where peers play a lost rank's."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from megatron.training import get_args, training

import pretrain_gpt_moe
from megatron.fault_tolerance.degraded.degradation import Degradation
from megatron.fault_tolerance.degraded.deputies import Memory
from megatron.fault_tolerance.seams import hooks
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.memory.job_directory import node_directory
from moe_ft.loop.listeners import Built, Listeners
from moe_ft.state.digest import digest_state
from tests.demo_model import event_flags
from tests.harness import events, run_training
from tests.jobs import Job
from tests.references import Place
from tests.shares import share_of
from tests.waiting import wait_for

LOST_AT = 2  # the first iteration without a rank
LOST = "MOE_FT_TEST_LOST_RANKS"
NODES = ("node0", "node1", "node0", "node1")
DEPUTIES = {1: 0, 3: 2}  # none on the node of a lost rank

# Clipping would add up another norm: sums of fp32 in another order.
COMMON = {"attention_dropout": 0.1, "clip_grad": 0.0, "train_iters": 4}
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


Before = Callable[[Degradation, int, Built, Listeners], None]


def run(flags: list[str], before: Before) -> tuple[Degradation, Built]:
    """Train; call something before each iteration. Return the degradation and what was built."""
    built: list[Built] = []
    found: list[Listeners] = []

    def install(original: Any, listeners: Listeners, *args: Any) -> Any:
        found.append(listeners)
        return original(listeners, *args)

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        built[:] = [args[2:5]]
        before(degradation, kwargs["iteration"], built[0], found[0])
        return original(*args, **kwargs)

    with Patches() as patches:
        degradation = Degradation(patches)
        patches.wrap(training, "train_step", step)
        patches.wrap(hooks, "installed", install)
        pretrain_gpt_moe.main(flags)
        return degradation, built[0]


def run_operations(flags: list[str]) -> None:
    """Train by the executor alone. Runs on every rank."""

    def refuse(**_: Any) -> NoReturn:
        raise AssertionError("Megatron's schedule ran")

    def begin(degradation: Degradation, iteration: int, built: Built, _: Listeners) -> None:
        if iteration == 0:
            degradation.run_healthy(built)

    with Patches() as patches:
        patches.set(training, "get_forward_backward_func", lambda **_: refuse)
        run(flags, begin)


@pytest.mark.parametrize("case", share_of(CASES, "pp2 dp2"))
def test_operations_in_the_usual_order_train_as_megatron_does_bit_for_bit(
    case: str, place: Place
) -> None:
    num_ranks, layout, changes = CASES[case]
    job = Job(place)
    job.set_model(num_ranks, layout, **{**COMMON, **changes})
    flags = [*job.base, *event_flags(job.events_dir)]
    run_training(flags, num_ranks, log_dir=job.folder, train=run_operations).check()
    assert job.digests() == job.reference()


def run_without(flags: list[str]) -> None:
    """Train until ranks leave, and go on without them. Runs on every rank."""
    lost, rank = json.loads(os.environ[LOST]), int(os.environ["RANK"])

    def begin(degradation: Degradation, iteration: int, built: Built, listeners: Listeners) -> None:
        if iteration != LOST_AT:
            return
        args, node = get_args(), NODES[DEPUTIES[lost[0]]]
        node_dir = node_directory(args.moe_ft_memory_dir, args.moe_ft_job_id, node)
        memory = Memory(node_dir, node, args.moe_ft_job_id)
        # Peers have their state before the iteration when they die.
        for dead in lost:
            wait_for(partial(memory.find, dead, iteration), "the replica", 60.0)
        if rank in lost:
            os._exit(0)
        degradation.begin(lost, built, memory, iteration, listeners)
        listeners.begin_iteration(iteration)

    degradation, (model, _, scheduler) = run(flags, begin)
    for dead, shard in degradation.deputies.shards.items():
        digest = digest_state(model, shard, scheduler, {})
        path = Path(get_args().moe_ft_event_log) / f"shard_{dead}.json"
        path.write_text(json.dumps([rank, digest.sha256]))


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
    job = Job(place)
    job.set_model(num_ranks, layout, **{**COMMON, **changes})
    memory = ["--moe-ft-strategy", "dense", "--moe-ft-job-id", "test"]
    memory += ["--moe-ft-memory-dir", str(place.memory_dir)]
    flags = [*job.base, *event_flags(job.events_dir), *memory]
    run_training(
        flags,
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
