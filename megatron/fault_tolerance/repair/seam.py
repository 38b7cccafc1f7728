"""Repair in place, around Megatron's `train_step`: the loop calls it once and never knows.

This file holds the functions of Megatron that are wrapped for one call of `pretrain` if the flags ask for it,
and the decision after an exception. If a rank has died (watcher.py), a round of repairs runs (round.py). If
another one dies meanwhile, all begin again in the next round. An exception of this rank alone makes it one
that has died (own_errors.py). Any other one ends the process for good: the launcher restarts the job.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.training import get_args
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.degraded.rules import check_job
from megatron.fault_tolerance.degraded.sharing import Sharing
from megatron.fault_tolerance.repair.between import BetweenIterations, SkippedEvaluations
from megatron.fault_tolerance.repair.build import Gathered, Joining
from megatron.fault_tolerance.repair.catch_up import Repaired, Step, position_of, set_counters
from megatron.fault_tolerance.repair.crowding import Crowding
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import GroupTransport, Links
from megatron.fault_tolerance.repair.nccl import Nccl, set_variables
from megatron.fault_tolerance.repair.own_errors import OwnErrors, num_batches_left_out
from megatron.fault_tolerance.repair.round import Phases, repair
from megatron.fault_tolerance.repair.rules import (
    answer_to_lost_nodes,
    checked_heartbeat_s,
    line_on_gloo_groups,
    why_not_in_place,
)
from megatron.fault_tolerance.repair.store import TorchStore
from megatron.fault_tolerance.repair.swap import Groups, Recipes, check_torch
from megatron.fault_tolerance.repair.watcher import Deaths, Watcher
from megatron.fault_tolerance.seams import hooks
from megatron.fault_tolerance.seams.collectives import answering
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.iteration_check import IterationCheck
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Function, Layer, Layers
from moe_ft.cluster import job_store
from moe_ft.cluster.link import Heart
from moe_ft.cluster.member import Member, Standing, own_member
from moe_ft.cluster.rounds import Rounds
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.lost_nodes import CROWDED
from moe_ft.errors import CorruptionError, RepairError, SnapshotError
from moe_ft.loop.checkpoints import Checkpoints, site_of
from moe_ft.loop.failure_report import FailureReport
from moe_ft.loop.listeners import Built, Listeners
from moe_ft.loop.progress import ProgressListener
from moe_ft.planning.levels import plan_levels
from moe_ft.saying import warn
from moe_ft.verdicts import Failure


class EndBarrier:
    """Barrier that ends an iteration, its log line or evaluation on all ranks. Owned by the training thread.

    A rank that dies before it is repaired.
    """

    def __init__(self, links: Links, recipes: Recipes) -> None:
        """Have the group of all ranks."""
        self._links = links
        self._recipes = recipes
        # This rank waits in each, in this order. None is the group of all ranks.
        self._groups: list[Any] = [None]

    def make_groups(self) -> None:
        """Make groups of gloo, unless that of all ranks is one. Called by all ranks, once.

        A barrier of NCCL is work for the device, and passes if it is aborted. gloo connects each rank of a
        group to all others, so ranks wait in levels of groups, up to the first rank and down again.
        """
        if "cpu" in self._recipes.of_default().by_device:
            return
        timeout = timedelta(minutes=get_args().distributed_timeout_minutes)
        up, down, own = list[Any](), list[Any](), dist.get_rank()
        everyone = range(dist.get_world_size())
        levels = plan_levels(everyone)
        for level in levels:
            for members in level:
                group = dist.new_group(
                    members, backend="gloo", timeout=timeout, group_desc="moe_ft-together"
                )
                if own in members:
                    up.append(group)
                    down += [] if level is levels[-1] else [group]
        self._groups = [*up, *reversed(down)]

    def wait(self) -> None:
        """Return when all ranks have come here with results that count. Called by all ranks.

        Raises:
            RuntimeError: if one has not, among them LinksEndedError.
        """
        self._links.check()
        for each in self._groups:
            dist.barrier(each)

    def change_timeout(
        self, original: Function, timeout: timedelta, *args: Any, **kwargs: Any
    ) -> None:
        """Change the timeout of the groups without the others, and of these, which Megatron does not know.

        Each loop does it in its own second iteration.
        """
        with answering(Layer.REPAIR, lambda _: None, ["barrier"]):
            original(timeout, *args, **kwargs)
        for each in filter(None, self._groups):
            _set_pg_timeout(timeout, each)


class RepairSeam:
    """Repairs of one rank in one start. Owned by the training thread."""

    def __init__(
        self,
        member: Member,
        listeners: Listeners,
        store: Any,
        watched: Rounds,
        links: Links,
        heart: Heart,
        data_sets: DataSets,
        sharing: Sharing | None = None,
    ) -> None:
        """Wrap nothing yet.

        Args:
            store: to which the member is connected.
            watched: rounds over another connection, for the watcher.
        """
        watcher, recipes = Watcher(watched, links, member), Recipes()
        is_joining = member.standing is Standing.JOINING
        self._rank = Repaired(
            member=member,
            store=store,
            listeners=listeners,
            joining=Joining(member, recipes) if is_joining else None,
            watcher=watcher,
            links=links,
            groups=Groups(links.transports, recipes),
            data_sets=data_sets,
            evaluations=SkippedEvaluations(),
            sharing=sharing,
        )
        self._heart = heart
        self._recipes = recipes
        report = partial(_tell_of_replaced, member, listeners)
        own = OwnErrors(member, links, listeners.loop, report, _may_leave_out)
        self._deaths = Deaths(member, watcher, links, own)
        self._end_barrier = EndBarrier(links, recipes)
        self._gathered = Gathered(member.sign(store), is_joining=is_joining)
        self._between = BetweenIterations(
            watcher,
            member,
            links,
            data_sets,
            self._end_barrier.wait,
            self._deaths.notice_or_raise,
            self._repair_between,
        )
        self._built: Built | None = None
        self._step: Step | None = None  # of the last iteration that has begun

    @contextmanager
    def repairing(self) -> Iterator[None]:
        """Repair in this context, which is one call of `pretrain`."""
        joining = self._rank.joining
        with Layers() as layers, nullcontext() if joining is None else joining.installed():
            self._install(layers)
            self._rank.watcher.start()
            try:
                with _noting_end(self._rank.member):
                    yield
            finally:
                self._rank.member.link.disarm()
                self._heart.close()
                self._rank.watcher.close()

    def _install(self, layers: Layers) -> None:
        rank = self._rank
        rank.evaluations.install(layers)
        self._between.install(layers)
        layers.put(Layer.TOGETHER, {"train_step": self._finish_together})
        functions = {
            "init_process_group": self._record,
            "new_group": self._record,
            "setup_model_and_optimizer": self._set_up,
            "train": self._train,
            "train_step": self._train_step,
            "update_pg_timeout": self._end_barrier.change_timeout,
        }
        layers.put(Layer.REPAIR, functions)

    def after_setup(self, built: Built, iteration: int) -> None:
        """Have the listeners set up; a replacement only learns where the others are, and does it later.

        Raises:
            RepairError: if the others do not come, or have other process groups.
        """
        self._built = built
        if self._rank.joining is None:
            self._rank.listeners.after_setup(built, iteration)
            return
        position = self._rank.member.wait_for_survivors()
        if position.num_groups != self._rank.groups.num_made:
            raise RepairError(
                f"the others have made {position.num_groups} process groups, and this replacement "
                f"{self._rank.groups.num_made}"
            )
        set_counters(get_args(), position)
        self._rank.joining.follow(position)
        self._between.follow(position)
        self._rank.evaluations.draw = position.evaluations_draw

    def _record(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        is_fake = self._rank.member.standing is Standing.JOINING  # it connects to nobody
        with nullcontext() if is_fake else self._rank.links.recording():
            return self._recipes.make(original, *args, **kwargs)

    def _set_up(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self._gathered.installed():
            result = original(*args, **kwargs)
        self._end_barrier.make_groups()
        self._rank.groups.note()
        return result

    def _finish_together(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Leave an iteration when all ranks have finished it: outside of it nothing is repaired."""
        result = original(*args, **kwargs)
        self._end_barrier.wait()
        return result

    def _train(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (RuntimeError, SnapshotError) as error:
            if self._rank.member.link.is_armed and self._deaths.notice(error) is not None:
                raise RepairError(
                    "a rank has died between two iterations, and not in a log line or an evaluation that can "
                    "begin again: all ranks have to start again"
                ) from error
            raise
        finally:
            self._rank.member.link.disarm()

    def _train_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run an iteration; repair if a rank dies in it. A replacement begins with a repair."""
        self._step = step = Step(original, args, kwargs, self._rank.listeners.loop)
        iteration: int = kwargs["iteration"]
        if self._rank.member.standing is Standing.JOINING:
            died_s = self._rank.member.assignment.died_s
            assert died_s is not None
            noticed_s = died_s
        else:
            self._note_position(step, iteration)
            try:
                with self._rank.watcher.inside():
                    result = step.run(iteration)
            except BaseException as error:
                noticed_s = self._deaths.notice_or_raise(error)
                if isinstance(error, CorruptionError):
                    self._rank.member.note_sound(error.sound)
            else:
                self._become_replaceable()
                return result
        # Not while the exception is handled: its frames hold what the iteration leaves.
        self._become_replaceable()
        return self._repair_until_finished(step, iteration, noticed_s)

    def _note_position(self, step: Step, iteration: int) -> None:
        self._rank.member.position = position_of(
            get_args(),
            iteration,
            num_groups=self._rank.groups.num_made,
            model=step.parts.model,
            evaluations_draw=self._rank.evaluations.draw,
        )

    def _become_replaceable(self) -> None:
        """Have this rank replaced if it dies or hangs from now on: there is something to recover."""
        self._rank.member.become_replaceable()
        if get_args().world_size == 1:  # an elastic job may be so small: nobody could repair it
            self._rank.member.link.disarm()
        self._heart.start()

    def _repair_between(self, noticed_s: float) -> None:
        """Repair, and run the iteration again whose log line or evaluation was broken off.

        A replacement finishes that iteration in its `train_step`.
        """
        position = self._rank.member.position
        assert self._step is not None and position is not None
        self._repair_until_finished(self._step, position.iteration, noticed_s)

    def _repair_until_finished(self, step: Step, iteration: int, noticed_s: float) -> Any:
        """Repair, also what dies during that. Called by all ranks, in the same iteration."""
        assert self._built is not None
        while True:
            try:
                return repair(self._rank, self._built, step, iteration, Phases(noticed_s))
            except BaseException as error:
                noticed_s = self._deaths.notice_or_raise(error, waits=True)


def _tell_of_replaced(
    member: Member, listeners: Listeners, failure: Failure, error: Exception
) -> None:
    listeners.find(FailureReport).tell_of_replaced(failure, error)
    member.report_failure(failure)


def _may_leave_out(iteration: int) -> bool:
    args = get_args()
    most: int = args.moe_ft_skip_bad_batches
    return num_batches_left_out(args, iteration) < most


@contextmanager
def installed(
    config: MoeFtConfig, args: argparse.Namespace, listeners: Listeners
) -> Iterator[Mapping[str, Any]]:
    """Install the hooks of the listeners, with repairs around them if the flags ask for them.

    Yields:
        Arguments that repairs add to a call of `pretrain`.

    Raises:
        ConfigError: if repairs are asked for, and this job or process cannot be repaired.
        RepairError: if the job's store cannot be reached.
    """
    with Layers() as layers:
        if every := config.checks.check_iterations:
            check = IterationCheck(every, listeners.find(ProgressListener).accuse, listeners.loop)
            check.install(layers)
        with _installed(config, args, listeners) as arguments:
            yield arguments


@contextmanager
def _installed(
    config: MoeFtConfig, args: argparse.Namespace, listeners: Listeners
) -> Iterator[Mapping[str, Any]]:
    member, on_gpus = own_member(), not cpu_device.is_active()
    why = why_not_in_place(config, args, member, on_gpus=on_gpus)
    if member is None or why:
        listeners.loop.no_repair = "" if config.recovery.repair == "off" else why
        with _without_repairs(config, args, member, listeners) as arguments:
            yield arguments
        return
    check_torch()
    if args.rank == 0 and (line := line_on_gloo_groups(args)):
        warn(line)
    listeners.loop.without_spare = answer = answer_to_lost_nodes(config, args, member)
    if answer in CROWDED:
        where = partial(site_of, listeners.find(Checkpoints))
        listeners.add(Crowding(config, member, where, uses_nccl=on_gpus))
    links = Links(member, _transports(args))
    heart = Heart(member.link, checked_heartbeat_s(config, args))
    if (limit_s := config.recovery.hang_limit_s) is not None:
        heart.start(limit_s)  # the setup has a limit too
    # Each thread has a connection of its own, made before those that end with a round.
    deadline_s = 60.0 * args.distributed_timeout_minutes
    own, watched = (job_store.connect(os.environ, member.token, deadline_s) for _ in range(2))
    store = TorchStore(own, deadline_s)
    member.connect(own, args.world_size)
    of_watcher = Rounds(member.sign(watched), member.rank, args.world_size)
    with _sharing(config, args, listeners, member, answer) as (data_sets, sharing):
        seam = RepairSeam(member, listeners, store, of_watcher, links, heart, data_sets, sharing)
        with listeners, hooks.installed(listeners, seam.after_setup), seam.repairing():
            yield {"store": store}


@contextmanager
def _sharing(
    config: MoeFtConfig,
    args: argparse.Namespace,
    listeners: Listeners,
    member: Member | None,
    answer: str = "",
) -> Iterator[tuple[DataSets, Sharing | None]]:
    """Have peers share micro-batches in this context, if they may, and put gradients of weights off.

    Args:
        answer: to a lost node; empty without repairs.

    Yields:
        The data sets of the loop, and what shares; None if nothing ever does.

    Raises:
        ConfigError: if that is asked for, and does not work in this job.
    """
    late, data_sets = config.recovery.late_gradients, DataSets()
    with Layers() as layers, Patches() as patches:
        if answer or late == "always":  # others need it too
            data_sets.install(layers)
        if late != "always" and answer != "share":
            yield data_sets, None
            return
        check_job(args)
        host_rank = None  # in a job that crowds, guests run their own micro-batches
        if member is not None and answer == "share":
            host_rank = member.assignment.host_rank
        sharing = Sharing(
            data_sets,
            listeners.loop,
            host_rank,
            is_joining=member is not None and member.standing is Standing.JOINING,
            late=late,
        )
        sharing.install(layers, patches)
        yield data_sets, sharing


@contextmanager
def _without_repairs(
    config: MoeFtConfig, args: argparse.Namespace, member: Member | None, listeners: Listeners
) -> Iterator[Mapping[str, Any]]:
    """Install the hooks alone; ranks of an agent that would repair them meet in the job's store all the same.

    Yields, raises: as `installed`.
    """
    sharing = _sharing(config, args, listeners, member)
    if member is None:
        with sharing, listeners, hooks.installed(listeners):
            yield {}
        return
    deadline_s = 60.0 * args.distributed_timeout_minutes
    store = job_store.connect(os.environ, member.token, deadline_s)
    member.connect(store, args.world_size)
    with sharing, listeners, hooks.installed(listeners), _noting_end(member):
        yield {"store": TorchStore(store, deadline_s)}


@contextmanager
def _noting_end(member: Member) -> Iterator[None]:
    """Note that training has ended as planned, if it does so in this context."""
    try:
        yield
    except SystemExit as exit_:
        if not exit_.code:
            member.end()
        raise
    member.end()


def _transports(args: argparse.Namespace) -> tuple[GroupTransport, ...]:
    """Return the transports of this job's groups; those of NCCL need variables before groups are made.

    Raises:
        ConfigError: if a variable has another value already.
    """
    if cpu_device.is_active():
        return (Gloo(),)
    added = set_variables(os.environ)
    if args.rank == 0:
        sets = "".join(f" {name}={value}" for name, value in added.items())
        warn(
            "--moe-ft-repair=auto has never run on a GPU (docs/gpu_day.md); it sets"
            f"{sets or ' no variables'}"
        )
    return (Gloo(), Nccl())
