"""Plans of transfers: who has which parts of the tensors of a model, who needs which, and so what moves.

A rank has a flat range of its own tensor, and says where blocks of that tensor lie in those of the whole
model (an index calls that a place). Parts are compared in the order in which the elements of a block follow
each other: the range of a rank is an interval of that order, whatever the tensor around the block looks
like. So a part is (block, first, last), and two parts share an interval of the block that both blocks share.

Pure: integers and names only. recovery/transfer.py carries a plan out.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from operator import add, mul
from typing import Any, NamedTuple

from moe_ft.errors import PlanError

Dims = tuple[int, ...]
_PASSES = 4  # of balancing; more change nothing at 16,384 ranks


class Block(NamedTuple):
    """Block of a rank's tensor, and its place in a tensor of the model.

    Attributes:
        tensor: name of the tensor of the model, hashable.
        offset: of the block in the tensor of the model.
        start: of the block in the rank's tensor, which has `local_shape`.
    """

    tensor: Any
    offset: Dims
    extent: Dims
    local_shape: Dims
    start: Dims


class Part(NamedTuple):
    """Elements [first, last) of a block, in its own order; `owner`, hashable, has or needs them."""

    owner: Any
    block: Block
    first: int
    last: int


class Move(NamedTuple):
    """Elements [first, last) of the block that two parts share, from one to the other.

    Attributes:
        offset, extent: of the shared block, in the tensor of the model.
    """

    source: Part
    target: Part
    offset: Dims
    extent: Dims
    first: int
    last: int

    @property
    def num_elements(self) -> int:
        """Number of elements that move."""
        return self.last - self.first


class Box(NamedTuple):
    """Box of elements in a flat range: the index of its first element, its lengths and strides."""

    at: int
    lengths: Dims
    strides: Dims


def cut(owner: Any, blocks: Iterable[Block], start: int, end: int) -> Iterator[Part]:
    """Yield the parts of blocks that the flat range [start, end) of a rank's tensor has."""
    for block in blocks:
        first, last = (
            _count_before(_coordinates(flat, block.local_shape), block.start, block.extent)
            if block.extent
            else min(flat, 1)
            for flat in (start, end)
        )
        if first < last:
            yield Part(owner, block, first, last)


