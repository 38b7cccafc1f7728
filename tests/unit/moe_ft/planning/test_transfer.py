"""Plans of transfers against brute force: every element of random tensors in random divisions."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.transfer import (
    Block,
    Box,
    Part,
    TransferPlan,
    boxes_of,
    cut,
    join_ranges,
    plan_transfer,
    runs_of,
)

Numbers = npt.NDArray[np.int64]
Draw = st.DrawFn


@dataclass(frozen=True)
class Slice:
    """Flat range of a rank's tensor, which consists of blocks."""

    rank: int
    blocks: tuple[Block, ...]
    shape: tuple[int, ...]
    start: int
    end: int

    def of(self, tensors: dict[str, Numbers]) -> Numbers:
        """Return its elements."""
        whole = np.full(self.shape, -1)
        for block in self.blocks:
            there = tensors[str(block.tensor)][_box(block.offset, block.extent)]
            whole[_box(block.start, block.extent)] = there
        return whole.reshape(-1)[self.start : self.end]


def _box(start: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(start, lengths, strict=True))


@st.composite
def divisions(draw: Draw, tensors: dict[str, tuple[tuple[int, ...], int]]) -> list[Slice]:
    """Draw how ranks hold tensors: one dimension in parts, each by several ranks, flat or whole.

    Args:
        tensors: shape and number of stacked halves, which are divided separately, by name.
    """
    num_ranks = draw(st.integers(1, 5))
    found = []
    for name, (shape, halves) in tensors.items():
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        pieces = halves if dim == 0 else 1
        size = shape[dim] // pieces if shape else 1
        tp = draw(st.sampled_from([n for n in (1, 2, 3) if n <= num_ranks and size % n == 0]))
        for position in range(tp):
            blocks, local = _blocks(name, shape, dim, pieces, tp, position)
            holders = draw(st.permutations([r for r in range(num_ranks) if r % tp == position]))
            holders = holders[: draw(st.integers(1, len(holders)))]
            inner = sorted(draw(st.integers(0, prod(local))) for _ in holders[1:])
            cuts = [0, *inner, prod(local)]
            is_flat = draw(st.booleans())
            for number, rank in enumerate(holders):
                start, end = cuts[number : number + 2] if is_flat else (0, prod(local))
                if start < end:
                    found.append(Slice(rank, blocks, local, start, end))
    return found


