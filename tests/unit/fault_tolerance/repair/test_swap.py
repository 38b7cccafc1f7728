"""Process groups stay the same objects and communicate over new backends after each swap."""

import os
import sys
import threading
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _world

from megatron.fault_tolerance.repair import swap as swaps
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.nccl import Nccl
from megatron.fault_tolerance.repair.swap import Groups, Recipe, Recipes, check_torch, swap
from moe_ft.errors import ConfigError
from tests.harness import run_ranks
from tests.unit.fault_tolerance.repair.members import fake_world, make_world
from tests.unit.signed import member_of

NUM_ROUNDS = 10
TIMEOUT = timedelta(seconds=60)


def counts() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def check_communication(rank: int, group: dist.ProcessGroup | None) -> None:
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value, group=group)
    assert value.item() == 3.0
    names: list[object] = [None, None]
    dist.all_gather_object(names, f"rank {rank}", group=group)
    assert names == ["rank 0", "rank 1"]


def swap_many_times(folder: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/first", 2), rank=rank, world_size=2
    )
    pair = dist.new_group([0, 1])
    for group in (None, pair):  # or one lets go of a connection that the other is still making
        dist.barrier(group=group)
    groups, found = Groups((Gloo(),), Recipes()), []
    groups.note()
    name, description = pair.group_name, pair.group_desc
    for number in range(1, NUM_ROUNDS + 1):
        later = dist.new_group([0, 1])
        dist.barrier(group=later)
        groups.drop_later()
        assert later not in _world.pg_map
        groups.renew(dist.FileStore(f"{folder}/second", 2), number, TIMEOUT)
        for group in (None, pair):
            check_communication(rank, group)
        dist.barrier()
        assert dist.get_backend(pair) == "gloo"
        assert (pair.group_name, pair.group_desc, pair.name()) == (name, description, "gloo")
        found.append(counts())
    (first_descriptors, first_threads), (last_descriptors, last_threads) = found[1], found[-1]
    assert last_threads == first_threads, found
    assert last_descriptors <= first_descriptors + 2, found  # one may not be closed yet
    sys.stdout.flush()
    os._exit(0)


def test_swapped_groups_communicate_and_old_backends_leave_no_threads_and_descriptors(
    tmp_path: Path,
) -> None:
    run_ranks(swap_many_times, 2, str(tmp_path), log_dir=tmp_path).check()


def swap_fake_ones(folder: str) -> None:
    """Swap groups that were made in a fake world, as a replacement does, and end their links."""
    rank, recipes = int(os.environ["RANK"]), Recipes()
    store = dist.FileStore(f"{folder}/store", 2)
    swaps.get_args = lambda: Namespace(distributed_timeout_minutes=1)  # type: ignore[attr-defined]
    links = Links(member_of(rank, 2), (Gloo(),))
    fake_world(recipes, "gloo", rank)
    pair = recipes.make_fake(dist.new_group, [0, 1])
    groups = Groups(links.transports, recipes)
    groups.note()
    swap(groups, links, store, 1)
    for group in (None, pair):
        assert dist.get_backend(group) == "gloo"
        assert dist.get_backend_config(group) == "cpu:gloo,cuda:gloo"
        check_communication(rank, group)
    dist.barrier()
    if rank == 0:
        ending = threading.Thread(target=links.end, args=(0,), daemon=True)
        with pytest.raises(RuntimeError):
            ending.start()
            dist.barrier(pair)
        store.set("freed", "")
    store.wait(["freed"], TIMEOUT)
    sys.stdout.flush()
    os._exit(0)


def test_fake_groups_become_real_ones_and_their_end_frees_who_waits_for_a_healthy_rank(
    tmp_path: Path,
) -> None:
    run_ranks(swap_fake_ones, 2, str(tmp_path), log_dir=tmp_path).check()


def test_torch_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch()
    monkeypatch.setattr(swaps, "_RELEASE", "_ZN4c10d12ProcessGroup9let_go_ofEv")
    with pytest.raises(ConfigError, match="has no function that lets the old ones go"):
        check_torch()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "ucc",
            r"process group 0 \(default_pg\): its backend is ucc, and only gloo and nccl",
        ),
        ("nccl", ""),
        ("cpu:gloo,cuda:nccl", ""),
    ],
)
def test_group_of_another_backend_is_refused(backend: str, message: str, recipes: Recipes) -> None:
    fake_world(recipes, backend)
    groups = Groups((Gloo(), Nccl()), recipes)
    if message:
        with pytest.raises(ConfigError, match=message):
            groups.note()
    else:
        groups.note()
        with pytest.raises(ConfigError, match="only gloo can be"):
            Groups((Gloo(),), recipes).note()


def test_group_that_is_bound_to_a_device_is_refused(recipes: Recipes) -> None:
    make_world(recipes)
    group = dist.new_group([0])
    group.bound_device_id = torch.device("cuda:0")
    with pytest.raises(ConfigError, match="process group 1 .* is bound to cuda:0"):
        Groups((Gloo(),), recipes).note()


def test_group_without_a_backend_of_its_own_has_that_of_all_ranks(recipes: Recipes) -> None:
    make_world(recipes)
    group = recipes.make(dist.new_group, [0])
    assert recipes.of(group) == recipes.of_default() == Recipe(backend="gloo")
    assert recipes.of(group).by_device == {"cpu": "gloo", "cuda": "gloo"}
    assert recipes.of(group).configuration == dist.get_backend_config(group)
    other = dist.new_group([0], backend="gloo")
    assert recipes.of(other) == Recipe(backend="gloo"), "as torch knows it"


def test_destroyed_groups_are_forgotten(recipes: Recipes) -> None:
    make_world(recipes)
    for _ in range(20):
        dist.destroy_process_group(recipes.make(dist.new_group, [0]))
    recipes.make(dist.new_group, [0])
    assert len(recipes._known) == 2


def test_fake_groups_have_the_devices_of_those_that_were_asked_for_and_exchange_nothing(
    recipes: Recipes,
) -> None:
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
    value, found = torch.tensor([3.0]), [None, None]
    dist.all_reduce(value, group=of_cpus)
    assert value.item() == 3.0
    dist.all_gather_object(found, "rank 1", group=of_cpus)
    assert found == ["rank 1"] * 2
    dist.barrier(of_cpus)
