"""Nodes that keep parity: a lost node's state is made again from that of the others, without a copy."""

import shutil

import pytest

from tests.jobs import RepairedJob

NAMES = ("node0", "node1", "node2", "node3", "node4")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param((), id="dense"),
        pytest.param(
            ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2"),
            id="sparse",
            marks=pytest.mark.rest,
        ),
    ],
)
def test_spare_gets_the_state_of_a_lost_node_that_is_made_again_from_parity(
    repaired: RepairedJob, strategy: tuple[str, ...]
) -> None:
    with repaired.kept_nodes("--moe-ft-replicas", "parity:4", *strategy, num_nodes=4) as nodes:
        nodes.start(*NAMES)
        repaired.wait_for_iteration(6)
        assert not list(repaired.memory_dir.glob("*/*/replica_*"))
        nodes.kill("node2")
        for path in repaired.memory_dir.glob("*/node2"):
            shutil.rmtree(path)
        codes = nodes.wait()
        log = nodes.log("node0")
    assert codes == {"node0": 0, "node1": 0, "node3": 0, "node4": 0}, log[-3000:]
    assert repaired.digests() == repaired.reference()
    assert "the state of rank 2 of iteration" in log
    for rank in range(4):
        (line,) = repaired.events("recovery", rank)
        assert [*line["sources"]] == ["memory"]
    (protects,) = repaired.events("protects")
    assert (protects["parity_nodes"], protects["lost_node_source"]) == (4, "parity")
