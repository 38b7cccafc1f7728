"""Runs with slots of experts and stock ones, for comparison: losses, and all weights and moments by name.

State is put together from the slices of all ranks, so that layouts can be compared. Norms of gradients are
summed in fp64: in fp32 the sum depends on how state is divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_tensorboard_writer

import pretrain_gpt_moe
from moe_ft.loop.training_loop import state_places
from moe_ft.recovery.assembly import slice_assignment
from moe_ft.state.parameters import local_parameters
from moe_ft.state.slices import describe, live_tensor
from moe_ft.units import Level
from tests import stock_program
from tests.harness import run_ranks
from tests.stock import recorded_build, scalars_of


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of a job: losses and norms by name, weights and moments by name of the parameter and key.

    Attributes:
        sent_bytes: ``[rank]`` of all collectives of equal parts; the dispatch of tokens has others.
    """

    scalars: dict[str, list[tuple[int, float]]]
    state: dict[tuple[str, str], torch.Tensor]
    sent_bytes: list[int]

    def differing(self, other: "Trained") -> list[tuple[str, str]]:
        """Return the names of tensors whose bits differ."""
        assert self.state.keys() == other.state.keys() and self.state
        return [key for key, own in self.state.items() if not torch.equal(own, other.state[key])]


def train(flags: list[str], is_stock: bool, folder: str) -> None:
    """Train on this rank, and write the slices of its state."""
    _sum_norms_in_fp64()
    counted = _count_bytes()
    with recorded_build() as built:
        (stock_program.train if is_stock else pretrain_gpt_moe.main)(flags)
    if (writer := get_tensorboard_writer()) is not None:
        writer.flush()  # the rank ends without closing it
    model, optimizer, _ = built["state"]
    places = state_places(ProcessGroupCollection.use_mpu_process_groups())
    found = {}
    for local in local_parameters(model, optimizer, places, slice_assignment("equal")):
        for entry in describe(local, Level.FULL):
            tensor = live_tensor(local, entry.key)
            assert tensor is not None
            size = torch.Size(local.entry.shape).numel()
            found[entry.parameter, entry.key, entry.start] = (size, tensor.clone())
    torch.save((found, counted[0]), Path(folder) / f"state_{dist.get_rank()}.pt")


def run(
    flags: Sequence[str],
    num_ranks: int,
    folder: Path,
    *,
    is_stock: bool = False,
    target: Any = train,
) -> Trained:
    """Train on all ranks of a new job."""
    board = ["--tensorboard-dir", str(folder / "board"), "--tensorboard-log-interval", "1"]
    arguments = ([*flags, *board], is_stock, str(folder))
    run_ranks(target, num_ranks, *arguments, log_dir=folder).check()
    state: dict[tuple[str, str], torch.Tensor] = {}
    filled: dict[tuple[str, str], int] = {}
    sent_bytes = []
    for rank in range(num_ranks):
        slices, num_bytes = torch.load(folder / f"state_{rank}.pt")
        sent_bytes.append(num_bytes)
        for (name, key, start), (size, part) in slices.items():
            whole = state.setdefault((name, key), torch.full((size,), torch.nan))
            whole[start : start + len(part)] = part.float()
            filled[name, key] = filled.get((name, key), 0) + len(part)
    assert not any(whole.isnan().any() for whole in state.values())
    return Trained(scalars=scalars_of(folder / "board"), state=state, sent_bytes=sent_bytes)


def _sum_norms_in_fp64() -> None:
    stock = ChainedOptimizer.get_grad_norm

    def get_grad_norm(self: Any) -> Any:
        if not self.grads_states_parallel_group_is_shared():
            return stock(self)
        total = torch.zeros((), dtype=torch.float64)
        for optimizer in self.chained_optimizers:
            for gradient in optimizer.get_grads_for_grad_norm():
                total += gradient.double().square().sum()
        dist.all_reduce(total, group=self.get_grad_stats_parallel_group())
        return float(total.sqrt().float())

    ChainedOptimizer.get_grad_norm = get_grad_norm


def _count_bytes() -> list[int]:
    """Count the bytes that this rank puts into collectives of equal parts; return where the count is."""
    counted = [0]

    def wrap(name: str, position: int) -> None:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            has_parts = any(isinstance(each, list) for each in (*args, *kwargs.values()))
            if not has_parts and len(args) > position and isinstance(args[position], torch.Tensor):
                counted[0] += args[position].nbytes
            return original(*args, **kwargs)

        setattr(dist, name, call)

    for name in ("all_reduce", "broadcast"):
        wrap(name, 0)
    for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        wrap(name, 1)
    return counted
