"""Iterations as lists of operations: Megatron's own, bit for bit, also where peers play a lost rank's."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, override

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.training import get_args, training
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

import pretrain_gpt_moe
from megatron.fault_tolerance.degraded.degradation import Degradation
from megatron.fault_tolerance.degraded.weight_gradients import LateGradients
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.planning.schedules import Cell
from moe_ft.state.digest import digest_state
from tests.demo_model import event_flags
from tests.harness import Train, events, run_training
from tests.jobs import CheckpointJob, Job
from tests.played_roles import (
    COMMON,
    LOST,
    LOST_AT,
    NODES,
    ReadSamples,
    Running,
    lose,
    run,
    wait_for_snapshots,
)
from tests.references import Place
from tests.shares import share_of

# They wait for a snapshot of one iteration, which a busy machine would skip.
pytestmark = pytest.mark.usefixtures("settled")

NUM_ITERATIONS = 4
ENDED_AT = 4
LATE, MORE_HELD = "MOE_FT_TEST_LATE", 2  # set: gradients of weights are put off
SHARED = "MOE_FT_TEST_SHARED"  # set: peers share a role
GRADIENTS = "MOE_FT_TEST_GRADIENTS"  # set: save those of the first iteration without a rank

# Without workers the loop reads a batch when it needs it.
OFTEN = {"train_iters": NUM_ITERATIONS, "num_workers": 0}
PUT_OFF = "pp2 ep2, gradients of weights put off"
CASES: dict[str, tuple[int, dict[str, int], Mapping[str, Any]]] = {
    "pp2 dp2": (4, {"pp": 2}, {}),
    PUT_OFF: (4, {"pp": 2, "ep": 2}, {}),
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


def save_gradients(model: Sequence[Any], shards: Sequence[int]) -> None:
    """Save this rank's part of the gradients of an iteration, and those of dead ranks that it plays."""
    (chunk,) = model
    for rank in shards:
        parts = []
        for each in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group = each.intra_distributed_optimizer_instance_group
            ranks = dist.get_process_group_ranks(group)
            for bucket in each.buckets:
                parts.append(bucket.grad_data.chunk(len(ranks))[ranks.index(rank)])
        path = Path(get_args().moe_ft_event_log) / f"gradients_{rank}.npy"
        np.save(path, torch.cat(parts).numpy())


class CountedGradients(LateGradients):
    """Counts products that were put off."""

    num_put_off = 0

    @override
    def run(self, cell: Cell) -> None:
        self.num_put_off += len(self._kept[cell])
        super().run(cell)


def run_logged(flags: list[str], before: Callable[[Running], None]) -> Running:
    """Train as `run` does, as the variables of the test say; write down the samples that are read."""
    samples, found = ReadSamples(), list[Running]()
    late = CountedGradients(MORE_HELD) if LATE in os.environ else None

    def begin(running: Running) -> None:
        found[:] = [running]
        samples.begin(running.iteration)
        before(running)

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if GRADIENTS in os.environ and kwargs["iteration"] == LOST_AT:
            (running,) = found
            shards = running.degradation.deputies.shards
            save_gradients(running.built[0], [dist.get_rank(), *shards])
        return result

    def degrade(data_sets: DataSets) -> Degradation:
        return Degradation(data_sets, late, is_whole=SHARED not in os.environ)

    with Patches() as patches:
        samples.install(patches)
        if late is not None:
            late.install(patches)
        patches.wrap(training, "train_step", step)
        last = run(flags, begin, degrade=degrade)
        samples.begin(-1)
    assert late is None or late.num_put_off
    return last


def run_operations(flags: list[str]) -> None:
    """Train by the executor alone. Runs on every rank."""

    def refuse(**_: Any) -> NoReturn:
        raise AssertionError("Megatron's schedule ran")

    def begin(running: Running) -> None:
        if running.iteration == 0:
            running.degradation.run_healthy(running.built)

    with Patches() as patches:
        patches.set(training, "get_forward_backward_func", lambda **_: refuse)
        run_logged(flags, begin)


@pytest.mark.parametrize("case", share_of(CASES, "pp2 dp2"))
def test_operations_in_the_usual_order_train_as_megatron_does_bit_for_bit(
    case: str, place: Place
) -> None:
    num_ranks, layout, changes = CASES[case]
    job = Job(place)
    job.set_model(num_ranks, layout, **{**COMMON, **OFTEN, **changes})
    flags = [*job.base, *event_flags(job.events_dir)]
    env = {LATE: "1"} if case == PUT_OFF else {}
    run_training(flags, num_ranks, log_dir=job.folder, train=run_operations, env=env).check()
    assert job.digests() == job.reference()


