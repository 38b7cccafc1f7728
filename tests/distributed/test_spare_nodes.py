"""Nodes under `keep` alone: spares take over for those that are lost, or only seem to be; all begin again."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.jobs import RepairedJob, fault_flags
from tests.kept_nodes import KeptNodes
from tests.namespaces import Namespaces, why_none
from tests.waiting import wait_for


def lose(job: RepairedJob, nodes: KeptNodes, name: str) -> None:
    """Lose a node with its memory."""
    nodes.kill(name)
    for path in job.memory_dir.glob(f"*/{name}"):
        shutil.rmtree(path)


def check_taken_over(
    job: RepairedJob, rounds: list[dict[str, str]], lost: dict[str, list[int]]
) -> None:
    """Check who took over for whom, that the state came from peers, and that the bits are the same."""
    for rank in range(job.num_ranks):
        repairs = job.events("repair", rank)
        assert [each["taken_over"] for each in repairs] == rounds
        recoveries = job.events("recovery", rank)
        assert len(recoveries) == len(repairs)
        for repair, recovery in zip(repairs, recoveries, strict=True):
            dead = [each for name in repair["taken_over"] for each in lost[name]]
            assert repair["dead_ranks"] == dead
            assert set(recovery["sources"]) == {"peer" if rank in dead else "memory"}
    assert job.digests() == job.reference()


def check_takes_over_again(job: RepairedJob, nodes: KeptNodes) -> None:
    """Lose node2, which has replaced node1, when node1 has come as a spare; check that it takes over."""
    wait_for(lambda: "node node1 is a spare" in nodes.log("node0"), "the spare")
    lose(job, nodes, "node2")
    assert nodes.wait() == {"node0": 0, "node1": 0}, nodes.log("node0")[-3000:]
    # The state in node1's memory was older than that of its peers.
    rounds = [{"node1": "node2"}, {"node2": "node1"}]
    check_taken_over(job, rounds, {"node1": [2, 3], "node2": [2, 3]})


def test_spare_takes_over_a_lost_node_in_place_and_the_bits_are_the_same(
    repaired: RepairedJob,
) -> None:
    with repaired.kept_nodes() as nodes:
        nodes.start("node0", "node1", "node2")
        repaired.wait_for_iteration(4)
        lose(repaired, nodes, "node1")
        assert nodes.wait() == {"node0": 0, "node2": 0}, nodes.log("node0")[-3000:]
    assert nodes.status.read_text().split() == ["0", "node0", "node2"]
    check_taken_over(repaired, [{"node1": "node2"}], {"node1": [2, 3]})
    for rank in (0, 1):
        assert len({line["pid"] for line in repaired.events("start", rank)}) == 1


@pytest.mark.rest
def test_node_that_was_silent_ends_its_ranks_becomes_a_spare_and_takes_over_from_peers_memory(
    repaired: RepairedJob,
) -> None:
    with repaired.kept_nodes(lost_after_s=3, train_iters=120) as nodes:
        nodes.start("node0", "node1", "node2")
        repaired.wait_for_iteration(4)
        nodes.stop("node1")
        wait_for(lambda: repaired.events("repair"), "the repair")
        nodes.wake("node1")
        check_takes_over_again(repaired, nodes)
        assert "node node1 is replaced: it was silent, or" in nodes.log("node1")


@pytest.mark.rest
def test_node_that_is_cut_off_ends_its_ranks_and_takes_over_when_it_is_back(
    repaired: RepairedJob,
) -> None:
    if reason := why_none():
        pytest.skip(reason)
    names = ("node0", "node1", "node2")
    with (
        Namespaces(*names) as networks,
        repaired.kept_nodes(train_iters=150, networks=networks) as nodes,
    ):
        nodes.start(*names)
        repaired.wait_for_iteration(4)
        ranks = {each["pid"] for rank in (2, 3) for each in repaired.events("start", rank)}
        networks.cut("node1")
        wait_for(lambda: "node node1 is lost" in nodes.log("node0"), "the verdict")
        wait_for(lambda: repaired.events("repair"), "the repair")
        wait_for(lambda: "node node1 is cut off" in nodes.log("node1"), "node1 to notice")
        assert not any(map(psutil.pid_exists, ranks))
        networks.restore("node1")
        check_takes_over_again(repaired, nodes)


@pytest.mark.rest
def test_one_end_of_a_dead_link_is_replaced_and_leaves_nothing_though_both_reach_the_store(
    repaired: RepairedJob,
) -> None:
    if reason := why_none():
        pytest.skip(reason)
    names = ("node0", "node1", "node2", "node3")
    with (
        Namespaces(*names) as networks,
        repaired.kept_nodes(lost_after_s=5, networks=networks, store=3) as nodes,
    ):
        nodes.start(*names)
        repaired.wait_for_iteration(4)
        networks.part("node0", "node1")
        wait_for(lambda: "and both reach the job's store" in nodes.log("node3"), "the verdict")
        assert nodes.wait() == dict.fromkeys(names, 0), nodes.log("node3")[-3000:]
    (lost,) = re.findall(r"node (\S+) is lost: it does not reach", nodes.log("node3"))
    ranks = {"node0": [0, 1], "node1": [2, 3]}
    check_taken_over(repaired, [{lost: "node2"}], ranks)
    assert f"node {lost} is a spare" in nodes.log("node3")
    assert not [*repaired.memory_dir.iterdir()]


@pytest.mark.rest
def test_spare_with_too_little_room_gets_no_ranks_and_one_with_room_does(
    repaired: RepairedJob, mount_small: Callable[..., Path]
) -> None:
    with repaired.kept_nodes() as nodes:
        mount_small("256k", repaired.memory_dir / "nodes" / "node2")
        nodes.start("node0", "node1", "node2")
        repaired.wait_for_iteration(4)
        assert "node node2 is a spare (has room for 256.00 KiB)" in nodes.log("node0")
        nodes.start("node3", first=3)
        wait_for(lambda: "node node3 is a spare (has room for " in nodes.log("node0"), "the spare")
        lose(repaired, nodes, "node1")
        assert nodes.wait() == {"node0": 0, "node2": 0, "node3": 0}, nodes.log("node0")[-3000:]
    check_taken_over(repaired, [{"node1": "node3"}], {"node1": [2, 3]})


@pytest.mark.rest
def test_first_node_is_replaced_if_a_node_without_ranks_keeps_the_store(
    repaired: RepairedJob,
) -> None:
    with repaired.kept_nodes(store=3) as nodes:
        nodes.start("node0", "node1", "node2", "node3")
        repaired.wait_for_iteration(4)
        lose(repaired, nodes, "node0")
        assert nodes.wait() == {"node1": 0, "node2": 0, "node3": 0}, nodes.log("node3")[-3000:]
    assert nodes.status.read_text().split() == ["0", "node2", "node1"]
    check_taken_over(repaired, [{"node0": "node2"}], {"node0": [0, 1]})


@pytest.mark.rest
@pytest.mark.parametrize("store", [0, 2])
def test_nodes_end_when_the_node_of_the_store_is_cut_off_and_say_so(
    repaired: RepairedJob, store: int
) -> None:
    if reason := why_none():
        pytest.skip(reason)
    names = ("node0", "node1", "node2")
    with (
        Namespaces(*names) as networks,
        repaired.kept_nodes(
            lost_after_s=3, train_iters=1000, networks=networks, store=store
        ) as nodes,
    ):
        nodes.start(*names)
        repaired.wait_for_iteration(4)
        networks.cut(f"node{store}")
        codes = nodes.wait()
    assert codes == dict.fromkeys(names, 1)
    for name in set(names) - {f"node{store}"}:
        assert "ends: the job's store on 10.78.0." in nodes.log(name), nodes.log(name)[-3000:]


@pytest.mark.rest
def test_spare_that_is_lost_while_it_takes_over_is_replaced_by_the_next_one(
    repaired: RepairedJob,
) -> None:
    with repaired.kept_nodes(train_iters=80) as nodes:
        nodes.start("node0", "node1", "node2", "node3")
        repaired.wait_for_iteration(4)
        lose(repaired, nodes, "node1")
        said = r"node (node[23]) takes over the ranks of node node1"
        spare = wait_for(lambda: re.search(said, nodes.log("node0")), "the spare")[1]
        (other,) = {"node2", "node3"} - {spare}
        lose(repaired, nodes, spare)
        assert nodes.wait() == {"node0": 0, other: 0}, nodes.log("node0")[-3000:]
    check_taken_over(repaired, [{spare: other}], {spare: [2, 3]})


@pytest.mark.rest
def test_two_of_four_nodes_that_are_lost_at_once_are_replaced(repaired: RepairedJob) -> None:
    with repaired.kept_nodes(num_nodes=4, train_iters=80) as nodes:
        nodes.start(*(f"node{number}" for number in range(6)))
        repaired.wait_for_iteration(4)
        nodes.kill("node1", "node3")
        assert nodes.wait() == dict.fromkeys(("node0", "node2", "node4", "node5"), 0)
    last = {rank: repaired.events("repair", rank)[-1] for rank in range(4)}
    assert {rank: each["is_replacement"] for rank, each in last.items()} == {
        **dict.fromkeys((0, 2), False),
        **dict.fromkeys((1, 3), True),
    }
    for rank in (1, 3):
        assert set(repaired.events("recovery", rank)[-1]["sources"]) == {"peer"}
    assert repaired.digests() == repaired.reference()


@pytest.mark.rest
def test_job_ends_when_a_node_is_lost_and_no_spare_is_left(repaired: RepairedJob) -> None:
    with repaired.kept_nodes("--moe-ft-spare", "restart") as nodes:
        nodes.start("node0", "node1")
        repaired.wait_for_iteration(4)
        nodes.kill("node1")
        assert nodes.wait() == {"node0": 1}
        assert "restart is --moe-ft-without-spare end now: write that" in nodes.log("node0")
        assert "no spare is left (--moe-ft-without-spare end)" in nodes.log("node0")
        assert nodes.status.read_text().split() == ["1", "node0", "node1"]


@pytest.mark.rest
def test_job_that_is_to_wait_for_a_spare_continues_when_the_lost_node_comes_back(
    repaired: RepairedJob,
) -> None:
    with repaired.kept_nodes("--moe-ft-without-spare", "wait") as nodes:
        nodes.start("node0", "node1")
        repaired.wait_for_iteration(4)
        nodes.kill("node1")
        wait_for(lambda: "training waits for a node" in nodes.log("node0"), "the wait")
        nodes.start("node1", first=1)
        assert nodes.wait()["node0"] == 0, nodes.log("node0")[-3000:]
    (repair,) = repaired.events("repair", 2)
    assert repair["taken_over"] == {"node1": "node1"}
    assert repaired.digests() == repaired.reference()


@pytest.mark.rest
@pytest.mark.parametrize(
    "faults", [("exception:2@0:before-step",), ("kill:3@4:forward", "exception:2@3:recovery")]
)
def test_all_ranks_begin_again_after_one_has_failed_where_it_is_not_replaced(
    repaired: RepairedJob, faults: tuple[str, ...]
) -> None:
    with repaired.kept_nodes(*fault_flags(faults), train_iters=12, max_restarts=1) as nodes:
        nodes.start("node0", "node1")
        assert nodes.wait() == {"node0": 0, "node1": 0}, nodes.log("node0")[-3000:]
        log = nodes.log("node0")
    assert "begin again on nodes node0, node1: a rank has failed with exit code 1" in log
    for rank in range(4):
        first, second = repaired.events("start", rank)
        assert first["pid"] != second["pid"]
    assert repaired.digests() == repaired.reference()
