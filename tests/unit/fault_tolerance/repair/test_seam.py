"""The seam around `train_step`: when a death can be repaired, and what is no death.

Repairs of whole jobs are in tests/distributed/test_repair.py.
"""

import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import training

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.repair import seam, watcher
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.nccl import Nccl
from megatron.fault_tolerance.repair.seam import EndBarrier, RepairSeam, installed
from megatron.fault_tolerance.repair.swap import Recipes
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.stack import Layer, Layers
from moe_ft.cluster.link import Heart, RankLink
from moe_ft.cluster.member import Member
from moe_ft.cluster.rounds import Entry, RoundMark, Rounds
from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.errors import ConfigError, LinksEndedError, RepairError
from moe_ft.loop.listeners import Listeners, LoopState
from tests.unit.fault_tolerance.repair.members import fake_world, make_world
from tests.unit.signed import LookedAt, signed

ARGUMENTS = ("forward", "data", "model", "optimizer", "scheduler", "config", "schedule")


@pytest.fixture
def store() -> Any:
    """Return the store of the job."""
    return dist.HashStore()


@pytest.fixture
def link(member: Member) -> RankLink:
    return member.link


@pytest.fixture
def repairing(
    member: Member, links: Links, store: Any, loop_args: Namespace
) -> Iterator[RepairSeam]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loop_args.world_size = 2  # the other rank is not needed
    member.connect(LookedAt(store))
    watched, heart = Rounds(signed(store), 0, 1), Heart(member.link, limit_s=100.0)
    yield RepairSeam(member, Listeners(LoopState(), []), store, watched, links, heart, DataSets())
    dist.destroy_process_group()


