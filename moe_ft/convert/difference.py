"""Differences between two states: which units differ, by how much, and how old each is.

Tensors of the whole model are compared, so the layouts of the two runs may differ. Two of them at a time are
in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from moe_ft.convert.source import RunState
from moe_ft.convert.tensors import GlobalTensor, find_tensors, read_tensor
from moe_ft.tables import table
from moe_ft.units import UnitId


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference of one unit in one kind of its tensors.

    Attributes:
        kind: "weight", "master" or the name of a moment.
        iterations: of the oldest tensor in the first and in the second state, -1 where there is none.
        numel: elements that both states have.
        num_different: those whose bits differ.
        largest: greatest absolute difference, infinite for a NaN that only one of them has.
        relative: norm of the difference divided by that of the first state's tensors; 0 for none.
        problem: why tensors cannot be compared; empty if they can.
    """

    unit: UnitId
    kind: str
    iterations: tuple[int, int]
    numel: int = 0
    num_different: int = 0
    largest: float = 0.0
    relative: float = 0.0
    problem: str = ""

    @property
    def is_equal(self) -> bool:
        """True if all bits are the same."""
        return not self.problem and not self.num_different


def compare(first: RunState, second: RunState, *, with_optimizer: bool) -> Iterator[Difference]:
    """Yield the differences of all units, equal ones included, in their order."""
    sources = (first, second)
    tensors = [{each.name: each for each in find_tensors(source)} for source in sources]
    names = {name: each.unit for found in tensors for name, each in found.items()}
    by_group: dict[tuple[UnitId, str], list[str]] = {}
    for name, unit in names.items():
        kinds = {kind for found in tensors if name in found for kind in found[name].iterations}
        for kind in kinds if with_optimizer else kinds & {"weight"}:
            by_group.setdefault((unit, kind), []).append(name)
    for (unit, kind), group in sorted(by_group.items()):
        pairs = [(tensors[0].get(name), tensors[1].get(name)) for name in sorted(group)]
        yield _of_unit(sources, unit, kind, pairs)


def _of_unit(
    sources: tuple[RunState, RunState],
    unit: UnitId,
    kind: str,
    pairs: Sequence[tuple[GlobalTensor | None, GlobalTensor | None]],
) -> Difference:
    numel = num_different = 0
    largest = squares = all_squares = 0.0
    problem = ""
    for pair in pairs:
        if problem := problem or _problem(kind, pair):
            continue
        a, b = (
            read_tensor(source, each, kind)
            for source, each in zip(sources, pair, strict=True)
            if each is not None
        )
        numel += a.numel()
        num_different += _num_different(a, b)
        a, b = a.double(), b.double()
        difference = torch.where(a == b, 0.0, a - b).nan_to_num(nan=torch.inf, posinf=torch.inf)
        difference[a.isnan() & b.isnan()] = 0.0
        largest = max(largest, float(difference.abs().max()) if a.numel() else 0.0)
        squares += float(difference.square().sum())
        all_squares += float(a.square().sum())
    return Difference(
        unit=unit,
        kind=kind,
        iterations=(_oldest(kind, pairs, 0), _oldest(kind, pairs, 1)),
        numel=numel,
        num_different=num_different,
        largest=largest,
        relative=(squares / all_squares) ** 0.5 if all_squares else float(squares > 0),
        problem=problem,
    )


def _num_different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many elements do not have the same bits; of other types, not the same value."""
    if a.dtype == b.dtype and a.is_floating_point():
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.view(integer), b.view(integer)
    return int((a != b).sum())


def _problem(kind: str, pair: tuple[GlobalTensor | None, GlobalTensor | None]) -> str:
    """Return why two tensors cannot be compared, or nothing."""
    name = next(each.name for each in pair if each is not None)
    for place, each in zip(("first", "second"), pair, strict=True):
        if each is None or kind not in each.iterations:
            return f"the {place} has no {kind} of {name}"
    a, b = pair
    assert a is not None and b is not None
    if a.shape != b.shape:
        return f"{name} has the shapes {a.shape} and {b.shape}"
    return ""


def _oldest(
    kind: str, pairs: Iterable[tuple[GlobalTensor | None, GlobalTensor | None]], place: int
) -> int:
    found = (pair[place] for pair in pairs)
    ages = [each.iterations[kind] for each in found if each is not None and kind in each.iterations]
    return min(ages, default=-1)


def render(differences: Sequence[Difference]) -> str:
    """Return a table of the units that differ, and a line on the others."""
    rows = [
        (
            str(each.unit),
            each.kind,
            *("-" if at < 0 else at for at in each.iterations),
            each.problem or f"{each.num_different:,} of {each.numel:,}",
            "" if each.problem else f"{each.largest:.3g}",
            "" if each.problem else f"{each.relative:.3g}",
        )
        for each in differences
        if not each.is_equal
    ]
    headers = ("unit", "kind", "iteration A", "iteration B", "elements", "largest", "relative")
    num_equal = len(differences) - len(rows)
    line = f"{num_equal} of {len(differences)} units and kinds are equal, bit for bit"
    return "\n".join([table(rows, headers), "", line] if rows else [line])
