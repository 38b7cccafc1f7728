"""A round of repairs on this rank: phases from the iteration that was broken off to its result.

    free       the iteration has ended with an exception; what it leaves is removed (leftovers.py)
    build      instead, in a replacement: it has been set up alone (joining.py)
    meet       with all other ranks (membership.py)
    swap       new backends under the process groups (groups.py)
    recover    the listeners set up again, which recovers a state
    catch_up   iterations run until the broken one is finished (catching_up.py)

Each ends by itself or by a deadline. seam.py says when a round begins, and what follows if one fails.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from megatron.fault_tolerance.repair import leftovers
from megatron.fault_tolerance.repair.batches import Batches
from megatron.fault_tolerance.repair.catching_up import CatchingUp
from megatron.fault_tolerance.repair.deadline import ending_after
from megatron.fault_tolerance.repair.groups import Groups
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.membership import Membership
from megatron.fault_tolerance.repair.phases import Phases
from megatron.fault_tolerance.repair.results import most_iteration
from megatron.fault_tolerance.repair.step import Step
from megatron.fault_tolerance.repair.watcher import STUCK_S
from megatron.fault_tolerance.seams.loop_facts import timeout_of_groups_s
from moe_ft.errors import ConfigError, RepairError, UnrecoverableError
from moe_ft.keeper.link import Link
from moe_ft.loop.listeners import Built, Listeners, Repair
from moe_ft.loop.training_loop import LoopParts
from moe_ft.saying import say

_CONNECT_S = 30.0  # for all ranks to make the connections of a group
_REPAIR_S = 600.0  # without progress, until training runs again


class RoundRunner:
    """Runner of all rounds of a start, one after the other. Owned by the training thread.

    Attributes:
        built: model, optimizer and scheduler; None until they have been built.
    """

    def __init__(
        self,
        *,
        link: Link,
        listeners: Listeners,
        membership: Membership,
        groups: Groups,
        links: Links,
        store: Any,
        batches: Batches,
        catching_up: CatchingUp,
    ) -> None:
        """Prepare.

        Args:
            link: to the zygote.
            listeners: of the loop.
            membership: of this rank.
            groups: that get new backends.
            links: of the groups.
            store: of the job.
            batches: of training.
            catching_up: runs iterations.
        """
        self.built: Built | None = None
        self._link, self._listeners, self._membership = link, listeners, membership
        self._groups, self._links, self._store = groups, links, store
        self._batches, self._catching_up = batches, catching_up

    def run(self, step: Step, iteration: int, phases: Phases) -> Any:
        """Repair, and return the result of the broken iteration. Called by all ranks.

        Args:
            step: the call that was broken off, or that a replacement makes.
            iteration: that was broken off.
            phases: begun with the death.

        Raises:
            Exception: anything, if another rank dies meanwhile.
            RepairError: if the job cannot be repaired.
        """
        # Others may wait in a collective, with its timeout, for the rank that reads most.
        minutes = get_args().distributed_timeout_minutes
        with ending_after(max(_REPAIR_S, 60 * minutes + STUCK_S), self._link):
            self._leave(step.parts, iteration)
            phases.end("free" if self._membership.is_survivor else "build")
            self._membership.meet()
            phases.begin_with(self._membership.died_s)
            self._membership.wait_until_ready()
            phases.end("meet")
            self._swap()
            phases.end("swap")
            first = self._recover(step.parts)
            phases.end("recover")
        result = self._catching_up.run(step, first, iteration, self._membership.survivors_position)
        self._groups.set_timeout(timedelta(seconds=timeout_of_groups_s(get_args())))
        phases.end("catch_up")
        self._membership.finish()
        self._report(iteration, first, phases)
        return result

    def _leave(self, parts: LoopParts, iteration: int) -> None:
        """Clean what the broken iteration has left; a replacement has no groups to drop."""
        self._links.leave()
        self._listeners.suspend(iteration)
        leftovers.clean(parts.model, parts.optimizer, iteration)
        if self._membership.is_survivor:
            self._groups.drop_others()

    def _swap(self) -> None:
        """Put new backends under all groups. Called by all ranks."""
        number = self._membership.round
        self._links.begin(number)
        with self._links.recording():
            # A rank may die meanwhile, and nobody can end a wait for its address.
            self._groups.swap(self._store, number, timedelta(seconds=_CONNECT_S))
        self._groups.set_timeout(timedelta(minutes=get_args().distributed_timeout_minutes))

    def _recover(self, parts: LoopParts) -> int:
        """Recover a state, renew the data, and return the iteration that runs next. Called by all ranks."""
        assert self.built is not None
        args = get_args()
        self._listeners.loop.most_iteration = most_iteration(self._membership.positions, args)
        try:
            self._listeners.after_setup(self.built, args.iteration)
        except (ConfigError, UnrecoverableError) as error:
            # This is no refusal of the job: another start may do better.
            raise RepairError(f"a repair found no state to continue from: {error}") from error
        self._batches.renew(parts.data_iterator)
        self._listeners.begin_training(parts)
        return int(args.iteration)

    def _report(self, iteration: int, recovered: int, phases: Phases) -> None:
        dead = self._membership.dead
        repair = Repair(
            number=self._membership.round,
            iteration=iteration,
            recovered=recovered,
            dead=dead,
            hung_s=self._membership.hung_s,
            is_replacement=dist.get_rank() in dead,
            phases_s=phases.seconds,
        )
        self._listeners.after_repair(repair)
        if dist.get_rank() == 0:
            say(_end_of(repair))


def _end_of(repair: Repair) -> str:
    """Return a line for people. They count iterations from 1, as log lines do."""
    names = ("rank " if len(repair.dead) == 1 else "ranks ") + ", ".join(map(str, repair.dead))
    return (
        f"{names} replaced in {sum(repair.phases_s.values()):.1f} s, and iteration "
        f"{repair.iteration + 1} finished: no other rank was restarted"
    )