def step(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[Any]:
    """Have Megatron's step fail, or return its iteration; return the iterations that it ran."""
    ran: list[Any] = []

    def train_step(*args: Any, iteration: int) -> Any:
        assert args[:-1] == ARGUMENTS[:-1]  # the schedule is watched
        ran.append(iteration)
        if error is not None:
            raise error
        return f"result {iteration}"

    monkeypatch.setattr(training, "train_step", train_step)
    return ran


def test_rank_can_be_replaced_from_its_first_finished_iteration_until_training_ends(
    repairing: RepairSeam, link: RankLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = step(monkeypatch)
    armed, limits_s = [], []

    def note() -> None:
        armed.append(link.is_armed)
        limits_s.append(link.limit_s)

    def train() -> None:
        note()
        assert training.train_step(*ARGUMENTS, iteration=7) == "result 7"
        note()

    monkeypatch.setattr(training, "train", train)
    with repairing.repairing():
        training.train()
        note()
    note()
    assert armed == [False, True, False, False]
    assert limits_s == [0, 100, 100, 0], "no beats are expected while a process is set up"
    assert ran == [7]


def test_only_rank_of_an_elastic_job_is_not_replaced(
    repairing: RepairSeam, link: RankLink, loop_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(monkeypatch)
    loop_args.world_size = 1
    with repairing.repairing():
        training.train_step(*ARGUMENTS, iteration=7)
        assert not link.is_armed


def test_iteration_whose_links_have_ended_is_broken_though_nothing_was_raised(
    repairing: RepairSeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has left a collective computes on, with what it had not received."""
    monkeypatch.setattr(watcher, "_NOTICE_S", 0.05)

    def train_step(*args: Any, iteration: int) -> str:
        repairing._rank.links.end(0)
        return "garbage"

    monkeypatch.setattr(training, "train_step", train_step)
    with (
        repairing.repairing(),
        pytest.raises(LinksEndedError, match="what was computed since does not count"),
    ):
        training.train_step(*ARGUMENTS, iteration=3)


def test_rank_that_has_lost_its_device_ends_while_it_can_be_replaced(
    repairing: RepairSeam, link: RankLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    step(monkeypatch, error)

    def end() -> int:
        pid = os.fork()
        if pid == 0:
            with suppress(Exception), repairing.repairing():
                training.train_step(*ARGUMENTS, iteration=3)
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    monkeypatch.setattr(watcher, "_NOTICE_S", 0.05)
    assert end() == 7, "an exception of a rank that cannot be replaced"
    link.arm()
    assert end() == -signal.SIGKILL
    assert link.is_armed


def test_death_that_the_loop_notices_between_iterations_is_named_as_the_reason(
    repairing: RepairSeam, link: RankLink, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(monkeypatch)

    def train() -> None:
        training.train_step(*ARGUMENTS, iteration=3)
        Rounds(signed(store), 0, 1).join(1, Entry(rank=0, died_s=5.0))
        raise RuntimeError("Connection closed by peer")  # in a log line

    monkeypatch.setattr(training, "train", train)
    with (
        repairing.repairing(),
        pytest.raises(RepairError, match="died between two iterations, and not in a log line"),
    ):
        training.train()
    assert not link.is_armed


def test_process_without_a_fork_server_is_refused() -> None:
    config = MoeFtConfig(recovery=RecoveryConfig(repair="auto"))
    with (
        pytest.raises(ConfigError, match="--moe-ft-repair=auto needs ranks that are forked"),
        installed(config, Namespace(rank=0), Listeners(LoopState(), [])),
    ):
        pass


def test_job_that_cannot_be_repaired_meets_in_the_store_and_knows_why(
    member: Member, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "own_member", lambda: member)
    monkeypatch.setattr("moe_ft.cluster.job_store.connect", lambda *args: store)
    monkeypatch.setattr("megatron.fault_tolerance.seams.hooks.installed", nullcontext)
    config = MoeFtConfig(recovery=RecoveryConfig(repair="try"))
    args = Namespace(rank=0, world_size=1, moe_ft_elastic=False, distributed_timeout_minutes=1)
    listeners, rounds = Listeners(LoopState(), []), Rounds(signed(store), 0, 1)
    monkeypatch.setattr(seam, "why_not_in_place", lambda *args, **facts: "one rank")
    monkeypatch.setattr(seam, "TorchStore", lambda store, _: store)
    with installed(config, args, listeners) as arguments:
        assert arguments == {"store": store} and listeners.loop.no_repair == "one rank"
        assert not rounds.has(RoundMark.ENDED)
    assert rounds.has(RoundMark.ENDED)


def test_first_rank_on_gpus_says_that_this_is_untried_and_what_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: False)
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_ENABLE_MONITORING": "0"})
    assert [each.name for each in seam._transports(Namespace(rank=0))] == ["gloo", "nccl"]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    said = capsys.readouterr()
    line = said.out + said.err
    assert "--moe-ft-repair=auto has never run on a GPU" in line
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in line
    assert "TORCH_NCCL_ENABLE_MONITORING=0" not in line
    seam._transports(Namespace(rank=1))
    said = capsys.readouterr()
    assert said.out + said.err == ""
    monkeypatch.setattr(cpu_device, "is_active", lambda: True)
    assert [each.name for each in seam._transports(Namespace(rank=0))] == ["gloo"]


def test_result_counts_until_the_links_have_ended(links: Links, recipes: Recipes) -> None:
    make_world(recipes)
    count = dist.distributed_c10d._world.group_count
    barrier = EndBarrier(links, recipes)
    barrier.make_groups()
    assert dist.distributed_c10d._world.group_count == count, "their group is of gloo already"
    barrier.wait()
    links.end(0)
    with pytest.raises(LinksEndedError, match="what was computed since does not count"):
        barrier.wait()
    links.begin()
    barrier.wait()


def test_ranks_whose_group_is_of_gpus_get_one_of_gloo(
    member: Member, recipes: Recipes, loop_args: Namespace
) -> None:
    loop_args.distributed_timeout_minutes = 1
    fake_world(recipes, "nccl")
    with Layers().put(Layer.REPLACEMENT, {"new_group": recipes.make_fake}):
        barrier = EndBarrier(Links(member, (Gloo(), Nccl())), recipes)
        barrier.make_groups()
    (group,) = barrier._groups
    assert recipes.of(group).by_device == {"cpu": "gloo", "cuda": "gloo"}


def test_their_groups_follow_the_timeout_of_the_others(
    links: Links, recipes: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_world(recipes)
    changed: list[timedelta] = []
    monkeypatch.setattr(training, "update_pg_timeout", changed.append)
    barrier, timeout = EndBarrier(links, recipes), timedelta(seconds=17)
    with Layers().put(Layer.REPAIR, {"update_pg_timeout": barrier.change_timeout}):
        training.update_pg_timeout(timeout)  # the group is Megatron's
        barrier._groups = [group := dist.new_group([0], backend="gloo")]
        training.update_pg_timeout(timeout)
    assert changed == [timeout] * 2
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timeout
