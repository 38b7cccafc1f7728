"""Ranks whose processes have ended are named at once, also before anybody has waited for them."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from moe_ft.loop.local_processes import gone_ranks, meet_processes
from tests.waiting import wait_for


def test_living_process_is_not_gone() -> None:
    assert gone_ranks({0: os.getpid(), 1: os.getppid()}) == frozenset()


def test_process_that_has_ended_is_gone_before_and_after_somebody_waits_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_for(lambda: gone_ranks({5: process.pid}), "the end of the process")
    process.wait()
    assert gone_ranks({4: os.getpid(), 5: process.pid}) == {5}


@pytest.mark.usefixtures("lonely_group")
def test_rank_sees_itself() -> None:
    assert meet_processes().pids == {0: os.getpid()}


@pytest.fixture
def lonely_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
