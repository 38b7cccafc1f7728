"""Topologies know the nodes of a job, the ranks on each, and the memory that a rank takes."""

from dataclasses import replace

from moe_ft.topology import RankInfo, Topology


def rank_on(node: str, rank: int) -> RankInfo:
    return RankInfo(
        rank=rank,
        node=node,
        stage=0,
        pid=100 + rank,
        address=None,
        region_bytes=1000,
        slot_bytes=10,
        num_slots=3,
    )


TOPOLOGY = Topology(ranks=tuple(rank_on(node, rank) for rank, node in enumerate("babca")))


def test_nodes_are_in_the_order_of_their_lowest_ranks() -> None:
    assert TOPOLOGY.nodes == ("b", "a", "c")


def test_ranks_of_a_node_ascend_and_the_lowest_works_for_it() -> None:
    assert [info.rank for info in TOPOLOGY.on_node("a")] == [1, 4]
    assert TOPOLOGY.lowest_on_node("a").rank == 1
    assert TOPOLOGY.on_node("d") == ()


def test_memory_of_a_rank_is_its_regions_and_one_pool() -> None:
    assert TOPOLOGY.ranks[0].memory_bytes(2) == 2030


def test_boundary_log_is_kept_once_and_is_in_no_replica() -> None:
    info = replace(rank_on("a", 0), boundary_slot_bytes=100, num_boundary_slots=3)
    assert info.boundary_bytes == 300
    assert info.memory_bytes(2) == rank_on("a", 0).memory_bytes(2)