def _blocks(
    name: str, shape: tuple[int, ...], dim: int, pieces: int, tp: int, position: int
) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the blocks of one part of a tensor, and the shape that a rank holds it in."""
    if not shape:
        return (Block(name, (), (), (), ()),), ()
    size = shape[dim] // pieces // tp

    def with_size(value: int) -> tuple[int, ...]:
        return tuple(value if each == dim else n for each, n in enumerate(shape))

    def at(value: int) -> tuple[int, ...]:
        return tuple(value if each == dim else 0 for each in range(len(shape)))

    local = with_size(size * pieces)
    return tuple(
        Block(
            name,
            at((shape[dim] // pieces) * piece + position * size),
            with_size(size),
            local,
            at(piece * size),
        )
        for piece in range(pieces)
    ), local


@st.composite
def cases(draw: Draw) -> tuple[Any, ...]:
    shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=3).map(tuple)
    tensors = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes)
        halves = 2 if shape and shape[0] % 2 == 0 and draw(st.booleans()) else 1
        tensors[f"t{number}"] = shape, halves
    have, want = draw(divisions(tensors)), draw(divisions(tensors))
    num_nodes = draw(st.integers(1, 3))
    nodes = st.integers(0, num_nodes - 1)
    places = [draw(st.sets(nodes, max_size=num_nodes)) for _ in range(5)]  # lost if there is none
    return tensors, have, want, places, [draw(nodes) for _ in range(5)]


def _numbered(tensors: dict[str, Any]) -> dict[str, Numbers]:
    return {
        name: np.arange(prod(shape)).reshape(shape) + 10_000 * number
        for number, (name, (shape, _)) in enumerate(tensors.items())
    }


def _by_number(slices: list[Slice]) -> dict[Hashable, Slice]:
    return dict(enumerate(slices))


def _copy(move: Any, there: Numbers, have: Slice, target: Numbers, want: Slice) -> None:
    for source_box, target_box in boxes_of(move, have.start, want.start):
        views = [
            np.lib.stride_tricks.as_strided(
                flat[box.at :], box.lengths, [flat.itemsize * each for each in box.strides]
            )
            for flat, box in ((there, source_box), (target, target_box))
        ]
        assert (views[1] == -1).all(), "written twice"
        views[1][...] = views[0]


@given(cases())
def test_a_plan_brings_every_element_that_is_somewhere_once_and_from_the_own_node_first(
    case: tuple[Any, ...],
) -> None:
    tensors, have, want, places, node_of = case
    numbered = _numbered(tensors)
    owned = _by_number([each for each in have if places[each.rank]])
    wanted = _by_number(want)
    plan: TransferPlan[int] = plan_transfer(
        (p for i, each in owned.items() for p in cut(i, each.blocks, each.start, each.end)),
        [p for i, each in wanted.items() for p in cut(i, each.blocks, each.start, each.end)],
        lambda owner: sorted(places[owned[owner].rank]),
        lambda place, owner: int(place != node_of[wanted[owner].rank]),
        lambda owner: owned[owner].rank,
    )
    there = {number for each in owned.values() for number in each.of(numbered)}
    sent: dict[int, int] = defaultdict(int)
    for i, each in wanted.items():
        found, expected = np.full(each.end - each.start, -1), each.of(numbered)
        for place, move in plan.moves.get(i, ()):
            source = owned[move.source.owner]
            assert place in places[source.rank]
            _copy(move, source.of(numbered), source, found, each)
            is_own = place == node_of[each.rank]
            assert is_own or node_of[each.rank] not in places[source.rank]
            sent[place] += 0 if is_own else move.num_elements
        expected = np.where(np.isin(expected, list(there)), expected, -1)
        assert (found == expected).all()
        assert plan.missing.get(i, 0) == (found == -1).sum()
    assert {key: value for key, value in plan.load.items() if value} == {
        key: value for key, value in sent.items() if value
    }


def _line(owner: int, name: str, size: int) -> Part:
    return Part(owner, Block(name, (0,), (size,), (size,), (0,)), 0, size)


def test_what_several_places_have_is_sent_by_all_of_them() -> None:
    sizes = [7, 5, 4, 4, 2, 2]
    have = [_line(0, f"t{number}", size) for number, size in enumerate(sizes)]
    plan = plan_transfer(have, have, lambda owner: "ab", lambda *_: 1, lambda owner: 0)
    assert sum(plan.load.values()) == sum(sizes)
    assert abs(plan.load["a"] - plan.load["b"]) <= min(sizes)


def test_the_lowest_owner_of_the_same_elements_counts() -> None:
    have = [_line(owner, "t", 4) for owner in (2, 1, 3)]
    plan = plan_transfer(have, [_line(9, "t", 4)], lambda owner: [owner], lambda *_: 1, hash)
    assert [place for place, _ in plan.moves[9]] == [1]


def test_blocks_that_overlap_are_refused() -> None:
    def block(start: int) -> Part:
        return Part(start, Block("t", (start,), (3,), (3,), (0,)), 0, 3)

    with pytest.raises(PlanError, match="several blocks"):
        plan_transfer([block(0), block(1)], [_line(0, "t", 4)], lambda _: [0], lambda *_: 1, hash)


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_runs_of_a_box_are_its_elements_and_joined_ones_have_only_short_gaps_more(
    shape: list[int], data: st.DataObject
) -> None:
    strides = tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
    start = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = tuple(
        data.draw(st.integers(1, size - at)) for size, at in zip(shape, start, strict=True)
    )
    flat = np.arange(prod(shape)).reshape(shape)
    elements = flat[_box(tuple(start), lengths)].reshape(-1).tolist()
    runs = list(runs_of(Box(elements[0], lengths, strides)))
    assert [each for first, last in runs for each in range(first, last)] == elements
    most = data.draw(st.integers(1, 4))
    joined = join_ranges(runs, gap=1, most=most)
    assert len(joined) <= most
    covered = {each for first, last in joined for each in range(first, last)}
    assert covered >= set(elements)
    if len(join_ranges(runs, gap=1, most=len(runs))) <= most:
        between = covered - set(elements)
        assert all({each - 1, each + 1} <= set(elements) for each in between)
