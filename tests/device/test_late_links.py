"""Groups of NCCL that end and are renewed by the product's code, with a device that its host runs ahead of.

Two processes: in each round one enters no collective, as if it had died. Each wait of the code is left out
once, which must be noticed.
"""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.fault_tolerance.repair import swap as swapping
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.nccl import Nccl, set_variables
from megatron.fault_tolerance.repair.swap import Groups, Recipes
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.errors import LinksEndedError
from tests.device.nccl import late_nccl
from tests.device.process import late_process
from tests.device.removal import OF_LINKS, without
from tests.harness import run_ranks

NUM_ROUNDS = 2
DEADLINE_S = 60.0
_END_S = 0.3  # from a collective that one rank never enters to the end of the links
_LEFT_OUT = "left out, and noticed:"


class _Rank:
    """One of two ranks that train: each iteration adds 2.0 to all weights."""

    def __init__(self, folder: str) -> None:
        self.number = int(os.environ["RANK"])
        set_variables(os.environ)
        assignment = Assignment(rank=self.number, local_rank=0, world_size=2, node="")
        self.member, self._recipes = Member(assignment), Recipes()
        self.links = Links(self.member, (Gloo(), Nccl()))
        self._store = dist.FileStore(f"{folder}/second", 2)
        with self.links.recording():
            first = dist.FileStore(f"{folder}/first", 2)
            world = {"store": first, "rank": self.number, "world_size": 2}
            self._recipes.make(dist.init_process_group, "nccl", **world)
            self.gathers = self._recipes.make(dist.new_group, [0, 1])
            self.on_cpu = self._recipes.make(dist.new_group, [0, 1], backend="gloo")
        self.groups = Groups(self.links.transports, self._recipes)
        self.groups.note()
        self.masters = torch.zeros(4, device="cuda")
        self.weights = torch.zeros(8, device="cuda")

    def run_iteration(self) -> None:
        """Train. The gather is waited for by what uses the weights next."""
        gradient = torch.ones(4, device="cuda")
        dist.all_reduce(gradient)
        self.masters.add_(gradient)
        self.gathering = dist.all_gather_into_tensor(
            self.weights, self.masters, group=self.gathers, async_op=True
        )

    def finish_iteration(self) -> None:
        """Wait for all ranks, as the end of an iteration does."""
        self.links.check()
        dist.barrier(self.on_cpu)
        self.gathering.wait()

    def renew(self, number: int) -> None:
        """Leave what was broken off, and put new backends under the groups."""
        self.links.leave()
        self.groups.drop_later()
        self.member.round = number
        args = SimpleNamespace(distributed_timeout_minutes=1)
        with mock.patch.object(swapping, "get_args", lambda: args):
            swapping.swap(self.groups, self.links, self._store, number)

    def break_off(self, number: int) -> None:
        """Run an iteration that the other rank, or this one, never enters."""
        if self.number == number % 2:
            self.links.end(number - 1)
            return
        ending = threading.Timer(_END_S, self.links.end, [number - 1])
        ending.start()
        self.run_iteration()
        with pytest.raises(LinksEndedError):
            self.finish_iteration()
        ending.join()
        with pytest.raises(RuntimeError, match="abort"):
            dist.all_reduce(self.masters)


def train_and_renew(folder: str, left_out: str) -> None:
    """Train; break off an iteration in each round, go back to the state before it, and go on."""
    torch.set_num_threads(1)
    with (
        late_nccl(),
        late_process("links", is_late=True) as device,
        without(left_out) as times,
    ):
        rank = _Rank(folder)
        try:
            for number in range(1, NUM_ROUNDS + 1):
                rank.run_iteration()
                rank.finish_iteration()
                kept: Any = [each.cpu() for each in (rank.masters, rank.weights)]
                assert kept[0].tolist() == [2.0 * number] * 4
                rank.break_off(number)
                rank.renew(number)
                for live, each in zip((rank.masters, rank.weights), kept, strict=True):
                    live.copy_(each)
            rank.run_iteration()
            rank.finish_iteration()
            assert rank.weights.tolist() == [2.0 * (NUM_ROUNDS + 1)] * 8
            assert device.conflicts == []
        except BaseException as error:
            if times:
                print(_LEFT_OUT, repr(error)[:200], flush=True)
            raise
    sys.stdout.flush()
    os._exit(0)


def _run(folder: Path, left_out: str = "") -> Any:
    return run_ranks(
        train_and_renew, 2, str(folder), left_out, log_dir=folder, deadline_s=DEADLINE_S
    )


def test_state_is_that_before_the_iteration_that_was_broken_off(tmp_path: Path) -> None:
    _run(tmp_path).check()


@pytest.mark.parametrize("name", OF_LINKS)
def test_wait_of_the_links_that_is_left_out_is_noticed(name: str, tmp_path: Path) -> None:
    result = _run(tmp_path, name)
    assert any(_LEFT_OUT in result.output(rank) for rank in range(2)), result.output(0)[-2000:]
