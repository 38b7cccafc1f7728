"""Capacity boost in the real loop: lost tokens are made up, a second failure forgets no debt, and it ends."""

import shutil
from functools import partial
from pathlib import Path

import pytest

import pretrain_gpt_moe
from moe_ft.planning import lost_tokens
from tests.harness import run_with_restarts
from tests.jobs import PP_EP, CheckpointJob, RepairedJob, fault_flags
from tests.partial_runs import check_debts, check_losses

LENGTH = 6  # iterations of a boost, instead of 500
LAYERS = [f"layer.{number}" for number in range(4)]
CAPPED = {"moe_expert_capacity_factor": 1.0, "moe_aux_loss_coeff": False}
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
    job.set_model(2, {"ep": 2}, train_iters=18, **CAPPED)
    job.train = partial(train, LENGTH)
    job.run(*FLAGS, "--moe-ft-inject-fault", "kill:1@8:backward")
    return Path(shutil.copytree(job.memory_dir, job.folder / "memory_left"))


def continue_with(job: CheckpointJob, left: Path, name: str, *faults: str, boost: bool) -> None:
    """Continue from the memory that is left, with an event log of its own."""
    shutil.rmtree(job.memory_dir)
    shutil.copytree(left, job.memory_dir)
    job.events_dir = job.folder / name
    flags = FLAGS if boost else FLAGS[:-2]
    run_with_restarts(
        job.flags(*flags, *fault_flags(faults)),
        job.num_ranks,
        log_dir=job.folder / f"log_{name}",
        max_restarts=len(faults),
        train=job.train,
    )[-1].check()


@pytest.mark.rest
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


@pytest.mark.rest
def test_stages_make_up_what_their_own_layers_lose_and_route_as_without_a_boost_afterwards(
    job: CheckpointJob,
) -> None:
    job.set_model(4, PP_EP, train_iters=20, **CAPPED)
    job.train = partial(train, LENGTH)
    left = job.folder / "memory_left"

    def between(start: int) -> None:
        if start:
            shutil.copytree(job.memory_dir, left)

    # All ranks go back to their snapshots, so that every stage loses tokens twice.
    flags = [each for each in FLAGS if each != "--moe-ft-breakpoints"]
    run_with_restarts(
        job.flags(*flags, *fault_flags(("kill:1@8:backward", "kill:2@11:backward"))),
        4,
        log_dir=job.folder / "log",
        max_restarts=2,
        between=between,
        train=job.train,
    )[-1].check()
    check_losses(job.events_dir, num_ranks=4, num_experts=4, ep_size=2)
    over = job.events("recovery")[-1]["target_iteration"] + LENGTH
    for stage in ((0, 1), (2, 3)):
        owed_there = check_debts(job.events_dir, stage)
        assert [*owed_there][-LENGTH:] == [*range(over - LENGTH + 1, over + 1)]
    digests = job.digests()

    # Who continues without a boost after its end does the same as the routers that had it.
    shutil.rmtree(job.memory_dir)
    shutil.copytree(left, job.memory_dir)
    job.events_dir = job.folder / "ended"
    job.run(*FLAGS, *fault_flags((f"terminate:0@{over}:backward",)))
    job.events_dir = job.folder / "unboosted"
    job.run(*FLAGS[:-2]).check()
    (recovery,) = job.events("recovery")
    assert recovery["target_iteration"] in (over, over + 1)
    assert recovery["lost_tokens"] == 0
    assert job.events("capacity_boost") == []
    assert job.digests() == digests


@pytest.mark.rest
def test_tokens_that_a_repair_loses_are_those_of_the_routing_log_and_are_made_up(
    repaired: RepairedJob,
) -> None:
    strategy = ("partial", "--moe-ft-router-log", "--moe-ft-k-snapshot", "1", *FLAGS[-2:])
    repaired.run("kill:3@4:backward", "kill:0@6:backward", strategy=strategy, changes=CAPPED)
    repaired.check([3, 0], [4, 6], [{3, 4}, {5, 6}], is_exact=False)
    check_losses(repaired.events_dir, num_ranks=4, num_experts=4, ep_size=2)
    for stage in ((0, 1), (2, 3)):
        assert check_debts(repaired.events_dir, stage)[repaired.num_iterations] > 0
