"""Repair in place, around Megatron's `train_step`: the loop calls it once and never knows.

This file holds the functions of Megatron that are wrapped, and the decision after an exception. If a rank has
died (noticing.py), a round of repairs runs (round.py). If another one dies meanwhile, all begin again in the
next round. Any other exception ends the process: the launcher restarts the job.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.training import get_args, training

from megatron.fault_tolerance.repair.batches import install_reading, training_batches
from megatron.fault_tolerance.repair.catching_up import CatchingUp
from megatron.fault_tolerance.repair.evaluating_again import EvaluatingAgain
from megatron.fault_tolerance.repair.gathered import Gathered
from megatron.fault_tolerance.repair.groups import Groups
from megatron.fault_tolerance.repair.joining import Joining, change_timeout
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.membership import Membership
from megatron.fault_tolerance.repair.noticing import MAY_MEAN_DEATH, Noticing
from megatron.fault_tolerance.repair.phases import Phases
from megatron.fault_tolerance.repair.position import position_of
from megatron.fault_tolerance.repair.recipes import Recipes
from megatron.fault_tolerance.repair.results import KeptResult
from megatron.fault_tolerance.repair.round import RoundRunner
from megatron.fault_tolerance.repair.skipped_evaluations import SkippedEvaluations
from megatron.fault_tolerance.repair.step import Step
from megatron.fault_tolerance.repair.together import Together
from megatron.fault_tolerance.repair.watcher import Watcher
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import RepairError
from moe_ft.keeper import job_store
from moe_ft.keeper.heartbeat import Heart
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Rounds
from moe_ft.loop.listeners import Built, Listeners

Function = Callable[..., Any]


class RepairSeam:
    """Repairs of one rank in one start. Owned by the training thread."""

    def __init__(
        self,
        link: Link,
        listeners: Listeners,
        store: Any,
        rounds: Rounds,
        watcher: Watcher,
        links: Links,
        heart: Heart,
    ) -> None:
        """Prepare.

        Args:
            link: to the zygote.
            listeners: of the loop.
            store: of the job.
            rounds: over a connection of the training thread.
            watcher: over another one; it ends `links`.
            links: of the groups.
            heart: begins to beat when this rank can be replaced.
        """
        self._link, self._listeners, self._heart = link, listeners, heart
        self._watcher, self._links, self._recipes = watcher, links, Recipes()
        self._groups = Groups(links.transports, self._recipes)
        self._together = Together(links, self._recipes)
        self._batches, self._evaluations = training_batches(), SkippedEvaluations()
        self._kept = KeptResult(listeners.loop)
        self._store = store
        self._gathered = Gathered(
            SignedStore(store, lambda: link.token), is_replacement=link.is_replacement
        )
        self._joining = Joining(self._recipes) if link.is_replacement else None
        self._membership = Membership(link, rounds, self._joining)
        self._noticing = Noticing(link, rounds, self._membership, watcher, links)
        self._evaluating_again = EvaluatingAgain(
            watcher, self._together, self._noticing.notice_or_raise, self._repair_evaluation
        )
        self._runner = RoundRunner(
            link=link,
            listeners=listeners,
            membership=self._membership,
            groups=self._groups,
            links=links,
            store=store,
            batches=self._batches,
            catching_up=CatchingUp(listeners, watcher, links, self._evaluations),
        )
        self._step: Step | None = None  # of the last iteration that has begun

    @contextmanager
    def below_hooks(self) -> Iterator[None]:
        """Wrap what the hooks of the listeners wrap after it."""
        with Patches() as patches:
            self._batches.install(patches)
            install_reading(patches)
            self._evaluations.install(patches)
            self._together.install(patches)
            patches.wrap(dist, "init_process_group", self._record)
            patches.wrap(dist, "new_group", self._record)
            patches.wrap(training, "setup_model_and_optimizer", self._set_up)
            patches.wrap(training, "train_step", self._finish_together)
            patches.wrap(training, "update_pg_timeout", change_timeout)
            with nullcontext() if self._joining is None else self._joining.installed():
                yield

    @contextmanager
    def above_hooks(self) -> Iterator[None]:
        """Wrap the hooks of the listeners."""
        with Patches() as patches:
            patches.wrap(training, "train_step", self._train_step)
            patches.wrap(training, "train", self._train)
            self._evaluating_again.install(patches)
            self._watcher.start()
            try:
                yield
            finally:
                self._link.disarm()
                self._heart.close()
                self._watcher.close()

    def after_setup(self, built: Built, iteration: int) -> None:
        """Have the listeners set up; a replacement only learns where the others are, and does it later."""
        self._runner.built = built
        if self._joining is None:
            self._listeners.after_setup(built, iteration)
        else:
            self._join_survivors(self._joining)

    def _join_survivors(self, joining: Joining) -> None:
        """Bring this replacement to where the survivors are.

        Raises:
            RepairError: if they do not come, or have other process groups.
        """
        position = self._membership.wait_for_survivors()
        if position.num_groups != self._groups.num_made:
            raise RepairError(
                f"the others have made {position.num_groups} process groups, and this replacement "
                f"{self._groups.num_made}"
            )
        position.set_counters(get_args())
        joining.gathers_weights = position.gathers_weights
        joining.leaves_out_log = position.is_evaluated
        self._evaluations.draw = position.evaluations_draw

    def _record(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self._links.recording():
            return self._recipes.make(original, *args, **kwargs)

    def _set_up(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if not self._link.is_replacement:
            self._share_token()
        with self._gathered.installed():
            result = original(*args, **kwargs)
        self._together.prepare()
        self._groups.note()
        return result

    def _share_token(self) -> None:
        """Learn the token from rank 0, which has it from its zygote. Called by all ranks, at their start.

        Raises:
            RepairError: if this rank uses another store than rank 0.
        """
        tokens: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(tokens, self._link.token)
        self._link.token = tokens[0]
        job_store.check_owner(self._store, os.environ, tokens[0])

    def _finish_together(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Leave an iteration when all ranks have finished it: outside of it nothing is repaired."""
        result = original(*args, **kwargs)
        self._together.finish()
        return result

    def _train(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except MAY_MEAN_DEATH as error:
            if self._link.is_armed and self._noticing.notice(error) is not None:
                raise RepairError(
                    "a rank has died between two iterations, where only some evaluations are repaired"
                ) from error
            raise
        finally:
            self._link.disarm()

    def _train_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run an iteration; repair if a rank dies in it. A replacement begins with a repair."""
        step, iteration = Step(original, args, kwargs, self._kept), kwargs["iteration"]
        self._step = step
        if self._membership.is_survivor:
            self._note_position(step, iteration)
            try:
                with self._watcher.inside():
                    result = step.run(iteration)
            except BaseException as error:
                phases = self._noticing.notice_or_raise(error)
            else:
                self._become_replaceable()
                return result
        else:
            assert self._link.died_s is not None
            phases = Phases(self._link.died_s)
        # Not while the exception is handled: its frames hold what the iteration leaves.
        self._become_replaceable()
        return self._repair_until_finished(step, iteration, phases)

    def _note_position(self, step: Step, iteration: int) -> None:
        """Note where the loop is, for a replacement."""
        self._membership.position = position_of(
            get_args(),
            iteration,
            num_groups=self._groups.num_made,
            model=step.parts.model,
            evaluations_draw=self._evaluations.draw,
        )

    def _become_replaceable(self) -> None:
        """Have this rank replaced if it dies or hangs from now on: there is something to recover."""
        self._link.arm()
        self._heart.start()

    def _repair_evaluation(self, phases: Phases) -> None:
        """Repair, and run the iteration again whose evaluation was broken off.

        A replacement finishes that iteration in its `train_step`.
        """
        position = self._membership.position
        assert self._step is not None and position is not None
        self._membership.position = replace(position, is_evaluated=True)
        self._repair_until_finished(self._step, position.iteration, phases)

    def _repair_until_finished(self, step: Step, iteration: int, phases: Phases) -> Any:
        """Repair, also what dies during that. Called by all ranks, in the same iteration."""
        while True:
            try:
                return self._runner.run(step, iteration, phases)
            except BaseException as error:
                phases = self._noticing.notice_or_raise(error, Exception)
