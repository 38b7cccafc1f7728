"""Overview of another layout: the same however ranks are grouped, and once for all that had the same."""

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from moe_ft.format.entries import GlobalPlace, ModelPlaces, ParameterEntry
from moe_ft.format.index import Index
from moe_ft.planning.recovery import Source, Version
from moe_ft.planning.relayout import ModelTensor
from moe_ft.planning.tiers import MEMORY, PEER
from moe_ft.recovery.overview import Overview, in_order, merge, number_of
from tests.unit.moe_ft.builders import make_identity, make_window

NOW = 5
PLACES = [
    GlobalPlace(key=f"layer{layer}", shape=(33,), offset=(0,), start=(0,), extent=(33,))
    for layer in range(2)
]


def version_of(rank: int, node: str | None = "a") -> Version:
    return Version(
        rank=rank,
        iteration=NOW,
        lineage="run",
        history=make_identity().history,
        node=node,
        path=f"rank_{rank:05d}/region_0.json",
    )


def index_of(rank: int, *, optimizer: Mapping[str, Any] | None = None, **changes: Any) -> Index:
    """Return the index of a rank of one of two stages: that has all of its tensors in one of the model."""
    index = make_window(length=1, rank=rank).index
    place = PLACES[rank % 2]
    record = index.records[0]
    optimizers = tuple(
        msgspec.structs.replace(each, steps={f"{rank}.weight": 3.0}, **(optimizer or {}))
        for each in record.optimizers
    )
    buffers = {f"layer{rank % 2}.bias": next(iter(record.buffers.values()))}
    record = msgspec.structs.replace(
        record, rng={"own": rank}, optimizers=optimizers, buffers=buffers, **changes
    )
    return msgspec.structs.replace(
        index,
        rank=rank,
        node=f"node{rank}",
        records=(record,),
        parameters={
            name: ParameterEntry(shape=(33,), places=(place,)) for name in index.parameters
        },
        model=ModelPlaces(buffers={f"layer{rank % 2}.bias": (place,)}),
    )


def overview_of(*indexes: Index) -> Overview:
    found = Overview()
    for index in indexes:
        found.add(index.rank, version_of(index.rank), index, is_own=True)
    return found


def test_ranks_that_had_the_same_for_themselves_are_passed_on_as_their_lowest() -> None:
    found = overview_of(*map(index_of, (4, 3, 1, 2)))
    assert found.ranks == {1, 2, 3, 4}
    heads = found.indexes()
    assert [*heads] == [1, 2]
    assert [*heads[1].records[0].buffers] == ["layer1.bias"]
    assert heads[1].model_places.buffers == index_of(1).model_places.buffers
    assert (
        heads[1].records[0].consumed_train_samples == index_of(1).records[0].consumed_train_samples
    )
    assert [head.units for head in heads.values()] == [{}, {}]


@pytest.mark.parametrize(
    "changes", [{"loop_state": {"epoch": 2}}, {"optimizer": {"found_inf": True}}]
)
def test_a_rank_that_had_something_of_its_own_is_passed_on_itself(changes: dict[str, Any]) -> None:
    assert [*overview_of(index_of(0), index_of(2), index_of(4, **changes)).indexes()] == [0, 4]


def test_an_overview_is_the_same_however_ranks_are_grouped() -> None:
    indexes = [index_of(rank, loop_state={"third": rank % 3}) for rank in range(12)]
    whole = overview_of(*indexes)
    for seed in range(20):
        draw = random.Random(seed)
        found = [overview_of(each) for each in draw.sample(indexes, len(indexes))]
        while len(found) > 1:
            count = draw.randint(2, len(found))
            found = [*found[count:], merge(found[:count])]
        (merged,) = found
        assert (merged.ranks, merged.indexes(), merged.gaps) == (
            whole.ranks,
            whole.indexes(),
            whole.gaps,
        )
        for place in PLACES:
            number = number_of(ModelTensor(place.key, (), "param"))
            assert merged.places_of([number]) == whole.places_of([number])


def test_an_index_is_found_by_the_tensors_of_the_model_that_it_has_parts_of() -> None:
    found = overview_of(*map(index_of, range(5)))
    numbers = [
        number_of(ModelTensor(each.key, (), kind)) for each in PLACES for kind in ("param", "m")
    ]
    assert [found.places_of([each]) for each in numbers] == [{0, 2, 4}] * 2 + [{1, 3}] * 2
    assert found.places_of([number_of(ModelTensor("layer2", (), "param"))]) == set()


def test_sources_have_one_order_whoever_reads_them() -> None:
    versions = [version_of(rank, node) for node in ("b", "a", None) for rank in (1, 0)]
    orders = []
    for reader in ("a", "b"):
        tiers = [MEMORY if each.node == reader else PEER for each in versions]
        sources = [
            Source(tier=tier, version=each) for tier, each in zip(tiers, versions, strict=True)
        ]
        orders.append([each.version for each in in_order([*sources, *sources[::-1]])])
    assert orders[0] == orders[1]
    assert len(orders[0]) == len(versions)
