"""Groups that keep parity: on different nodes and domains, and enough to make any one member again."""

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.format.identity import Family, Start
from moe_ft.planning.parity import (
    FoundParity,
    ParityGroup,
    group_of_regions,
    place_parity,
    plan_rebuilding,
)
from moe_ft.planning.placement import survival_of
from moe_ft.planning.recovery import Version
from moe_ft.topology import RankInfo, Topology

NEW, OLD = ((at, -1, Start(number=0, resumed_at=0, name="first")) for at in (8, 7))


def cluster(num_nodes: int, ranks_per_node: int, num_domains: int = 0) -> Topology:
    """Return full nodes, whose domains take turns as racks of a scheduler do not."""
    return Topology(
        ranks=tuple(
            RankInfo(
                rank=rank,
                node=f"node{rank // ranks_per_node}",
                stage=0,
                pid=1,
                address=None,
                region_bytes=5000 + rank,
                domain=f"rack{rank // ranks_per_node * num_domains // num_nodes}"
                if num_domains
                else "",
            )
            for rank in range(num_nodes * ranks_per_node)
        )
    )


@given(st.integers(2, 12), st.integers(1, 4), st.integers(3, 8), st.integers(0, 4))
def test_every_rank_is_in_one_group_of_ranks_on_different_nodes_and_domains(
    num_nodes: int, ranks_per_node: int, size: int, num_domains: int
) -> None:
    topology = cluster(num_nodes, ranks_per_node, min(num_domains, num_nodes))
    try:
        groups = place_parity(topology, size)
    except PlanError:
        assert num_nodes // -(-num_nodes // size) < 2
        return
    for rank, group in enumerate(groups):
        assert rank in group.ranks
        assert all(groups[each] == group for each in group.ranks)
        assert len({topology.ranks[each].node for each in group.ranks}) == len(group.ranks)
        assert 2 <= len(group.ranks) <= size
    if topology.domains:
        nodes_of = [
            len({each.node for each in topology.ranks if each.domain == domain})
            for domain in topology.domains
        ]
        num_groups = -(-num_nodes // size)
        covered = survival_of(topology, groups).domain
        assert covered or max(nodes_of) > num_groups


@given(st.lists(st.binary(min_size=1, max_size=20_000), min_size=2, max_size=6), st.data())
def test_any_one_region_is_made_of_all_others_and_their_parity(
    regions: list[bytes], data: st.DataObject
) -> None:
    group = group_of_regions(range(len(regions)), [*map(len, regions)])
    lost = data.draw(st.sampled_from(group.ranks))

    def stripe(source: int, holder: int) -> int:
        start, end = group.stripe(source, holder)
        return int.from_bytes(regions[source][start:end].ljust(end - start, b"\0"))

    def xor(numbers: list[int]) -> int:
        return reduce(int.__xor__, numbers, 0)

    made = b""
    for holder in group.others(lost):
        kept = xor([stripe(source, holder) for source in group.others(holder)])
        rest = xor([stripe(source, holder) for source in group.others(holder, lost)])
        made += (kept ^ rest).to_bytes(group.stripe_bytes)
    assert made.rstrip(b"\0") == regions[lost].rstrip(b"\0")
    assert len(made) >= len(regions[lost])


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    whole = cluster(3, 2)
    with pytest.raises(PlanError, match="node0 has 2, node1 has 2, node2 has 1"):
        place_parity(Topology(ranks=whole.ranks[:-1]), 3)


def held(ranks: range | list[int], family: Family) -> list[Version]:
    """Return that these ranks have a state."""
    at, _, start = family
    return [
        Version(rank=each, iteration=at, lineage="l", history=(start,), node="n", path="p")
        for each in ranks
    ]


def kept(holders: list[int], group: ParityGroup, family: Family) -> list[FoundParity]:
    """Return that these ranks have the parity of a state."""
    return [
        FoundParity(holder=each, group=group, node="n", path="p", family=family) for each in holders
    ]


GROUP, OTHER = (ParityGroup(ranks=ranks, stripe_bytes=4096) for ranks in ((0, 2, 4), (1, 3, 5)))


def test_ranks_of_different_groups_are_made_again_together() -> None:
    found = plan_rebuilding(
        6, held([0, 2, 1, 3], NEW), [*kept([0, 2], GROUP, NEW), *kept([1, 3], OTHER, NEW)]
    )
    assert [each.rank for each in found] == [4, 5]
    assert [each.holder for each in found[0].parities] == [0, 2]


def test_two_ranks_of_a_group_leave_the_state_before_that_has_one() -> None:
    parities = [*kept([2], GROUP, NEW), *kept([0, 2], GROUP, OLD)]
    newer = held([2, 1, 3, 5], NEW)
    found = plan_rebuilding(6, [*newer, *held([0, 1, 2, 3, 5], OLD)], parities)
    assert [(each.rank, each.parities[0].family) for each in found] == [(4, OLD)]
    assert plan_rebuilding(6, newer, parities) == []


def test_nothing_is_made_where_all_have_the_newest_state_or_parity_is_of_another_group() -> None:
    assert plan_rebuilding(6, held(range(6), NEW), kept([0, 2], GROUP, NEW)) == []
    moved = ParityGroup(ranks=(0, 4, 5), stripe_bytes=4096)
    parities = [*kept([0], GROUP, NEW), *kept([5], moved, NEW)]
    assert plan_rebuilding(6, held([0, 1, 2, 3, 5], NEW), parities) == []
