"""Opinions on results of an iteration: who computes whose micro-batches again, and who of them is wrong.

The data-parallel ranks of a job are replicas of the model: ranks at the same place in two replicas compute
the same from the same micro-batches. In a run with shift k each replica computes the micro-batches of the
k-th one after it, in a ring. Places in groups of tensor, context, expert and pipeline parallelism stay, so
no sum has another order.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from moe_ft.planning.lost_ranks import Layout


def replica_of(layout: Layout, rank: int) -> int:
    """Return the replica of a rank."""
    return rank // layout.group_size % layout.num_groups


def ranks_of(layout: Layout, replica: int) -> list[int]:
    """Return the ranks of a replica, stage by stage."""
    size = layout.group_size
    firsts = [(stage * layout.num_groups + replica) * size for stage in range(layout.num_stages)]
    return [first + place for first in firsts for place in range(size)]


def shifted(layout: Layout, rank: int, by: int) -> int:
    """Return the rank at the same place of another replica, so many further in the ring."""
    replica = replica_of(layout, rank)
    further = (replica + by) % layout.num_groups
    return rank + (further - replica) * layout.group_size


def shifts_of(layout: Layout) -> tuple[int, ...]:
    """Return the shifts of all runs that decide who is wrong, the first two of which are a check.

    Three replicas are three opinions. Two have two each: what happened once has three against it. One alone
    repeats itself.
    """
    if layout.num_groups > 2:
        return 0, 1, 2
    return (0, 1, 0, 1) if layout.num_groups == 2 else (0, 0, 0)


class IterationPart(IntEnum):
    """Parts of an iteration in the order in which a mistake in one reaches the next."""

    FORWARD = 0
    BACKWARD = 1
    REST = 2  # losses, buffers, random numbers


class Depth(NamedTuple):
    """Place of a difference: the least one among ranks is where a mistake has come in.

    Attributes:
        stage: virtual pipeline stage; backward passes count down.
        number: of the module or parameter in it; backward likewise.
    """

    part: IterationPart
    stage: int = 0
    number: int = 0


def right_run(opinions: Sequence[Hashable]) -> int | None:
    """Return a run whose result more than half of the runs have; None if there is none."""
    most, count = Counter(opinions).most_common(1)[0]
    return opinions.index(most) if 2 * count > len(opinions) else None


def of_replica(
    layout: Layout, digests: Sequence[Sequence[Hashable]], replica: int
) -> list[Hashable]:
    """Return ``[run]`` the results for a replica's micro-batches, each of all its ranks together.

    Args:
        digests: ``[rank][run]`` of the results for the rank's own micro-batches.
    """
    return [*zip(*(digests[rank] for rank in ranks_of(layout, replica)), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accused:
    """Ranks that have computed wrongly, or may have.

    Attributes:
        depths: where each has, by rank.
        is_decided: whether most runs agree that these ranks were wrong.
    """

    depths: Mapping[int, Depth]
    is_decided: bool


def accused(
    layout: Layout,
    digests: Sequence[Sequence[Hashable]],
    depths: Sequence[Mapping[int, Depth]],
) -> Accused:
    """Return who has computed otherwise than most, where a mistake has come in first.

    Where no run has a majority, nobody knows: both computers of a difference may be wrong.

    Args:
        digests: as `of_replica` takes them.
        depths: ``[rank]`` by run, where the first difference to the right run lies, or to the first one
            without a majority. A rank whose results do not differ has none.
    """
    found: dict[int, Depth] = {}
    is_decided = True
    for replica in range(layout.num_groups):
        opinions = of_replica(layout, digests, replica)
        right = right_run(opinions)
        is_decided &= right is not None
        for run, shift in enumerate(shifts_of(layout)):
            of_ranks = {r: depths[r][run] for r in ranks_of(layout, replica) if run in depths[r]}
            first = min(of_ranks.values(), default=None)
            for rank in (rank for rank, depth in of_ranks.items() if depth == first):
                for each in {shifted(layout, rank, -shift), *([rank] if right is None else [])}:
                    found[each] = min(of_ranks[rank], found.get(each, of_ranks[rank]))
    return Accused(depths=found, is_decided=is_decided)
