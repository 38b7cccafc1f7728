"""Peers with one region of each rank: a node is lost at any moment, or two while nothing is being sent."""

import shutil

import pytest

from tests.jobs import CheckpointJob

NODES = ("n0", "n1", "n2", "n3")
DENSE = "dense, sending"
AT_REST = ("--moe-ft-interval", "3")
CASES = {
    # When rank 1 has half of a state at its first peer: all have the one before, here and at second peers.
    DENSE: (("n1",), "lose-node:1@6:replicate", ()),
    "sparse, sending": (
        ("n1",),
        "lose-node:1@5:replicate",
        ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3"),
    ),
    # The state of iteration 3 is at both peers, and the next one is not taken yet.
    "dense, at rest": (("n1", "n2"), "lose-node:1@5:backward", AT_REST),
}


@pytest.mark.parametrize(
    "name",
    [DENSE, *(pytest.param(each, marks=pytest.mark.rest) for each in CASES if each != DENSE)],
)
def test_lost_nodes_are_recovered_from_peers_that_keep_one_region_of_each_rank(
    job: CheckpointJob, name: str
) -> None:
    lost, fault, flags = CASES[name]
    job.set_model(4, {"ep": 2})

    def look(start: int) -> None:
        for directory in (job.memory_dir / "test").glob("*/replica_*"):
            assert len([*directory.glob("region_*.safetensors")]) == 1, directory
        for node in lost[1:]:
            shutil.rmtree(job.memory_dir / "test" / node)

    job.run_with_faults(fault, flags=flags, nodes=lambda start: NODES, between=look, max_restarts=1)
    assert job.digests() == job.reference()
    if flags is AT_REST:
        assert job.recovered() == [(3, 3)]
    for rank, node in enumerate(NODES):
        (line,) = job.events("recovery", rank)
        assert [*line["sources"]] == ["peer" if node in lost else "memory"]
