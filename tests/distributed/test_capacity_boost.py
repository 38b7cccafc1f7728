"""Capacity boost in the real loop: lost tokens are made up, a second failure forgets no debt, and it ends."""

import shutil
from functools import partial
from pathlib import Path

import pytest

import pretrain_gpt_moe
from moe_ft.planning import lost_tokens
from tests.harness import run_with_restarts
from tests.jobs import CheckpointJob, fault_flags

LENGTH = 6  # iterations of a boost, instead of 500
LAYERS = [f"layer.{number}" for number in range(4)]
MICRO_BATCHES, CAPACITY = 4, 32  # of a rank in an iteration; tokens of an expert in each
FLAGS = (
    *("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "1", "--moe-ft-breakpoints"),
    *("--moe-ft-router-log", "--moe-ft-capacity-boost", "0.25"),
)


def train(length: int, flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py with a short boost."""
    lost_tokens.BOOST_ITERATIONS = length
    pretrain_gpt_moe.main(flags)


def owed(job: CheckpointJob) -> dict[int, int]:
    """Return what was owed before each iteration; fail if the ranks or two starts differ."""
    found: dict[int, int] = {}
    for rank in range(2):
        for line in job.events("capacity_boost", rank):
            assert found.setdefault(line["iteration"], line["owed_tokens"]) == line["owed_tokens"]
    return found


def loads(job: CheckpointJob) -> dict[int, dict[str, list[int]]]:
    """Return the tokens of each expert on both ranks, by iteration and layer."""
    return {
        line["iteration"]: {
            layer: [
                sum(pair)
                for pair in zip(line["tokens"][layer], other["tokens"][layer], strict=True)
            ]
            for layer in LAYERS
        }
        for line, other in zip(job.events("router_load"), job.events("router_load", 1), strict=True)
    }


def largest(job: CheckpointJob, iteration: int) -> int:
    lines = [line for rank in range(2) for line in job.events("router_load", rank)]
    at = [line["tokens"] for line in lines if line["iteration"] == iteration]
    counts: list[int] = [max(each) for tokens in at for each in tokens.values()]
    return max(counts)


@pytest.fixture
def killed(job: CheckpointJob) -> Path:
    """A copy of the memory that a job has left whose rank was killed."""
    capacity = {"moe_expert_capacity_factor": 1.0, "moe_aux_loss_coeff": False}
    job.set_model(2, {"ep": 2}, train_iters=18, **capacity)
    job.train = partial(train, LENGTH)
    job.run(*FLAGS, "--moe-ft-inject-fault", "kill:1@8:backward")
    copy = job.folder / "memory_left"
    shutil.copytree(job.memory_dir, copy)
    return copy


def continue_with(job: CheckpointJob, left: Path, name: str, *faults: str, boost: bool) -> None:
    """Continue from the memory that is left, with an event log of its own."""
    shutil.rmtree(job.memory_dir)
    shutil.copytree(left, job.memory_dir)
    job.events_dir = job.folder / name
    flags = FLAGS if boost else FLAGS[:-2]
    run_with_restarts(
        job.flags(*flags, *fault_flags(faults)),
        2,
        log_dir=job.folder / f"log_{name}",
        max_restarts=len(faults),
        train=job.train,
    )[-1].check()


def test_lost_tokens_are_made_up_through_a_second_failure_until_it_is_over(
    job: CheckpointJob, killed: Path
) -> None:
    continue_with(job, killed, "stock", boost=False)
    (recovery,) = job.events("recovery")
    begin, lost = recovery["target_iteration"], recovery["lost_tokens"]
    stock, stock_digests = loads(job), job.digests()
    assert lost > 0
    assert owed(job) == {}

    continue_with(job, killed, "boosted", boost=True)
    (recovery,) = job.events("recovery")
    assert (recovery["target_iteration"], recovery["lost_tokens"]) == (begin, lost)
    boosted, digests, debts = loads(job), job.digests(), owed(job)
    assert digests != stock_digests
    assert debts[begin + 1] == lost
    assert list(debts) == [*range(begin + 1, begin + 1 + LENGTH)]
    # The first layer that differs sees the same tokens: of some experts fewer are dropped, of none more.
    differs = [each for each in LAYERS if boosted[begin + 1][each] != stock[begin + 1][each]]
    pairs = [*zip(boosted[begin + 1][differs[0]], stock[begin + 1][differs[0]], strict=True)]
    assert all(more >= fewer for more, fewer in pairs)
    lost_there = recovery["lost_per_expert"][differs[0]]
    assert all(lost_there[at] for at, (more, fewer) in enumerate(pairs) if more > fewer)
    # Debts fall by what both ranks have made up.
    lines = [each for rank in range(2) for each in job.events("capacity_boost", rank)]
    for iteration in range(begin + 1, begin + LENGTH):
        made_up = sum(each["made_up_tokens"] for each in lines if each["iteration"] == iteration)
        assert debts[iteration] - debts[iteration + 1] == made_up
    within = MICRO_BATCHES * CAPACITY
    assert largest(job, begin + 1) > within
    assert all(largest(job, each) <= within for each in range(begin + 1 + LENGTH, 19))

    # The job is ended while experts are still owed tokens, and nothing is lost by that.
    middle = begin + 3
    continue_with(job, killed, "ended", f"terminate:0@{middle}:backward", boost=True)
    _, second = job.events("recovery")
    assert second["target_iteration"] in (middle, middle + 1)
    assert second["lost_tokens"] == 0
    assert owed(job) == debts
    assert job.digests() == digests
