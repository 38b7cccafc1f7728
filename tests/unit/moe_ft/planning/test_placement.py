"""Replicas are on other nodes, evenly."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.config.config import MemoryConfig
from moe_ft.errors import PlanError
from moe_ft.planning.placement import (
    default_replication_factor,
    describe_domains,
    find_survival,
    place_replicas,
    plan_node_memory,
    sources_of,
)
from moe_ft.topology import RankInfo, Topology


def make_topology(
    nodes: list[str], stages: list[int] | None = None, sizes: list[int] | None = None
) -> Topology:
    num_ranks = len(nodes)
    return Topology(
        ranks=tuple(
            RankInfo(rank=rank, node=node, stage=stage, pid=1, address=None, region_bytes=size)
            for rank, (node, stage, size) in enumerate(
                zip(nodes, stages or [0] * num_ranks, sizes or [100] * num_ranks, strict=True)
            )
        )
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any number of ranks in any order on any nodes, in any stages, of any size."""
    num_ranks = draw(st.integers(1, 24))
    nodes = draw(st.lists(st.sampled_from("abcdef"), min_size=num_ranks, max_size=num_ranks))
    stages = draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks))
    sizes = draw(st.lists(st.integers(0, 1000), min_size=num_ranks, max_size=num_ranks))
    return make_topology(nodes, stages, sizes)


@st.composite
def topologies_and_factors(draw: st.DrawFn) -> tuple[Topology, int]:
    topology = draw(topologies())
    return topology, draw(st.integers(0, len(topology.nodes) - 1))


