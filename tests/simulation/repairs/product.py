"""Parts of megatron/fault_tolerance/repair that simulated ranks use; nothing else here imports any of it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.meet import Membership, Position
from megatron.fault_tolerance.repair.watcher import STUCK_S, Deaths, Watcher, ending_after
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Member, Rounds
from tests.simulation.active import Patches

__all__ = ["STUCK_S", "Deaths", "Links", "Membership", "Position", "Watcher", "ending_after"]


class _Joining(SimpleNamespace):
    """A replacement until it has met the others."""

    def meet(self) -> None:
        """Be alone no longer."""
        self.is_alone = False


def membership_of(link: Link, rounds: Rounds) -> Membership:
    """Return that of a rank, which is the one of the running process."""
    joining = _Joining(is_alone=True) if link.is_replacement else None
    return Membership(link, rounds, joining)  # type: ignore[arg-type]


def links_of(link: Link, transport: Any) -> Links:
    """Return the links of a rank, which a simulated transport makes."""
    return Links((transport,))


def begin_round(links: Links, number: int) -> None:
    """Begin the round that a rank has joined, without links."""
    links.begin(number)


def members_of(membership: Membership) -> Sequence[Member]:
    """Return the members of the last round in which all have met."""
    return membership._members


def be_replaced_again(membership: Membership) -> None:
    """Put a mistake in: say in the next round, too, that the rank of this process has died."""
    membership._is_new = True


def hold_stops_against_threads(patches: Patches) -> None:
    """Put a mistake in: time in which a process did not run counts as a hang of its training thread."""
    patches.set(watchers, "_LONGEST_LOOK_S", float("inf"))


def position_at(iteration: int) -> Position:
    """Return the position of a loop that has begun an iteration."""
    return Position(
        iteration=iteration,
        consumed_train_samples=iteration,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        num_floating_point_operations_so_far=0.0,
        num_groups=1,
        do_train=True,
        do_valid=False,
        do_test=False,
        gathers_weights=False,
        evaluations_draw=False,
    )


def install(patches: Patches) -> None:
    """Have ranks know their number."""
    patches.divert(dist, "get_rank", lambda world, *_: int(world.process.environ["RANK"]))
