"""Repairs of jobs whose tokens go through buffers of a library, which hold ways to the dead rank.

The library is a stand-in (tests/deep_ep_on_cpus.py); what Megatron has between it and the layers is not.
"""

import pytest

from tests.deep_ep_on_cpus import train_with_flex
from tests.jobs import RepairedJob
from tests.kept_job import ROOT

SCRIPT = str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_flex.py")


def run(job: RepairedJob, backend: str, fault: str, **variables: str) -> None:
    job.train = train_with_flex  # for the reference
    job.run(
        fault,
        extra=("--moe-flex-dispatcher-backend", backend, "--moe-router-dtype", "fp32"),
        changes={"moe_token_dispatcher_type": "flex"},
        script=SCRIPT,
        env={"DEEP_EP_FOLDER": str(job.folder), **variables},
    )


@pytest.mark.parametrize("backend", ["deepep", pytest.param("hybridep", marks=pytest.mark.rest)])
def test_buffers_of_the_flex_dispatcher_are_made_again_and_the_bits_are_the_same(
    repaired: RepairedJob, backend: str
) -> None:
    run(repaired, backend, "kill:3@4:in-step")  # where no rank waits in a dispatch
    repaired.check([3], [4], [{4}])


@pytest.mark.rest
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_rank_that_waits_in_a_dispatch_for_the_dead_one_is_replaced_too(
    repaired: RepairedJob, backend: str
) -> None:
    run(repaired, backend, "kill:3@4:backward", MOST_STUCK_S="2")
    for rank in range(4):
        dead = {each for line in repaired.events("repair", rank) for each in line["dead_ranks"]}
        assert dead == {2, 3}, "2 shares experts with 3, and nothing frees it"
        assert len({line["pid"] for line in repaired.events("start", rank)}) == 1 + (rank in dead)
    assert repaired.digests() == repaired.reference()
