"""Process groups stay the same objects and communicate over new backends after each swap."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.fault_tolerance.repair.groups import Groups
from tests.harness import run_ranks

_TIMEOUT = timedelta(seconds=60)


def swap_and_reduce(folder: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/first", 2), rank=rank, world_size=2
    )
    pair = dist.new_group([0, 1])
    groups = Groups()
    groups.note()
    store = dist.FileStore(f"{folder}/second", 2)
    for number in (1, 2):
        later = dist.new_group([0, 1])
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


def test_swapped_groups_communicate_and_later_ones_are_forgotten(tmp_path: Path) -> None:
    run_ranks(swap_and_reduce, 2, str(tmp_path), log_dir=tmp_path).check()
