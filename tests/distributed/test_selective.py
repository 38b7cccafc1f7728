"""Selective checkpoints in the real loop: budgets hold, peers have older experts, losses are as reported."""

from collections import defaultdict
from pathlib import Path

import pytest

from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.units import UnitKind, parse_unit
from tests.jobs import CheckpointJob
from tests.partial_runs import recount
from tests.shares import share_of

Expert = tuple[str, int]
LOCAL, REMOTE = (
    620_000,
    470_000,
)  # bytes: a rank has 302 kB besides 8 halves of experts of 74 kB each
SELECTIVE = (
    *("--moe-ft-strategy", "selective", "--moe-ft-router-log", "--moe-ft-interval", "1"),
    *("--moe-ft-local-budget", str(LOCAL), "--moe-ft-remote-budget", str(REMOTE)),
)
FAULTS = {"memory": "kill:1@11:backward", "peer": "lose-node:1@11:backward"}


def versions_left(memory: Path) -> dict[Expert, set[int]]:
    """Return the iterations of the versions of each expert that all ranks have which save parts of it."""
    held: dict[Expert, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in memory.glob("*/*/region_*.json"):
        index = decode(path.read_bytes(), Index, str(path))
        for name, entry in (*index.units.items(), *(index.retained or {}).items()):
            unit = parse_unit(name)
            if unit.kind is UnitKind.EXPERT:
                held[unit.layer_name, unit.expert][index.rank].add(entry.iteration)
    return {expert: set.intersection(*of_ranks.values()) for expert, of_ranks in held.items()}


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
    lost: dict[str, list[int]] = {layer: [0] * 4 for layer in counted.layers}
    for (layer, number), versions in left.items():
        version = restored if restored in versions else max(versions)
        tokens = counted.routed[layer, number].items()
        lost[layer][number] = sum(count for at, count in tokens if version < at <= restored)
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
