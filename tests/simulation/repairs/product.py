"""Parts of megatron/fault_tolerance/repair that simulated ranks use; nothing else here imports any of it."""

from typing import Any

from megatron.fault_tolerance.repair import watcher
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.meet import Membership, Position, Role
from megatron.fault_tolerance.repair.watcher import STUCK_S, Deaths, Watcher, ending_after
from moe_ft.keeper.link import Link
from tests.simulation.active import Patches

__all__ = ["STUCK_S", "Deaths", "Links", "Membership", "Position", "Watcher", "ending_after"]


def links_of(link: Link, transport: Any) -> Links:
    return Links(link, (transport,))


def be_replaced_again(membership: Membership) -> None:
    """Put a mistake in: say in the next round, too, that the rank of this process has died."""
    membership.role = Role.JOINED


def hold_stops_against_threads(patches: Patches) -> None:
    """Put a mistake in: time in which a process did not run counts as a hang of its training thread."""
    patches.set(watcher, "_LONGEST_LOOK_S", float("inf"))


def position_at(iteration: int) -> Position:
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
