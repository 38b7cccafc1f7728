"""Collectives of ranks that share one GPU: they run on the host, where gloo has them."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from torch.distributed import distributed_c10d as c10d

from tests.harness import run_ranks
from tools.gpu_day import one_gpu

NAMES = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_to_all_single", "isend", "irecv"),
)


def refuse_far(name: str) -> None:
    """Let a collective of gloo refuse tensors that are marked, as it refuses those on a GPU."""
    original = getattr(dist, name)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            for each in value if isinstance(value, list) else [value]:
                assert not hasattr(each, "is_far"), f"{name}: unsupported device type cuda"
        return original(*args, **kwargs)

    for module in list(sys.modules.values()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, key, guarded)


def far(*shape: int) -> Any:
    """Return an empty tensor that gloo must not be given."""
    value: Any = torch.full(shape, -1.0)
    value.is_far = True
    return value


def share(folder: str) -> None:
    """Run the collectives of Megatron, and compare with results worked out by hand."""
    rank = int(os.environ["RANK"])
    for name in NAMES:
        refuse_far(name)
    one_gpu.install()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = [torch.arange(4.0), torch.arange(4.0) + 10]

    def mine() -> Any:
        return far(4).copy_(ranks[rank])

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(found.as_subclass(torch.Tensor), expected), (found, expected)

    with c10d._coalescing_manager():
        for op, expected in (
            (dist.ReduceOp.SUM, ranks[0] + ranks[1]),
            (dist.ReduceOp.MAX, ranks[1]),
            (dist.ReduceOp.AVG, (ranks[0] + ranks[1]) / 2),
        ):
            value = mark(mine())
            assert dist.all_reduce(value, op=op, async_op=True).wait()
            check(value, expected)
    value = mark(mine())
    dist.broadcast(value, 1)
    check(value, ranks[1])
    parts = [far(4), far(4)]
    dist.all_gather(parts, mark(mine()))
    check(torch.cat(parts), torch.cat(ranks))
    # Megatron's buffers: what is written is a part of what is read, or the reverse.
    whole = far(8)
    whole[4 * rank : 4 * rank + 4] = ranks[rank]
    gather: Callable[..., Any] = param_and_grad_buffer.dist_all_gather_func
    gather(mark(whole), mark(whole[4 * rank : 4 * rank + 4]))
    check(whole, torch.cat(ranks))
    value = mark(mine())
    half = mark(value[2 * rank : 2 * rank + 2])
    dist.reduce_scatter_tensor(half, value)
    check(half, (ranks[0] + ranks[1])[2 * rank : 2 * rank + 2])
    out, sizes = far(3), ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])
    dist.all_to_all_single(out, mark(mine()[: sum(sizes[1])]), *sizes)
    check(out, torch.cat([ranks[0][:1], ranks[1][:2]]) if rank == 0 else ranks[0][1:])
    other = far(4)
    for each in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mark(mine()), 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    ):
        each.wait()
    check(other, ranks[1 - rank])
    # A rank that `moe_ft keep` forks finds these imported, under names of their own.
    assert param_and_grad_buffer._coalescing_manager is one_gpu.no_coalescing
    sys.stdout.flush()
    os._exit(0)


def mark(value: Any) -> Any:
    value.is_far = True
    return value


def test_collectives_of_ranks_that_share_a_gpu_run_on_the_host_and_give_the_same(
    tmp_path: Path,
) -> None:
    run_ranks(share, 2, str(tmp_path), log_dir=tmp_path, env={"GPU_DAY_FORCE": "1"}).check()