@st.composite
def even_clusters(draw: st.DrawFn) -> tuple[Topology, int]:
    """As launchers make them: nodes of equal size, blocks of ranks, every stage on every node or on one."""
    num_nodes, ranks_per_node = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    nodes = [f"node{node}" for node in range(num_nodes) for _ in range(ranks_per_node)]
    stage_of = draw(st.sampled_from(["all in one", "one per local rank", "one per node"]))
    stages = {
        "all in one": [0] * len(nodes),
        "one per local rank": [rank % ranks_per_node for rank in range(len(nodes))],
        "one per node": [rank // ranks_per_node for rank in range(len(nodes))],
    }[stage_of]
    return make_topology(nodes, stages), draw(st.integers(0, num_nodes - 1))


@given(topologies_and_factors())
def test_replicas_of_any_topology_are_never_on_the_node_they_protect(
    case: tuple[Topology, int],
) -> None:
    topology, factor = case
    for info, peers in zip(topology.ranks, place_replicas(topology, factor), strict=True):
        assert info.node not in {topology.ranks[peer].node for peer in peers}


@given(topologies_and_factors())
def test_replicas_of_any_topology_are_as_many_as_asked_for_on_as_many_nodes(
    case: tuple[Topology, int],
) -> None:
    topology, factor = case
    for peers in place_replicas(topology, factor):
        assert len(peers) == factor
        assert len({topology.ranks[peer].node for peer in peers}) == factor


@given(topologies_and_factors())
def test_replicas_where_the_stage_is_on_enough_nodes_stay_in_the_stage(
    case: tuple[Topology, int],
) -> None:
    topology, factor = case
    for info, peers in zip(topology.ranks, place_replicas(topology, factor), strict=True):
        stage_nodes = {other.node for other in topology.ranks if other.stage == info.stage}
        inside = [peer for peer in peers if topology.ranks[peer].stage == info.stage]
        assert len(inside) >= min(factor, len(stage_nodes) - 1)


@given(even_clusters())
def test_replicas_on_equal_nodes_are_the_same_number_at_every_rank(
    case: tuple[Topology, int],
) -> None:
    topology, factor = case
    load = Counter(peer for peers in place_replicas(topology, factor) for peer in peers)
    assert [load[info.rank] for info in topology.ranks] == [factor] * len(topology.ranks)


@given(topologies(), st.integers(0, 5))
def test_factor_that_has_too_few_nodes_is_refused_with_both_numbers(
    topology: Topology, more: int
) -> None:
    num_nodes = len(topology.nodes)
    message = (
        f"{num_nodes + more} replicas need {num_nodes + more + 1} nodes, there are {num_nodes}"
    )
    with pytest.raises(PlanError, match=message):
        place_replicas(topology, num_nodes + more)


def test_placement_of_two_stages_on_three_nodes_is_that_worked_by_hand() -> None:
    # Stage 0 is on nodes a and b, stage 1 on c alone.
    topology = make_topology(["a", "a", "b", "b", "c", "c"], [0, 0, 0, 0, 1, 1])
    assert place_replicas(topology, 1) == [
        (2,),  # next node of the stage's ring is b: 2 and 3 are free, 2 comes first
        (3,),  # 2 is taken
        (0,),
        (1,),
        (0,),  # nobody else in the stage; everyone elsewhere keeps one: the first on the ring
        (1,),  # 0 keeps two by now
    ]


def test_replica_of_a_big_rank_goes_where_the_least_bytes_are() -> None:
    topology = make_topology(["a", "a", "a", "b", "b"], sizes=[500, 100, 100, 1, 1])
    assert place_replicas(topology, 1)[:3] == [(3,), (4,), (4,)]


def with_domains(topology: Topology, domains: dict[str, str]) -> Topology:
    ranks = tuple(replace(info, domain=domains[info.node]) for info in topology.ranks)
    return Topology(ranks=ranks)


def small_topologies() -> Iterator[tuple[Topology, int]]:
    """Every way to put few ranks on nodes, nodes into domains and ranks into stages, with each factor."""
    for num_ranks in range(1, 6):
        for nodes in product("abcd"[:num_ranks], repeat=num_ranks):
            names = [*dict.fromkeys(nodes)]
            if names != sorted(names):
                continue  # the same with other names
            for domains in product("xyz", repeat=len(names)):
                of_node = dict(zip(names, domains, strict=True))
                stages = [rank % 2 * (num_ranks % 2) for rank in range(num_ranks)]
                topology = with_domains(make_topology([*nodes], stages), of_node)
                for factor in range(len(names)):
                    yield topology, factor


def survives(topology: Topology, peers: Sequence[tuple[int, ...]], lost: set[str]) -> bool:
    """Return whether each rank's state is left when nodes or domains are lost, tried out."""
    ranks = topology.ranks
    left = {info.rank for info in ranks if not {info.node, info.domain} & lost}
    return all({info.rank, *peers[info.rank]} & left for info in ranks)


def test_replicas_of_every_small_job_are_in_as_many_domains_and_nodes_as_there_can_be() -> None:
    for topology, factor in small_topologies():
        for info, chosen in zip(topology.ranks, place_replicas(topology, factor), strict=True):
            copies = [info, *(topology.ranks[peer] for peer in chosen)]
            assert len({each.node for each in copies}) == factor + 1
            num_domains = len({each.domain for each in copies})
            assert num_domains == min(factor + 1, len(topology.domains)), (topology, factor)


def test_survival_of_every_small_job_is_what_losses_leave() -> None:
    for topology, factor in small_topologies():
        peers = place_replicas(topology, factor)
        found = find_survival(topology, peers, replica_regions=2)
        assert found.domain == all(survives(topology, peers, {each}) for each in topology.domains)
        losses = product(topology.nodes, repeat=found.num_nodes)
        assert all(survives(topology, peers, {*lost}) for lost in losses)


@pytest.mark.parametrize("factor", [1, 2])
def test_replicas_in_equal_domains_are_spread_over_all_ranks(factor: int) -> None:
    nodes = [f"node{number}" for number in range(12) for _ in range(4)]
    racks = {node: f"rack{number // 16}" for number, node in enumerate(nodes)}
    for stage_of, most in (
        (lambda rank: 0, factor),
        (lambda rank: rank % 4, factor),
        (lambda rank: rank // 16, factor),
        (lambda rank: rank // 12, factor + 1),  # stages begin in the middle of a rack
    ):
        topology = with_domains(make_topology(nodes, [*map(stage_of, range(48))]), racks)
        load = Counter(peer for peers in place_replicas(topology, factor) for peer in peers)
        assert max(load.values()) <= most


@pytest.mark.parametrize(
    ("racks", "factor", "line"),
    [
        (
            "abcd",
            2,
            "4 nodes in 4 failure domains: replicas go to other domains; memory survives the loss of any 2 "
            "nodes at once (while a snapshot is sent, any one node); any one failure domain",
        ),
        (
            "aabb",
            2,
            "4 nodes in 2 failure domains: replicas go 1 of 2 to other domains, then to other nodes; memory "
            "survives the loss of any 2 nodes at once (while a snapshot is sent, any one node); any one "
            "failure domain",
        ),
        (
            "aaaa",
            1,
            "4 nodes in 1 failure domain: replicas go to other nodes of it; memory survives the loss of any "
            "one node; no failure domain",
        ),
        (
            "aabb",
            0,
            "4 nodes in 2 failure domains: no replicas; memory survives the loss of no node; no failure "
            "domain",
        ),
    ],
)
def test_line_says_where_replicas_go_and_what_that_covers(
    racks: str, factor: int, line: str
) -> None:
    nodes = ["n0", "n1", "n2", "n3"]
    topology = with_domains(make_topology(nodes), dict(zip(nodes, racks, strict=True)))
    assert describe_domains(topology, place_replicas(topology, factor), MemoryConfig()) == line


@given(topologies_and_factors())
def test_sources_are_the_inverse_of_peers(case: tuple[Topology, int]) -> None:
    peers = place_replicas(*case)
    pairs = {(source, peer) for source, chosen in enumerate(peers) for peer in chosen}
    ranks = range(len(peers))
    assert {(source, rank) for rank in ranks for source in sources_of(peers, rank)} == pairs


@pytest.mark.parametrize(("num_nodes", "factor"), [(1, 0), (2, 1), (3, 2), (4, 2), (1000, 2)])
def test_default_factor_is_two_where_the_nodes_allow_it(num_nodes: int, factor: int) -> None:
    assert default_replication_factor(num_nodes) == factor


def test_node_memory_counts_the_boundary_logs_of_its_own_ranks() -> None:
    plain = make_topology(["a", "b"])
    logging = replace(plain.ranks[0], boundary_slot_bytes=7, num_boundary_slots=2)
    topology = Topology(ranks=(logging, plain.ranks[1]))
    peers = [(1,), (0,)]
    before, after = (plan_node_memory(each, peers, 2, 2) for each in (plain, topology))
    assert [after[node] - before[node] for node in plain.nodes] == [14, 0]


def test_breakpoints_take_memory_on_their_own_node_only() -> None:
    ranks = tuple(
        RankInfo(
            rank=rank,
            node=node,
            stage=0,
            pid=1,
            address=None,
            region_bytes=10,
            breakpoint_bytes=7,
        )
        for rank, node in enumerate("ab")
    )
    topology = Topology(ranks=ranks)
    assert plan_node_memory(topology, place_replicas(topology, 1), 2, 2) == {"a": 47, "b": 47}


def test_node_memory_of_two_nodes_is_that_worked_by_hand() -> None:
    topology = make_topology(["a", "a", "b"], sizes=[10, 20, 30])
    # a: 3 regions of 10 and of 20, and 2 replicas of b's 30. b: 3 x 30, and 2 x (10 + 20).
    memory = plan_node_memory(topology, [(2,), (2,), (0,)], 3, 2)
    assert memory == {"a": 3 * 30 + 2 * 30, "b": 3 * 30 + 2 * 30}


def test_peers_keep_one_region_of_a_rank_without_a_pool_and_two_beside_one() -> None:
    plain = make_topology(["a", "b", "c"], sizes=[10, 20, 30])
    pooled = replace(plain.ranks[2], slot_bytes=1, num_slots=5)
    topology, peers = Topology(ranks=(*plain.ranks[:2], pooled)), place_replicas(plain, 2)
    memory = plan_node_memory(topology, peers, 2, 1)
    assert memory == {"a": 20 + 20 + (60 + 5), "b": 40 + 10 + (60 + 5), "c": (60 + 5) + 10 + 20}
