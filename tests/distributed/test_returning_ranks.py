"""A rank that comes back as a new process takes its role again, and no bit tells that it was away."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.training import get_args, training

from megatron.fault_tolerance.repair.build import Gathered, Joining
from megatron.fault_tolerance.repair.catch_up import position_of, set_counters
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.meet import Position, Role
from megatron.fault_tolerance.repair.recover import recover, training_batches
from megatron.fault_tolerance.repair.round import free
from megatron.fault_tolerance.repair.swap import Groups, Recipes, swap
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.keeper.link import Link
from moe_ft.loop.listeners import Built, Listeners
from tests.harness import events, run_training
from tests.jobs import CheckpointJob
from tests.played_roles import (
    COMMON,
    LOST,
    LOST_AT,
    NODES,
    Running,
    lose,
    lost_ranks,
    run,
    wait_for_snapshots,
)
from tests.references import Place

RETURNS_AT = 4


class Return:
    """Steps of a repair on one rank when a new process takes a rank, between two iterations."""

    def __init__(self, *, is_new: bool) -> None:
        self._link = Link(time.time() if is_new else None, token="token")
        self._recipes = Recipes()
        self._role = Role.JOINING if is_new else Role.SURVIVOR
        membership: Any = SimpleNamespace(role=self._role)
        self._joining = Joining(membership, self._recipes) if is_new else None
        self._links = Links(self._link, (Gloo(),))
        self._groups = Groups(self._links.transports, self._recipes)
        self._batches = training_batches()
        self._store: Any = None
        self._server: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap what a repair wraps."""
        with ExitStack() as stack:
            patches = stack.enter_context(Patches())
            self._batches.install(patches)
            patches.wrap(dist, "init_process_group", self._recipes.make)
            patches.wrap(dist, "new_group", self._recipes.make)
            patches.wrap(training, "setup_model_and_optimizer", self._set_up)
            if self._joining is not None:
                stack.enter_context(self._joining.installed())
            yield

    def _set_up(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._server = dist.distributed_c10d._get_default_store()  # rank 0's; it lives as long
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.PrefixStore("test", dist.TCPStore(*address))
        signed = SignedStore(self._store, lambda: self._link.token)
        with Gathered(signed, self._role).installed():
            built = original(*args, **kwargs)
        self._groups.note()
        return built

    def after_setup(self, listeners: Listeners, built: Built, iteration: int) -> None:
        """Have the listeners set up; a new process learns where the others are, and does it later."""
        if self._joining is None:
            listeners.after_setup(built, iteration)
            return
        position = self._position()
        set_counters(get_args(), position)
        self._joining.follow(position)

    def _position(self) -> Position:
        """Return where the others are; wait for them."""
        return Position(**json.loads(self._store.get("position")))

    def meet(self, running: Running) -> None:
        """Have all ranks train on together."""
        iteration, parts = running.iteration, running.step.parts
        free(self._links, running.listeners, parts, iteration)
        if self._joining is not None:
            self._joining.end()
            self._store.set("is_ready", "")
        else:
            numbers: dict[str, Any] = {
                "num_groups": self._groups.num_made,
                "evaluations_draw": False,
            }
            position = position_of(get_args(), iteration, model=parts.model, **numbers)
            self._store.set("position", json.dumps(position.facts()))
            self._groups.drop_later()
            self._store.wait(["is_ready"])
        swap(self._groups, self._links, self._store, 1)
        running.degradation.end(running.listeners)
        listeners, built = running.listeners, running.built
        assert recover(listeners, self._batches, built, parts, [self._position()]) == iteration
        listeners.begin_iteration(iteration)


def run_and_return(flags: list[str]) -> None:
    """Train without a rank for a while, until a new process takes it. Runs on every rank."""
    is_new = int(os.environ["RANK"]) in lost_ranks() and os.fork() != 0
    if is_new:
        os.wait()  # for the process that is lost
    group = Return(is_new=is_new)

    def begin(running: Running) -> None:
        if running.iteration == LOST_AT:
            lose(running)
        if running.iteration == RETURNS_AT:
            if not is_new:
                wait_for_snapshots(RETURNS_AT)
            group.meet(running)

    run(flags, begin, group.after_setup, group.installed)


def test_rank_that_is_back_trains_as_if_it_had_never_died_bit_for_bit(place: Place) -> None:
    job = CheckpointJob(place)
    job.set_model(4, {"pp": 2}, **{**COMMON, "train_iters": 6})
    run_training(
        job.flags(),
        4,
        log_dir=job.folder,
        train=run_and_return,
        env={LOST: "[3]"},
        nodes=NODES,
    ).check()
    for rank in range(4):
        lines = events(job.events_dir, rank, "recovery")
        assert [line["target_iteration"] for line in lines] == [LOST_AT, RETURNS_AT]
    assert job.digests() == job.reference()
