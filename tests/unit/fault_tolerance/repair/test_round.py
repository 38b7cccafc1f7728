"""A round runs through its phases, recovers a state and says what was repaired.

The others are in the store only; tests/distributed/test_repair.py has whole jobs.
"""

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import (
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.timers import Timers
from megatron.training import global_vars, training

from megatron.fault_tolerance.repair import round as rounds_of_repair
from megatron.fault_tolerance.repair.catch_up import Step
from megatron.fault_tolerance.repair.evaluation import SkippedEvaluations
from megatron.fault_tolerance.repair.meet import Membership
from megatron.fault_tolerance.repair.recover import Batches, training_batches
from megatron.fault_tolerance.repair.round import Phases, Repaired, repair
from megatron.fault_tolerance.repair.swap import Groups, Recipes
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import RepairError, UnrecoverableError
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import declare
from moe_ft.loop.listeners import (
    Built,
    Listeners,
    LoopListener,
    LoopState,
    Repair,
)
from tests.unit.fault_tolerance.repair.members import Watched, position_at

PHASES = ["notice", "free", "meet", "swap", "recover", "catch_up"]


class _Listener(LoopListener):
    """Notes what it is told, and recovers an iteration."""

    def __init__(self, args: Namespace, loop: LoopState) -> None:
        self._args, self._loop = args, loop
        self.seen: list[Any] = []
        self.recovers: int | None = 4

    def suspend(self, iteration: int) -> None:
        self.seen.append(("suspend", iteration))

    def after_setup(self, built: Built) -> None:
        if self.recovers is None:
            raise UnrecoverableError("every copy was lost")
        self.seen.append((built, self._loop.most_iteration))
        self._args.iteration = self.recovers

    def after_repair(self, repair: Repair) -> None:
        self.seen.append(repair)


def _without_data() -> Batches:
    """Return the data of a rank that reads none."""
    with Patches() as patches:
        patches.set(training, "build_train_valid_test_data_loaders", lambda: (None, None, None))
        batches = training_batches()
        batches.install(patches)
        training.build_train_valid_test_data_loaders()
    return batches


class Rank(Watched):
    """Rank 0 of two in iteration 5; rank 1 has died, and its replacement waits in round 1.

    The process groups of this process have one rank.
    """

    def __init__(self, args: Namespace) -> None:
        super().__init__(2)
        declare(self.store, rank=1, world_size=2, died_s=5.0)
        self.store.append("round_1/ready", {"rank": 1})
        self.ran, loop = list[int](), LoopState()
        groups = Groups(self.links.transports, Recipes())
        groups.note()
        self.listener = _Listener(args, loop)
        self.membership = Membership(self.link, self.rounds, 0)
        self.membership.position = position_at(5)
        self._repaired = Repaired(
            link=self.link,
            store=self.job_store,
            listeners=Listeners(loop, [self.listener]),
            membership=self.membership,
            joining=None,
            watcher=self.watcher,
            links=self.links,
            groups=groups,
            batches=_without_data(),
            evaluations=SkippedEvaluations(),
        )
        optimizer, models = Namespace(), list[Any]()
        args_of_step = ("forward", None, models, optimizer, "scheduler", "config", lambda: None)
        self._step = Step(self._train_step, args_of_step, {"iteration": 5}, loop)

    def _train_step(self, *args: Any, iteration: int) -> str:
        value = torch.ones(1)
        dist.all_reduce(value)  # over the new backend
        self.ran.append(iteration)
        return f"result {iteration}"

    def run(self, phases: Phases) -> Any:
        """Run the round."""
        built = ("model", "optimizer", "scheduler")
        return repair(self._repaired, built, self._step, 5, phases)


@pytest.fixture
def rank(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    loop_args.distributed_timeout_minutes = 30
    loop_args.distributed_timeout_seconds_after_init = 7
    loop_args.iterations_to_skip = []
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", Timers(2, "minmax"))
    initialize_rerun_state_machine()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Rank(loop_args)
    dist.destroy_process_group()
    destroy_rerun_state_machine()


def test_round_recovers_a_state_and_runs_iterations_until_the_broken_one_is_finished(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    limits_s: list[float] = []

    def note(seconds: float, link: Link) -> AbstractContextManager[None]:
        limits_s.append(seconds)
        return nullcontext()

    monkeypatch.setattr(rounds_of_repair, "ending_after", note)
    phases = Phases(6.0)
    assert rank.run(phases) == "result 5"
    assert rank.ran == [4, 5]
    assert limits_s[0] > 60 * 30, "the slowest rank reads as long as the groups wait"
    suspended, recovered, repaired = rank.listener.seen
    assert suspended == ("suspend", 5)
    assert recovered == (("model", "optimizer", "scheduler"), 6), "all know the result of 5"
    assert repaired == Repair(
        number=1,
        iteration=5,
        recovered=4,
        dead=(1,),
        hung_s={},
        is_replacement=False,
        phases_s=phases.seconds,
    )
    assert list(phases.seconds) == PHASES
    assert phases.seconds["notice"] == 1.0
    assert rank.membership.round == 1 and rank.rounds.is_finished(1)
    line = r"moe_ft: rank 1 replaced in \d+\.\d s, and iteration 6 finished: no other rank was restarted"
    assert re.search(line, capfd.readouterr().err), "log lines count from 1 as well"


def test_round_without_a_state_is_no_refusal_of_the_job(rank: Rank) -> None:
    rank.listener.recovers = None
    with pytest.raises(RepairError, match="found no state to continue from: every copy was lost"):
        rank.run(Phases(6.0))
    assert not rank.rounds.is_finished(1)
    assert rank.ran == []


def test_phases_add_up_to_the_time_since_the_death() -> None:
    times = iter([12.5, 13.0])
    phases = Phases(10.25, lambda: next(times))
    phases.end("free")
    phases.begin_with(10.0)
    phases.end("swap")
    assert phases.seconds == {"notice": 0.25, "free": 2.25, "swap": 0.5}
    assert sum(phases.seconds.values()) == 13.0 - 10.0
    phases = Phases(10.0, lambda: 9.5)  # the clocks of two machines differ
    phases.begin_with(11.0)
    phases.end("free")
    assert phases.seconds == {"notice": 0.0, "free": 0.0}
