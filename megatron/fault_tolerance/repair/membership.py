"""Membership of this rank in the rounds of repairs: which one it is in, with whom, and where its loop stands.

moe_ft/keeper/rounds.py has the rounds themselves, in the job's store.
"""

from collections.abc import Sequence

import torch.distributed as dist

from megatron.fault_tolerance.repair.joining import Joining
from megatron.fault_tolerance.repair.position import (
    Position,
    position_of_survivors,
    positions_of,
)
from moe_ft.errors import RepairError
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Member, Rounds

_MEETING_S = (
    180.0  # for the slowest rank to leave its fence and iteration, and the replacement to be built
)


class Membership:
    """One rank in the rounds of a start. Owned by the training thread.

    Attributes:
        round: number of the round that this rank has joined last; 0 is the start.
        position: of the loop when its last iteration began; None before that. A replacement has that of the
            survivors at first.
    """

    def __init__(self, link: Link, rounds: Rounds, joining: Joining | None) -> None:
        """Begin in the round that a replacement has joined before it was built, or in the start.

        Args:
            link: to the zygote.
            rounds: over a connection of the training thread.
            joining: of a replacement; None for the first process of a rank.
        """
        self.round = link.round
        self.position: Position | None = None
        self._link, self._rounds, self._joining = link, rounds, joining
        self._members: Sequence[Member] = ()  # of the last round in which all have met
        self._is_new = link.is_replacement  # until an iteration has been finished

    @property
    def is_survivor(self) -> bool:
        """True unless this process has still to take the place of a rank that has died."""
        return self._joining is None or not self._joining.is_alone

    @property
    def survivors_position(self) -> Position:
        """Position of the survivors' loop; see `position_of_survivors`."""
        return position_of_survivors(self._members)

    @property
    def positions(self) -> Sequence[Position]:
        """Positions of the members that know where their loop is."""
        return positions_of(self._members)

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks that are replaced in this round."""
        return tuple(each.rank for each in self._members if each.died_s is not None)

    @property
    def died_s(self) -> float:
        """Time since 1970 when the first of them died."""
        return min(each.died_s for each in self._members if each.died_s is not None)

    @property
    def hung_s(self) -> dict[int, float]:
        """Seconds for which ranks had hung that were killed for it, by rank."""
        return {each.rank: each.hung_s for each in self._members if each.hung_s}

    def wait_for_survivors(self) -> Position:
        """Return where the survivors are, in the round that this replacement has joined or in a later one.

        Raises:
            RepairError: if they do not come, or there are none.
        """
        while True:
            try:
                self._members = self._rounds.wait_for_all(self.round, _MEETING_S)
                break
            except RepairError:
                if not self._rounds.is_declared(self.round + 1):
                    raise
                self._join_next()  # the one before is broken
        self.position = self.survivors_position
        return self.position

    def meet(self) -> None:
        """Meet the others in the round that was declared; a replacement has met them. Called by all ranks.

        Raises:
            RepairError: if some do not come, the round is broken, or the members do not fit together.
        """
        if self._joining is not None and self._joining.is_alone:
            self._joining.meet()
        else:
            self._join_next()
            self._members = self._rounds.wait_for_all(self.round, _MEETING_S)
        position_of_survivors(self._members)  # raises if they do not fit together

    def _join_next(self) -> None:
        """Take part in the next round, which was declared."""
        link = self._link
        member = Member(
            rank=dist.get_rank(),
            died_s=link.died_s if self._is_new else None,
            hung_s=link.predecessor_hung_s if self._is_new else 0.0,
            facts={} if self.position is None else self.position.facts(),
        )
        self.round += 1
        self._rounds.join(self.round, member)

    def wait_until_ready(self) -> None:
        """Wait until all members can make connections. Called by all ranks.

        Raises:
            RepairError: if some cannot in time, or the round is broken.
        """
        self._rounds.wait_until_ready(self.round, _MEETING_S)

    def finish(self) -> None:
        """Note that the broken iteration is finished: from now on this rank is like any other."""
        self._rounds.finish(self.round)
        self._is_new = False
