"""Backends of a group end when they are released, with their threads and descriptors."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from megatron.fault_tolerance.repair import backends
from moe_ft.errors import ConfigError
from tests.harness import run_ranks

NUM_ROUNDS = 10
GLOO = "cpu:gloo,cuda:gloo"


def new_backend(folder: str, number: int, rank: int) -> Any:
    store = dist.FileStore(f"{folder}/{number}", 2)
    return ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))


def under(backend: Any) -> list[backends.Under]:
    return [backends.Under("gloo", backend, [torch.device("cpu"), torch.device("cuda")])]


def counts() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def renew_and_use(folder: str) -> None:
    rank = int(os.environ["RANK"])
    store = dist.FileStore(f"{folder}/first", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()  # or one lets go of a connection that the other is still making
    group = dist.distributed_c10d._get_default_group()
    name, description = group.group_name, group.group_desc
    found = []
    for number in range(NUM_ROUNDS):
        backends.release(group)
        backends.put(group, under(new_backend(folder, number, rank)), GLOO, name, description)
        assert (group.group_name, group.group_desc, group.name()) == (name, description, "gloo")
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        assert value.item() == 3.0
        found.append(counts())
    (first_descriptors, first_threads), (last_descriptors, last_threads) = found[0], found[-1]
    assert last_threads == first_threads, found
    assert last_descriptors <= first_descriptors + 2, found  # one may not be closed yet
    sys.stdout.flush()
    os._exit(0)


def fake_and_real(folder: str) -> None:
    """Build groups alone, then communicate, as a replacement does."""
    rank = int(os.environ["RANK"])
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    backends.release(group)
    backends.put(group, under(new_backend(folder, 0, rank)), GLOO, group_name(group), "pair")
    assert dist.get_backend_config(group) == GLOO
    found: list[object] = [None, None]
    dist.all_gather_object(found, rank, group=group)
    assert found == [0, 1]
    dist.barrier(group=group)
    sys.stdout.flush()
    os._exit(0)


def group_name(group: Any) -> str:
    return str(dist.distributed_c10d._world.pg_names[group])


def test_released_backends_leave_neither_threads_nor_descriptors(tmp_path: Path) -> None:
    run_ranks(renew_and_use, 2, str(tmp_path), log_dir=tmp_path).check()


def test_fake_group_of_a_replacement_communicates_over_its_first_real_backend(
    tmp_path: Path,
) -> None:
    run_ranks(fake_and_real, 2, str(tmp_path), log_dir=tmp_path).check()


def test_torch_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.check_torch()
    monkeypatch.setattr(backends, "_RELEASE", "_ZN4c10d12ProcessGroup9let_go_ofEv")
    with pytest.raises(ConfigError, match="has no function that lets the old ones go"):
        backends.check_torch()
