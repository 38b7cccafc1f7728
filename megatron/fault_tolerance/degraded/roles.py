"""Places of ranks in the schedules of shared micro-batches, and the batches of any of them.

A role is a place (pipeline, stage) of the job, see planning/schedules.py. executor.py runs its operations.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training import get_args

from megatron.fault_tolerance.seams.data_sets import DataSets
from moe_ft.planning.cells import samples_of
from moe_ft.planning.lost_ranks import Layout
from moe_ft.planning.schedules import Cell, Role


def layout_of_job(args: argparse.Namespace) -> Layout:
    """Return the layout of the job that Megatron's arguments describe."""
    has_experts = bool(args.num_experts)
    return Layout(
        num_stages=args.pipeline_model_parallel_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        dp=args.data_parallel_size,
        ep=args.expert_model_parallel_size if has_experts else 1,
        expert_tp=args.expert_tensor_parallel_size if has_experts else 1,
    )


@dataclass(frozen=True)
class RolePlace:
    """Place of a rank in the layout of its job."""

    layout: Layout
    rank: int

    @property
    def role(self) -> Role:
        """The pipeline and the stage of the rank."""
        return self.layout.role_of(self.rank)

    def rank_of(self, role: Role) -> int:
        """Return the rank with that role that has the same part of tensors and sequences as this one."""
        ranks = self.layout.ranks_of(role)
        return ranks[self.rank % len(ranks)]


class CellBatches:
    """Batches by cell, whichever role a rank has. Owned by the training thread.

    The loop's iterator of a rank has only its own, and only in order.
    """

    def __init__(self, data_sets: DataSets) -> None:
        self._data_sets = data_sets

    def read(self, cell: Cell | None, size: int) -> Iterator[Any] | None:
        """Return an iterator over the one batch of a cell of this iteration; None if the rank reads none.

        Args:
            cell: None: the batch is one short sample without a loss.
            size: samples of a cell, as many as those of a micro-batch; without one, tokens of the sample.
        """
        if (loaded := self._data_sets.of_training) is None:
            return None
        args = get_args()
        if cell is None:
            batch = loaded.collate([loaded.data_set[args.consumed_train_samples]])
            for name, each in batch.items():
                is_square = name == "attention_mask"
                batch[name] = each[..., :size, :size] if is_square else each[:, :size]
            batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
            return iter([batch])
        sizes = ((size,) * args.data_parallel_size,) * (cell.micro_batch + 1)
        samples = samples_of(sizes, args.consumed_train_samples, cell.micro_batch, cell.pipeline)
        return iter([loaded.collate([loaded.data_set[each] for each in samples])])
