"""Selective checkpoints in the real loop: budgets hold, peers have older experts, losses are as reported."""

import pytest

from tests.jobs import CheckpointJob
from tests.partial_runs import lost_since, recount, versions_left
from tests.recount import Expert
from tests.shares import share_of

LOCAL, REMOTE = (
    620_000,
    470_000,
)  # bytes: a rank has 302 kB besides 8 halves of experts of 74 kB each
SELECTIVE = (
    *("--moe-ft-strategy", "selective", "--moe-ft-router-log", "--moe-ft-interval", "1"),
    *("--moe-ft-local-budget", str(LOCAL), "--moe-ft-remote-budget", str(REMOTE)),
)
FAULTS = {"memory": "kill:1@11:backward", "peer": "lose-node:1@11:backward"}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("rule", share_of(["age", "paper"], "age"))
@pytest.mark.parametrize("tier", share_of([*FAULTS], "peer"))
def test_recovery_takes_the_newest_version_that_all_ranks_of_an_expert_have_left(
    job: CheckpointJob, tier: str, rule: str
) -> None:
    # Two ranks on different nodes save one half of an expert each.
    job.set_model(4, {"ep": 2}, train_iters=14)
    job.base.remove("--use-distributed-optimizer")
    left: dict[Expert, set[int]] = {}

    def between(start: int) -> None:
        if not start:
            left.update(versions_left(job.memory_dir / "test"))

    job.run_with_faults(
        FAULTS[tier],
        flags=(*SELECTIVE, "--moe-ft-selective-rule", rule),
        nodes=lambda start: ("node0", "node1", "node1", "node0"),
        between=between,
    )
    (recovery,) = job.events("recovery")
    restored = recovery["restored_iteration"]
    assert tier in recovery["sources"] or tier in job.events("recovery", 1)[0]["sources"]
    counted = recount(job, 1, num_ranks=4)
    counted.read(0, 0)
    lost = lost_since(counted, left, restored)
    assert len(left) == 16
    assert recovery["lost_per_expert"] == lost
    assert recovery["lost_tokens"] == sum(map(sum, lost.values())) > 0
    assert recovery["mtl"] == pytest.approx(4 * recovery["plt"])
    for rank in range(4):
        assert max(line["bytes"] for line in job.events("snapshot", rank)) <= LOCAL
        for start in (0, 1):
            lines = [line for line in job.events("replicate", rank) if line["incarnation"] == start]
            # First peers get each expert once; a file's header is in no budget.
            assert max(line["bytes"] for line in lines[2:]) < REMOTE + 2**16
