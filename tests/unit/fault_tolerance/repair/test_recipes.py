"""Groups are noted as they were asked for, also where fake ones are made instead."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.repair.recipes import Recipe, Recipes


@pytest.fixture
def recipes() -> Iterator[Recipes]:
    yield Recipes()
    dist.destroy_process_group()


def make_world(recipes: Recipes) -> None:
    recipes.make(dist.init_process_group, "gloo", store=dist.HashStore(), rank=0, world_size=1)


def fake_world(recipes: Recipes, backend: str) -> None:
    """Make the world of a replacement, as Megatron does with a fake process group."""
    world = {"store": FakeStore(), "rank": 1, "world_size": 2}
    recipes.make_fake(dist.init_process_group, default=backend, backend="fake", **world)


def test_group_without_a_backend_of_its_own_has_that_of_all_ranks(recipes: Recipes) -> None:
    make_world(recipes)
    group = recipes.make(dist.new_group, [0])
    assert recipes.of(group) == recipes.of_default() == Recipe(backend="gloo")
    assert recipes.of(group).by_device == {"cpu": "gloo", "cuda": "gloo"}
    assert recipes.of(group).configuration == dist.get_backend_config(group)


def test_group_that_was_made_otherwise_is_as_torch_knows_it(recipes: Recipes) -> None:
    make_world(recipes)
    other = dist.new_group([0], backend="gloo")
    assert recipes.of(other) == Recipe(backend="gloo")


def test_destroyed_groups_are_forgotten(recipes: Recipes) -> None:
    make_world(recipes)
    for _ in range(20):
        dist.destroy_process_group(recipes.make(dist.new_group, [0]))
    recipes.make(dist.new_group, [0])
    assert len(recipes._known) == 2


def test_fake_groups_have_the_devices_of_those_that_were_asked_for(recipes: Recipes) -> None:
    fake_world(recipes, "nccl")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    of_gpus = recipes.make_fake(dist.new_group, [0, 1], pg_options=options)
    of_cpus = recipes.make_fake(dist.new_group, [0, 1], backend="gloo")
    both = recipes.make_fake(dist.new_group, [0, 1], backend="cpu:gloo,cuda:nccl")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    groups = (_get_default_group(), of_gpus, of_cpus, both)
    assert [set(group._device_types) for group in groups] == [{gpu}, {gpu}, {cpu, gpu}, {cpu, gpu}]
    assert [dist.get_backend(group) for group in groups] == ["fake"] * 4, "Megatron asks for it"
    assert recipes.of_default() == Recipe(backend="nccl")
    assert recipes.of(of_gpus) == Recipe(backend="nccl", options=options)
    assert recipes.of(of_cpus).by_device == {"cpu": "gloo", "cuda": "gloo"}
    assert recipes.of(both).by_device == {"cpu": "gloo", "cuda": "nccl"}


def test_fake_groups_exchange_nothing(recipes: Recipes) -> None:
    fake_world(recipes, "gloo")
    group = recipes.make_fake(dist.new_group, [0, 1])
    value = torch.tensor([3.0])
    dist.all_reduce(value, group=group)
    assert value.item() == 3.0
    found: list[object] = [None, None]
    dist.all_gather_object(found, "rank 1", group=group)
    assert found == ["rank 1"] * 2
    dist.barrier()
