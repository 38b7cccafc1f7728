"""Opinions on results of an iteration: who computes whose micro-batches again, and who of them is wrong.

The data-parallel ranks of a job are replicas of the model: ranks at the same place in two replicas compute
the same from the same micro-batches. In a run with shift k each replica computes the micro-batches of the
k-th one after it, in a ring. Places in groups of tensor, context, expert and pipeline parallelism stay, so
no sum has another order.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Replicas of the model in a job.

    Attributes:
        tp, cp, ep, expert_tp: sizes of groups; those of experts are 1 without.
        num_stages: pipeline stages.
        is_stage_inner: whether ranks of one replica follow each other in all stages
            (--use-tp-pp-dp-mapping), or those of one stage.
    """

    world_size: int
    num_stages: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    is_stage_inner: bool = False

    @property
    def size(self) -> int:
        """Ranks of a replica in each stage: whole groups of both kinds of parameters."""
        return math.lcm(self.tp * self.cp, self.ep * self.expert_tp)

    @property
    def count(self) -> int:
        """Number of replicas."""
        return self.world_size // (self.num_stages * self.size)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the replica of a rank, its stage, and its number among the ranks of both."""
        if self.is_stage_inner:
            rest, within = divmod(rank, self.size)
            replica, stage = divmod(rest, self.num_stages)
        else:
            stage, local = divmod(rank, self.count * self.size)
            replica, within = divmod(local, self.size)
        return replica, stage, within

    def rank_at(self, replica: int, stage: int, within: int) -> int:
        """Return the rank at a place; replicas are counted in a ring."""
        replica %= self.count
        if self.is_stage_inner:
            return (replica * self.num_stages + stage) * self.size + within
        return (stage * self.count + replica) * self.size + within

    def shifted(self, rank: int, by: int) -> int:
        """Return the rank at the same place of another replica, so many further."""
        replica, stage, within = self.place(rank)
        return self.rank_at(replica + by, stage, within)

    def ranks_of(self, replica: int) -> list[int]:
        """Return the ranks of a replica, stage by stage."""
        return [
            self.rank_at(replica, stage, within)
            for stage in range(self.num_stages)
            for within in range(self.size)
        ]

    def shifts(self) -> tuple[int, ...]:
        """Return the shifts of all runs that decide who is wrong, the first two of which are a check.

        Three replicas are three opinions. Two have two each: what happened once has three against it. One
        alone repeats itself.
        """
        if self.count > 2:
            return 0, 1, 2
        return (0, 1, 0, 1) if self.count == 2 else (0, 0, 0)


class Part(IntEnum):
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

    part: Part
    stage: int = 0
    number: int = 0


def right_run(opinions: Sequence[Hashable]) -> int | None:
    """Return a run whose result more than half of the runs have; None if there is none."""
    most, count = Counter(opinions).most_common(1)[0]
    return opinions.index(most) if 2 * count > len(opinions) else None


def of_replica(
    replicas: Replicas, digests: Sequence[Sequence[Hashable]], replica: int
) -> list[Hashable]:
    """Return ``[run]`` the results for a replica's micro-batches, each of all its ranks together.

    Args:
        digests: ``[rank][run]`` of the results for the rank's own micro-batches.
    """
    return [*zip(*(digests[rank] for rank in replicas.ranks_of(replica)), strict=True)]


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
    replicas: Replicas,
    digests: Sequence[Sequence[Hashable]],
    depths: Mapping[int, Mapping[int, Depth]],
) -> Accused:
    """Return who has computed otherwise than most, where a mistake has come in first.

    Where no run has a majority, nobody knows: both computers of a difference may be wrong.

    Args:
        digests: as `of_replica` takes them.
        depths: by rank and run, where the first difference to the right run lies, or to the first one
            without a majority. A rank whose results do not differ has none.
    """
    found: dict[int, Depth] = {}
    is_decided = True
    for replica in range(replicas.count):
        opinions = of_replica(replicas, digests, replica)
        right = right_run(opinions)
        is_decided &= right is not None
        for run, shift in enumerate(replicas.shifts()):
            of_ranks = {r: depths[r][run] for r in replicas.ranks_of(replica) if run in depths[r]}
            first = min(of_ranks.values(), default=None)
            for rank in (rank for rank, depth in of_ranks.items() if depth == first):
                for each in {replicas.shifted(rank, -shift), *([rank] if right is None else [])}:
                    found[each] = min(of_ranks[rank], found.get(each, of_ranks[rank]))
    return Accused(depths=found, is_decided=is_decided)
