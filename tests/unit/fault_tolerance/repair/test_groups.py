"""Process groups stay the same objects and communicate over new backends after each swap."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.groups import Groups
from megatron.fault_tolerance.repair.nccl import Nccl
from megatron.fault_tolerance.repair.recipes import Recipes
from moe_ft.errors import ConfigError
from tests.harness import run_ranks

_TIMEOUT = timedelta(seconds=60)


def swap_and_reduce(folder: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/first", 2), rank=rank, world_size=2
    )
    pair = dist.new_group([0, 1])
    for group in (None, pair):  # or one lets go of a connection that the other is still making
        dist.barrier(group=group)
    groups = Groups((Gloo(),), Recipes())
    groups.note()
    store = dist.FileStore(f"{folder}/second", 2)
    for number in (1, 2):
        later = dist.new_group([0, 1])
        dist.barrier(group=later)
        groups.drop_others()
        assert later not in dist.distributed_c10d._world.pg_map
        groups.swap(store, number, _TIMEOUT)
        for group in (None, pair):
            value = torch.tensor([rank + 1.0])
            dist.all_reduce(value, group=group)
            assert value.item() == 3.0
        names: list[object] = [None, None]
        dist.all_gather_object(names, f"rank {rank}", group=pair)
        assert names == ["rank 0", "rank 1"]
        dist.barrier()
        assert dist.get_backend(pair) == "gloo"
    sys.stdout.flush()
    os._exit(0)


def swap_fake_ones(folder: str) -> None:
    """Swap groups that were made in a fake world, as a replacement does."""
    rank, recipes = int(os.environ["RANK"]), Recipes()
    world = {"store": FakeStore(), "rank": rank, "world_size": 2}
    recipes.make_fake(dist.init_process_group, default="gloo", backend="fake", **world)
    pair = recipes.make_fake(dist.new_group, [0, 1])
    groups = Groups((Gloo(),), recipes)
    groups.note()
    groups.swap(dist.FileStore(f"{folder}/store", 2), 1, _TIMEOUT)
    groups.set_timeout(_TIMEOUT)
    names: list[object] = [None, None]
    for group in (None, pair):
        assert dist.get_backend(group) == "gloo"
        assert dist.get_backend_config(group) == "cpu:gloo,cuda:gloo"
        dist.all_gather_object(names, f"rank {rank}", group=group)
        assert names == ["rank 0", "rank 1"]
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def test_fake_groups_become_real_ones(tmp_path: Path) -> None:
    run_ranks(swap_fake_ones, 2, str(tmp_path), log_dir=tmp_path).check()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "ucc",
            r"process group 0 \(default_pg\): its backend is ucc, and only those of gloo and nccl",
        ),
        ("nccl", ""),
        ("cpu:gloo,cuda:nccl", ""),
    ],
)
def test_group_of_another_backend_is_refused(backend: str, message: str) -> None:
    recipes = Recipes()
    world = {"store": FakeStore(), "rank": 1, "world_size": 2}
    recipes.make_fake(dist.init_process_group, default=backend, backend="fake", **world)
    groups = Groups((Gloo(), Nccl()), recipes)
    try:
        if message:
            with pytest.raises(ConfigError, match=message):
                groups.note()
        else:
            groups.note()
            with pytest.raises(ConfigError, match="only those of gloo can be"):
                Groups((Gloo(),), recipes).note()
    finally:
        dist.destroy_process_group()


def test_group_that_is_bound_to_a_device_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        group.bound_device_id = torch.device("cuda:0")
        with pytest.raises(ConfigError, match="process group 1 .* is bound to cuda:0"):
            Groups((Gloo(),), Recipes()).note()
    finally:
        dist.destroy_process_group()


def test_swapped_groups_communicate_and_later_ones_are_forgotten(tmp_path: Path) -> None:
    run_ranks(swap_and_reduce, 2, str(tmp_path), log_dir=tmp_path).check()