@dataclass(frozen=True)
class Loss:
    """Ranks that die, and those that play their roles.

    Attributes:
        deputies: by rank of a lost group, the one that plays its role.
        reference: sums gradients in the order in which players do; None where that is the usual one.
    """

    layout: Mapping[str, int]
    dead: tuple[int, ...]
    deputies: Mapping[int, int]
    num_ranks: int = 4
    changes: Mapping[str, Any] = field(default_factory=dict)
    reference: Train | None = None

    @property
    def num_readers(self) -> int:
        """Data-parallel ranks."""
        return self.num_ranks // math.prod(self.layout.get(name, 1) for name in ("tp", "cp", "pp"))

    @property
    def global_batch_size(self) -> int:
        """Samples of an iteration; a micro-batch has two."""
        return 18 if self.num_readers == 3 else 16

    def samples(self, iteration: int, rank: int) -> dict[str, list[int]]:
        """Return the samples that a rank reads, by data-parallel rank, as Megatron's loader draws them."""
        divided = self.layout.get("tp", 1) * self.layout.get("cp", 1)
        if rank % self.layout.get("tp", 1):
            return {}  # the first of the group sends it what it has read
        roles = [rank]
        if iteration >= LOST_AT:
            played = [each for each, deputy in self.deputies.items() if deputy == rank]
            roles = [] if rank in self.deputies else [rank, *played]
        found = {}
        for role in roles:
            reader = role // divided % self.num_readers
            sampler = MegatronPretrainingSampler(
                10**6, iteration * self.global_batch_size, 2, reader, self.num_readers
            )
            drawn = islice(iter(sampler), self.global_batch_size // 2 // self.num_readers)
            found[str(reader)] = [index for indices in drawn for index in indices]
        return found


def sum_pairs(patches: Patches) -> None:
    """Have healthy iterations sum gradients of four ranks as their players do, until the patches end."""

    def scatter(original: Any, output: torch.Tensor, given: torch.Tensor, **kwargs: Any) -> Any:
        group = kwargs["group"]
        if group.size() != 4:
            return original(output, given, **kwargs)
        parts = [torch.empty_like(given) for _ in range(group.size())]
        dist.all_gather(parts, given, group=group)
        total = (parts[0] + parts[2]) + (parts[1] + parts[3])
        output.copy_(total.chunk(group.size())[group.rank()])
        return None

    patches.wrap(param_and_grad_buffer, "dist_reduce_scatter_func", scatter)


def run_with_sums_of_pairs(flags: list[str]) -> None:
    """Train healthily, but for the order of sums. Runs on every rank."""
    with Patches() as patches:
        sum_pairs(patches)
        pretrain_gpt_moe.main(flags)


LOSSES: dict[str, Loss] = {
    "rank of the last stage": Loss({"pp": 2}, (3,), {3: 2}),
    "rank of the first stage, per-token loss": Loss(
        {"pp": 2}, (1,), {1: 0}, changes={"calculate_per_token_loss": True}
    ),
    "node with a rank of each stage, expert bias": Loss(
        {"pp": 2},
        (1, 3),
        {1: 0, 3: 2},
        changes={
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    ),
    "one of two ranks without stages": Loss({}, (1,), {1: 0}, num_ranks=2),
    "one of three ranks of a stage": Loss({"pp": 2}, (4,), {4: 5}, num_ranks=6),
    "rank that divides tensors with an idle one": Loss(
        {"tp": 2, "pp": 2},
        (7,),
        {6: 4, 7: 5},
        num_ranks=8,
        changes={"sequence_parallel": True},
    ),
    "rank that divides experts with an idle one": Loss(
        {"ep": 2}, (3,), {2: 0, 3: 1}, reference=run_with_sums_of_pairs
    ),
}


def run_without(flags: list[str], lost_at: int = LOST_AT) -> Running:
    """Train until ranks leave, and go on without them. Runs on every rank."""

    def begin(running: Running) -> None:
        if running.iteration == lost_at:
            lose(running)

    last = run_logged(flags, begin)
    model, _, scheduler = last.built
    for dead, shard in last.degradation.deputies.shards.items():
        digest = digest_state(model, shard, scheduler, {})
        path = Path(get_args().moe_ft_event_log) / f"shard_{dead}.json"
        path.write_text(json.dumps([int(os.environ["RANK"]), digest.sha256]))
    return last


def run_without_and_sum_pairs(flags: list[str]) -> None:
    """Do the same, with the reference's sums while all ranks live. Runs on every rank."""
    with Patches() as patches:
        sum_pairs(patches)
        run_without(flags)


def play(case: str, place: Place, **env: str) -> Job:
    """Run a job whose peers play lost roles; check the samples that each rank has read."""
    loss, job = LOSSES[case], CheckpointJob(place)
    changes = {**COMMON, **OFTEN, "global_batch_size": loss.global_batch_size, **loss.changes}
    if SHARED in env:  # other random numbers
        changes |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    job.set_model(loss.num_ranks, loss.layout, **changes)
    is_summing = loss.reference is not None and GRADIENTS not in env
    run_training(
        job.flags(),
        loss.num_ranks,
        log_dir=job.folder,
        train=run_without_and_sum_pairs if is_summing else run_without,
        env={LOST: json.dumps(loss.dead), **env},
        nodes=NODES[: loss.num_ranks],
    ).check()
    for iteration in range(NUM_ITERATIONS):
        logs = (job.events_dir / f"samples_{rank}.json" for rank in range(loss.num_ranks))
        read = [json.loads(each.read_text()).get(str(iteration), {}) for each in logs]
        expected = [loss.samples(iteration, rank) for rank in range(loss.num_ranks)]
        if SHARED in env:
            read, expected = ([all_of(each)] for each in (read, expected))
        assert read == expected
    return job


def all_of(read: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Return the samples that all ranks read, by data-parallel rank."""
    found: dict[str, list[int]] = {}
    for samples in read:
        for reader, indices in samples.items():
            found[reader] = sorted([*found.get(reader, ()), *indices])
    return found


@pytest.mark.rest
def test_gradients_of_weights_that_are_put_off_change_no_bit_while_peers_play_a_role(
    place: Place,
) -> None:
    job = play("rank of the last stage", place, **{LATE: "1"})
    expected = job.reference()
    found = [events(job.events_dir, rank, "state_digest")[0]["sha256"] for rank in range(3)]
    assert found == [each[0] for each in expected[:3]]


EXACT = [each for each in LOSSES if each != "one of three ranks of a stage"]  # 1/3 is not exact


@pytest.mark.parametrize("case", share_of(EXACT, "rank of the last stage"))
def test_peers_train_without_ranks_as_if_these_had_never_died_bit_for_bit(
    case: str, place: Place
) -> None:
    loss, job = LOSSES[case], play(case, place)
    job.train = loss.reference
    expected = job.reference()
    for rank in range(loss.num_ranks):
        lines = events(job.events_dir, rank, "state_digest")
        found = [(line["sha256"], line["sha256_all"]) for line in lines]
        if rank in loss.deputies:
            assert len(found) == (rank not in loss.dead)
            path = job.events_dir / f"shard_{rank}.json"
            assert json.loads(path.read_text()) == [loss.deputies[rank], expected[rank][0]]
        else:
            assert found == [expected[rank]]


def run_healthily(flags: list[str]) -> None:
    """Train. Runs on every rank."""
    run_logged(flags, lambda _: None)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("case", "env", "most"),
    [
        ("one of three ranks of a stage", {}, 1e-8),
        ("rank that divides experts with an idle one", {}, 3e-9),
        ("one of three ranks of a stage", {SHARED: "1"}, 1e-7),
    ],
    ids=["three ranks", "experts", "three ranks, a role is shared"],
)
def test_gradients_summed_by_players_are_those_of_all_ranks_to_a_few_bits(
    case: str, env: dict[str, str], most: float, place: Place
) -> None:
    job = play(case, place, **{GRADIENTS: "1", **env})
    healthy = job.folder / "healthy"
    flags, saving = [*job.base, *event_flags(healthy)], {GRADIENTS: "1"}
    run_training(flags, job.num_ranks, log_dir=healthy, train=run_healthily, env=saving).check()
    pairs = [
        [np.load(folder / f"gradients_{rank}.npy") for folder in (job.events_dir, healthy)]
        for rank in range(job.num_ranks)
        if rank in LOSSES[case].dead or rank not in LOSSES[case].deputies
    ]
    largest = max(float(np.abs(gradients).max()) for _, gradients in pairs)
    off = max(float(np.abs(found - gradients).max()) for found, gradients in pairs)
    print(f"PLAYED {case} {env}: {off / largest}")
    assert off <= most * largest


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