def boxes_of(move: Move, source_start: int, target_start: int) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of a move in the flat range that it comes from, and in the one that it goes to.

    Args:
        source_start, target_start: where the flat ranges begin in the tensors of their ranks.
    """
    for corner, lengths in _boxes(move.extent, move.first, move.last):
        at = tuple(map(add, corner, move.offset))
        yield (
            _box_in(move.source.block, at, lengths, source_start),
            _box_in(move.target.block, at, lengths, target_start),
        )


def runs_of(box: Box) -> Iterator[tuple[int, int]]:
    """Yield the ranges [first, last) that a box takes of the flat range, in order and as long as possible."""
    length, dims = 1, [*zip(box.lengths, box.strides, strict=True)]
    while dims and (dims[-1][1] == length or dims[-1][0] == 1):
        length *= dims.pop()[0]
    for index in product(*(range(size) for size, _ in dims)):
        first = box.at + sum(at * stride for at, (_, stride) in zip(index, dims, strict=True))
        yield first, first + length


def join_ranges(ranges: Iterable[tuple[int, int]], *, gap: int, most: int) -> list[tuple[int, int]]:
    """Return ranges in order, joined where no more than a gap is between them.

    Args:
        most: ranges to return at most; the gap is made larger until there are no more.
    """
    found = sorted(ranges)
    while True:
        joined: list[tuple[int, int]] = []
        for start, end in found:
            if joined and start <= joined[-1][1] + gap:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        if len(joined) <= most:
            return joined
        found, gap = joined, 2 * gap + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan[Place: Hashable]:
    """Moves by who needs them, each with the place that it is read from.

    Attributes:
        missing: by who needs them, the number of elements that nobody has.
        load: by place, the elements that it gives to others.
    """

    moves: Mapping[Hashable, Sequence[tuple[Place, Move]]]
    missing: Mapping[Hashable, int]
    load: Mapping[Place, int]


def plan_transfer[Place: Hashable](
    have: Iterable[Part],
    wanted: Iterable[Part],
    copies_of: Callable[[Any], Sequence[Place]],
    cost: Callable[[Place, Any], int],
    order: Callable[[Any], int],
) -> TransferPlan[Place]:
    """Plan what moves where. Each element that somebody has moves once to each who needs it.

    Args:
        copies_of: the places that keep what an owner has; not empty.
        cost: of a place for who needs something: 0 for its own node. The cheapest are taken, and shared out
            evenly.
        order: of an owner. Of several owners that have the same elements the least counts, so that no tensor
            is put together from copies that might differ.

    Raises:
        PlanError: if blocks of different owners overlap without being the same.
    """
    holdings = _Holdings(have, order)
    moves: dict[Hashable, list[tuple[Place, Move]]] = defaultdict(list)
    choices: list[tuple[Hashable, int, list[Place]]] = []
    missing: dict[Hashable, int] = defaultdict(int)
    load: dict[Place, int] = defaultdict(int)
    for target in wanted:
        rest = target.last - target.first
        for move in holdings.moves_to(target):
            rest -= move.num_elements
            costs = {place: cost(place, target.owner) for place in copies_of(move.source.owner)}
            cheapest = min(costs.values())
            places = [place for place, each in costs.items() if each == cheapest]
            place = min(places, key=load.__getitem__)
            if cheapest:
                load[place] += move.num_elements
                choices.append((target.owner, len(moves[target.owner]), places))
            moves[target.owner].append((place, move))
        if rest < 0:
            raise PlanError(f"{target.block.tensor}: some elements are in several blocks")
        if rest:
            missing[target.owner] += rest
    _balance(moves, choices, load)
    return TransferPlan(moves=moves, missing=missing, load=load)


def _balance[Place: Hashable](
    moves: Mapping[Hashable, list[tuple[Place, Move]]],
    choices: list[tuple[Hashable, int, list[Place]]],
    load: dict[Place, int],
) -> None:
    """Even out what places send, the largest moves first; each move stays whole."""
    choices.sort(key=lambda each: -moves[each[0]][each[1]][1].num_elements)
    for owner, number, places in choices * _PASSES:
        place, move = moves[owner][number]
        load[place] -= move.num_elements
        best = min(places, key=load.__getitem__)
        best = place if load[place] == load[best] else best
        load[best] += move.num_elements
        moves[owner][number] = best, move


class _Holdings:
    """Parts that exist of the tensors of a model, arranged for questions."""

    def __init__(self, parts: Iterable[Part], order: Callable[[Any], int]) -> None:
        cells: dict[Hashable, dict[tuple[Dims, Dims], list[Part]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for part in parts:
            cells[part.block.tensor][part.block.offset, part.block.extent].append(part)
        self._cells = {
            tensor: [_disjoint(found, order) for found in by_block.values()]
            for tensor, by_block in cells.items()
        }

    def moves_to(self, target: Part) -> Iterator[Move]:
        """Yield the moves that bring a part; their counts say whether some is missing."""
        for parts, firsts in self._cells.get(target.block.tensor, ()):
            low, high = 0, len(parts)
            if _is_same_block(parts[0].block, target.block):
                low = max(0, bisect_right(firsts, target.first) - 1)
                high = bisect_right(firsts, target.last - 1)
            for source in parts[low:high]:
                if (move := _share(source, target)) is not None:
                    yield move


def _disjoint(parts: list[Part], order: Callable[[Any], int]) -> tuple[list[Part], list[int]]:
    """Return disjoint parts of one block, and where they begin."""
    found: list[Part] = []
    end = 0
    for part in sorted(parts, key=lambda each: (each.first, -each.last, order(each.owner))):
        if part.last > end:
            found.append(part._replace(first=max(part.first, end)))
            end = part.last
    return found, [part.first for part in found]


def _is_same_block(one: Block, other: Block) -> bool:
    return one.offset == other.offset and one.extent == other.extent


def _share(source: Part, target: Part) -> Move | None:
    """Return what one part has of another; None for nothing."""
    ours, theirs = source.block, target.block
    if _is_same_block(ours, theirs):
        offset, extent = ours.offset, ours.extent
        first, last = max(source.first, target.first), min(source.last, target.last)
    else:
        offset = tuple(map(max, ours.offset, theirs.offset))
        ends = (
            min(a + b, c + d)
            for a, b, c, d in zip(
                ours.offset, ours.extent, theirs.offset, theirs.extent, strict=True
            )
        )
        extent = tuple(end - start for end, start in zip(ends, offset, strict=True))
        if min(extent, default=1) <= 0:
            return None
        both = (source, target)
        first = max(_within(each.block, each.first, offset, extent) for each in both)
        last = min(_within(each.block, each.last, offset, extent) for each in both)
    return Move(source, target, offset, extent, first, last) if first < last else None


def _within(block: Block, flat: int, offset: Dims, extent: Dims) -> int:
    """Return how many of the first elements of a block are in another one, which is part of it."""
    at = tuple(map(add, _coordinates(flat, block.extent), block.offset))
    return _count_before(at, offset, extent)


def _coordinates(flat: int, shape: Dims) -> Dims:
    """Return the coordinates of a flat index; at the end, the first one is the length."""
    found = []
    for size in shape[:0:-1]:
        flat, at = divmod(flat, size)
        found.append(at)
    return (flat, *found[::-1]) if shape else ()


def _count_before(at: Dims, offset: Dims, extent: Dims) -> int:
    """Return how many elements of a block come before some coordinates of the tensor around it."""
    count, inner = 0, prod(extent)
    for each, start, size in zip(at, offset, extent, strict=True):
        relative, inner = each - start, inner // size
        if relative < 0:
            return count
        if relative >= size:
            return count + size * inner
        count += relative * inner
    return count


def _boxes(extent: Dims, first: int, last: int) -> Iterator[tuple[Dims, Dims]]:
    """Yield the boxes (corner, lengths) that together are the elements [first, last) of a block."""
    if not extent:
        yield (), ()
        return
    rest = extent[1:]
    inner = prod(rest)
    (top, begin), (bottom, end) = divmod(first, inner), divmod(last, inner)

    def row(number: int, begin: int, end: int) -> Iterator[tuple[Dims, Dims]]:
        for at, lengths in _boxes(rest, begin, end):
            yield (number, *at), (1, *lengths)

    if top == bottom:
        yield from row(top, begin, end)
        return
    if begin:
        yield from row(top, begin, inner)
        top += 1
    if top < bottom:
        yield (top, *(0 for _ in rest)), (bottom - top, *rest)
    if end:
        yield from row(bottom, 0, end)


def _box_in(block: Block, at: Dims, lengths: Dims, start: int) -> Box:
    """Return a box at some coordinates of the model's tensor, in a flat range that begins at `start`."""
    shape = block.local_shape
    strides = tuple(accumulate((1, *shape[:0:-1]), mul))[::-1] if shape else ()
    corner = (
        own + each - outer for own, each, outer in zip(block.start, at, block.offset, strict=True)
    )
    return Box(sum(map(mul, corner, strides)) - start, lengths, strides)
