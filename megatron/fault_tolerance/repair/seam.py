"""Repair in place, around Megatron's `train_step`: the loop calls it once and never knows.

When a rank dies, every survivor's iteration ends with an exception. What it leaves is cleaned (leftovers.py),
the ranks meet (moe_ft/keeper/rounds.py), process groups get new backends (groups.py), the listeners set up
again, which recovers a state, and iterations run until the one that was broken off is finished. Each phase
ends by itself or by a deadline. If a rank dies meanwhile, all begin again in the next round. Any other
exception during a repair ends the process: the launcher restarts the job.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.training import get_args, training

from megatron.fault_tolerance.repair import leftovers
from megatron.fault_tolerance.repair.batches import Batches
from megatron.fault_tolerance.repair.evaluating import Evaluating
from megatron.fault_tolerance.repair.evaluations import Evaluations
from megatron.fault_tolerance.repair.gathered import Gathered
from megatron.fault_tolerance.repair.groups import Groups
from megatron.fault_tolerance.repair.joining import Joining, change_timeout
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.phases import Phases
from megatron.fault_tolerance.repair.position import (
    Position,
    begin_iteration,
    count_iteration,
    position_of,
    position_of_survivors,
)
from megatron.fault_tolerance.repair.results import KeptResult, can_be_kept
from megatron.fault_tolerance.repair.step import Step
from megatron.fault_tolerance.repair.watcher import STUCK_S, Watcher
from megatron.fault_tolerance.seams.listeners import Built, Listeners, Repair
from megatron.fault_tolerance.seams.loop_facts import timeout_of_groups_s
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.training_loop import LoopParts
from moe_ft.errors import ConfigError, RepairError, SnapshotError, UnrecoverableError
from moe_ft.keeper.heartbeat import Heart
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Member, Rounds

_NOTICE_S = 5.0  # from an exception until the keeper has said that a rank died
_MEETING_S = 120.0  # for the slowest rank to leave its iteration, and the replacement to be built
_CONNECT_S = 30.0  # for all ranks to make the connections of a group
_REPAIR_S = 600.0  # until training runs again; groups have shorter timeouts of their own

# Gloo and torch.distributed raise the first, the engine's threads the other.
_MAY_MEAN_DEATH = (RuntimeError, SnapshotError)

Function = Callable[..., Any]


class RepairSeam:
    """One rank's part in all repairs of a start. Owned by the training thread."""

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
        self._link, self._listeners, self._store = link, listeners, store
        self._rounds, self._watcher, self._links = rounds, watcher, links
        self._heart = heart
        self._groups, self._batches = Groups(), Batches()
        self._kept = KeptResult(listeners.loop)
        self._evaluations = Evaluations()
        self._gathered = Gathered(store, is_replacement=link.is_replacement)
        self._joining = Joining() if link.is_replacement else None
        self._evaluating = Evaluating(watcher, self._notice_between, self._repair_between)
        self._step: Step | None = None  # of the last iteration that has begun
        self._built: Built | None = None
        self._round = link.round
        self._members: list[Member] = []
        self._position: Position | None = None  # of the loop when its last iteration began
        self._is_new = link.is_replacement  # until an iteration has been finished

    @contextmanager
    def below_hooks(self) -> Iterator[None]:
        """Wrap what the hooks of the listeners wrap after it."""
        with Patches() as patches:
            self._batches.install(patches)
            self._evaluations.install(patches)
            patches.wrap(dist, "init_process_group", self._record)
            patches.wrap(dist, "new_group", self._record)
            patches.wrap(training, "setup_model_and_optimizer", self._set_up)
            patches.wrap(training, "train_step", self._finish_together)
            patches.wrap(training, "update_pg_timeout", change_timeout)
            if self._joining is None:
                yield
            else:
                with self._joining.installed():
                    yield

    @contextmanager
    def above_hooks(self) -> Iterator[None]:
        """Wrap the hooks of the listeners."""
        with Patches() as patches:
            patches.wrap(training, "train_step", self._train_step)
            patches.wrap(training, "train", self._train)
            self._evaluating.install(patches)
            self._watcher.start()
            try:
                yield
            finally:
                self._link.disarm()
                self._heart.close()
                self._watcher.close()

    def after_setup(self, built: Built, iteration: int) -> None:
        """Have the listeners set up; a replacement only learns where the others are, and does it later."""
        self._built = built
        if self._joining is None:
            self._listeners.after_setup(built, iteration)
            return
        self._members = self._wait_for_survivors()
        position = position_of_survivors(self._members)
        if position.num_groups != self._groups.num_made:
            raise RepairError(
                f"the others have made {position.num_groups} process groups, and this replacement "
                f"{self._groups.num_made}"
            )
        position.set_counters(get_args())
        self._joining.gathers_weights = position.gathers_weights
        self._evaluations.draw = position.evaluations_draw
        self._joining.leaves_out_log = position.is_evaluated
        self._position = position

    def _wait_for_survivors(self) -> list[Member]:
        """Return the members of the round that this replacement has joined, or of the next if it breaks."""
        while True:
            try:
                return list(self._rounds.wait_for_all(self._round, _MEETING_S))
            except RepairError:
                if not self._rounds.is_declared(self._round + 1):
                    raise
                self._join_next()

    @property
    def _is_survivor(self) -> bool:
        """True unless this process has still to take the place of a rank that has died."""
        return self._joining is None or not self._joining.is_alone

    def _record(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self._links.recording():
            return original(*args, **kwargs)

    def _set_up(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self._gathered.installed():
            result = original(*args, **kwargs)
        self._groups.note()
        return result

    def _finish_together(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Leave an iteration when all ranks have finished it: outside of it nothing is repaired."""
        result = original(*args, **kwargs)
        dist.barrier()
        return result

    def _train(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except _MAY_MEAN_DEATH as error:
            if self._link.is_armed and self._notice(error, True) is not None:
                raise RepairError(
                    "a rank has died between two iterations, where only some evaluations are repaired"
                ) from error
            raise
        finally:
            self._link.disarm()

    def _train_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        step, iteration = Step(original, args, kwargs, self._kept), kwargs["iteration"]
        self._step = step
        if not self._is_survivor:
            phases = Phases(self._link.died_s or time.time())
        else:
            self._position = position_of(
                get_args(),
                iteration,
                num_groups=self._groups.num_made,
                model=step.parts.model,
                evaluations_draw=self._evaluations.draw,
            )
            try:
                with self._watcher.inside():
                    result = step.run(iteration)
            except BaseException as error:
                phases = self._notice_or_raise(error, _MAY_MEAN_DEATH)
            else:
                # From the first iteration on there is something to recover.
                self._link.arm()
                self._heart.start()
                return result
        self._link.arm()
        self._heart.start()
        return self._repair_until_finished(step, iteration, phases)

    def _notice_between(self, error: BaseException) -> Phases:
        """Return the phases of a repair after a death in an evaluation; raise the error if there is none."""
        return self._notice_or_raise(error, _MAY_MEAN_DEATH)

    def _repair_between(self, phases: Phases) -> None:
        """Repair, and run the last iteration again. A replacement finishes it in its `train_step`."""
        assert self._step is not None and self._position is not None
        self._position = replace(self._position, is_evaluated=True)
        self._repair_until_finished(self._step, self._position.iteration, phases)

    def _repair_until_finished(self, step: Step, iteration: int, phases: Phases) -> Any:
        """Repair, also what dies during that. Called by all ranks, in the same iteration."""
        while True:
            try:
                return self._repair(step, iteration, phases)
            except BaseException as error:
                phases = self._notice_or_raise(error, Exception)

    def _notice_or_raise(
        self, error: BaseException, may_mean_death: type[Exception] | tuple[type[Exception], ...]
    ) -> Phases:
        """Return the phases of a repair that begins; raise the error if no rank has died.

        Args:
            may_mean_death: exceptions after which the news of a death may still be on its way.
        """
        phases = None
        if isinstance(error, Exception):
            phases = self._notice(error, isinstance(error, may_mean_death))
        if phases is None:
            self._link.disarm()
            raise error
        return phases

    def _notice(self, error: Exception, may_mean_death: bool) -> Phases | None:
        """Return the phases of a repair that begins; None if no rank has died."""
        raised_s, begin_s, number = time.time(), time.monotonic(), self._round + 1
        if may_mean_death and _is_timeout(error):
            self._rounds.time_out(number)
        while not self._rounds.is_declared(number):
            # A rank that hangs ends itself then.
            wait_s = _NOTICE_S + (STUCK_S if self._rounds.has_timed_out(number) else 0.0)
            if not may_mean_death or time.monotonic() - begin_s > wait_s:
                return None
            time.sleep(self._rounds.poll_s)
        self._links.end(self._round)
        where = "its iteration" if self._rounds.last_finished() == self._round else "a repair"
        _say(f"rank {dist.get_rank()} has left {where}: a rank has died ({_first_line(error)})")
        return Phases(min(raised_s, self._watcher.noticed_s(number)))

    def _repair(self, step: Step, iteration: int, phases: Phases) -> Any:
        """Repair, and finish the iteration. Called by all ranks, in the same iteration."""
        with _ending_after(_REPAIR_S, self._link) as deadline:
            parts = step.parts
            self._leave(parts, iteration)
            phases.end("free" if self._is_survivor else "build")
            members = self._members = self._meet()
            position_of_survivors(members)  # or they do not fit together
            phases.begin_with(min(each.died_s for each in members if each.died_s is not None))
            self._rounds.wait_until_ready(self._round, _MEETING_S)
            phases.end("meet")
            self._swap()
            phases.end("swap")
            first = self._recover(parts)
            phases.end("recover")
            deadline.cancel()
        result = self._catch_up(step, first, iteration)
        self._groups.set_timeout(timedelta(seconds=timeout_of_groups_s(get_args())))
        phases.end("catch_up")
        self._rounds.finish(self._round)
        self._is_new = False
        dead = tuple(each.rank for each in members if each.died_s is not None)
        repair = Repair(
            number=self._round,
            iteration=iteration,
            recovered=first,
            dead=dead,
            hung_s={each.rank: each.hung_s for each in members if each.hung_s},
            is_replacement=dist.get_rank() in dead,
            phases_s=phases.seconds,
        )
        self._listeners.after_repair(repair)
        return result

    def _leave(self, parts: LoopParts, iteration: int) -> None:
        """Clean what the broken iteration has left; a replacement has nothing to clean."""
        self._listeners.suspend(iteration)
        leftovers.clean(parts.model, parts.optimizer, iteration)
        if self._is_survivor:
            self._groups.drop_others()

    def _meet(self) -> list[Member]:
        if not self._is_survivor:
            assert self._joining is not None
            self._joining.meet()
            return self._members
        self._join_next()
        return list(self._rounds.wait_for_all(self._round, _MEETING_S))

    def _join_next(self) -> None:
        """Take part in the next round, which has been declared."""
        link = self._link
        member = Member(
            rank=dist.get_rank(),
            died_s=link.died_s if self._is_new else None,
            hung_s=link.predecessor_hung_s if self._is_new else 0.0,
            facts={} if self._position is None else self._position.facts(),
        )
        self._round += 1
        self._rounds.join(self._round, member)

    def _swap(self) -> None:
        self._links.begin(self._round)
        with self._links.recording():
            # A rank may die meanwhile, and nobody can end a wait for its address.
            self._groups.swap(self._store, self._round, timedelta(seconds=_CONNECT_S))
        self._groups.set_timeout(timedelta(minutes=get_args().distributed_timeout_minutes))

    def _recover(self, parts: LoopParts) -> int:
        """Recover a state, renew the data, and return the iteration that runs next."""
        assert self._built is not None
        args = get_args()
        self._listeners.loop.most_iteration = _most_iteration(self._members, args)
        try:
            self._listeners.after_setup(self._built, args.iteration)
        except (ConfigError, UnrecoverableError) as error:
            # This is no refusal of the job: another start may do better.
            raise RepairError(f"a repair found no state to continue from: {error}") from error
        self._batches.renew(parts.data_iterator)
        self._listeners.begin_training(parts)
        return int(args.iteration)

    def _catch_up(self, step: Step, first: int, last: int) -> Any:
        """Run iterations up to the one that was broken off, whose result is returned."""
        args, result = get_args(), None
        with self._watcher.inside():
            self._listeners.replay_if_due(step.parts.forward_backward)
        if first > last:
            # The loop has not counted the iteration yet.
            position_of_survivors(self._members).set_counters(args)
            begin_iteration(args, last)
            with self._watcher.inside():
                return step.answer(last, self._listeners.loop.grad_norm)
        for iteration in range(first, last + 1):
            if iteration > first:
                self._evaluations.pass_by(args, iteration)
            leftovers.clear_metrics()
            begin_iteration(args, iteration)
            if iteration + 1 in args.iterations_to_skip:
                with self._watcher.inside():
                    training.dummy_train_step(step.parts.data_iterator)
                count_iteration(args, is_skipped=True)
                continue
            with self._watcher.inside():
                result = step.run(iteration)
            if iteration < last:
                count_iteration(args)
        return result


def _most_iteration(members: list[Member], args: Any) -> int:
    """Return the latest iteration that can be recovered: the broken one, or what it made on some ranks."""
    iterations = {int(each.facts["iteration"]) for each in members if each.facts}
    is_evaluated = any(each.facts.get("is_evaluated") for each in members if each.facts)
    return min(iterations) + (len(iterations) == 1 and can_be_kept(args) and not is_evaluated)


@contextmanager
def _ending_after(seconds: float, link: Link) -> Iterator[threading.Timer]:
    """End the process if this context takes longer: the launcher then restarts the job."""

    def leave() -> None:
        link.retire()
        _say(f"a repair has taken {seconds:.0f} s: this rank ends")
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def _is_timeout(error: Exception) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _say(line: str) -> None:
    print(f"moe_ft: {line}", file=sys.stderr, flush=True)
