"""Roles that a rank plays: their places in the healthy job, their batches, random numbers and gradients.

A role is a place (pipeline, stage) of the healthy job. A rank plays its own, and those of dead ranks that
planning/schedules.py gives it. executor.py runs their operations, deputies.py has their shards of the
optimizer.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.training import get_args

from megatron.fault_tolerance.seams.data_sets import DataSets
from moe_ft.format.records import RandomStates
from moe_ft.planning.cells import samples_of
from moe_ft.planning.lost_ranks import Layout
from moe_ft.planning.schedules import Cell, Role
from moe_ft.state.random_states import Randomness, capture_rng, decoded_rng, restore_rng


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


def stages_of_job() -> list[list[list[int]]]:
    """Return ``[stage][group]`` the ranks that are lost together."""
    layout = layout_of_job(get_args())
    ranks, size = range(get_args().world_size), layout.group_size
    groups = [list(ranks[first : first + size]) for first in ranks[::size]]
    count = layout.num_groups
    return [groups[first : first + count] for first in range(0, len(groups), count)]


@dataclass(frozen=True)
class RolePlace:
    """Place of a rank in the layout of the healthy job."""

    layout: Layout
    rank: int

    @cached_property
    def _ranks_of_stage(self) -> int:
        return self.layout.num_groups * self.layout.group_size

    @property
    def role(self) -> Role:
        """The pipeline and the stage of the rank."""
        within = self.rank % self._ranks_of_stage
        return within // self.layout.group_size, self.rank // self._ranks_of_stage

    def rank_of(self, role: Role) -> int:
        """Return the rank with that role that has the same place in its group as this one."""
        return self.layout.ranks_of(role)[self.rank % self.layout.group_size]

    def reader_of(self, pipeline: int) -> int:
        """Return the data-parallel rank whose samples this rank reads in a pipeline."""
        return (self.rank_of((pipeline, 0))) // (self.layout.tp * self.layout.cp)


class CellBatches:
    """Batches by cell, whichever role a rank plays. Owned by the training thread.

    The loop's iterator of a rank has only its own, and only in order.
    """

    def __init__(self, data_sets: DataSets) -> None:
        self._data_sets = data_sets

    def read(self, place: RolePlace, cell: Cell) -> Iterator[Any] | None:
        """Return an iterator over the one batch of a cell of this iteration; None if the rank reads none."""
        if (loaded := self._data_sets.of_training) is None:
            return None
        args = get_args()
        # All cells have the size of a micro-batch, as Megatron's own have.
        sizes = ((args.micro_batch_size,) * args.data_parallel_size,) * (cell.micro_batch + 1)
        samples = samples_of(
            sizes, args.consumed_train_samples, cell.micro_batch, place.reader_of(cell.pipeline)
        )
        return iter([loaded.collate([loaded.data_set[each] for each in samples])])


class RoleRandomness:
    """Random numbers of the roles of one rank: each role draws its own. Owned by the training thread."""

    def __init__(self, own: int, *, is_whole: bool = True) -> None:
        """Play the own role.

        Args:
            is_whole: whether other roles have numbers, from a recovery. Where peers share a role, those who
                are not its deputy begin with their own.
        """
        self._own = self._active = own
        self._is_whole = is_whole
        self._states: dict[int, dict[str, Any]] = {}

    def play(self, pipeline: int) -> None:
        """Draw the numbers of a pipeline's role from now on."""
        if pipeline == self._active:
            return
        self._states[self._active] = capture_rng()
        if not self._is_whole:
            self._states.setdefault(pipeline, self._states[self._own])
        restore_rng(self._states[pipeline])
        self._active = pipeline

    def of(self, pipeline: int) -> Randomness:
        """Return the random numbers of a dead role between iterations, when it is not played."""

        def apply(states: RandomStates) -> None:
            self._states[pipeline] = decoded_rng(states)

        return Randomness(lambda: self._states[pipeline], apply)


class RoleGradients:
    """Gradients by role: each role adds up its own, and the sums are added when all are complete.

    The order of a sum is then that of the healthy job. Owned by the training thread.
    """

    def __init__(self, chunk: Any, own: int) -> None:
        """Take a model chunk as DDP wraps it."""
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        self._buckets = [bucket for group in groups for bucket in group.buckets]
        self._own = self._active = own
        self._views = {own: {p: p.main_grad for each in self._buckets for p in each.params_list}}
        self._sums: dict[int, list[torch.Tensor]] = {}  # [bucket]

    def begin(self, roles: Sequence[int]) -> None:
        """Begin an iteration with gradients of zero for the roles besides the own one."""
        for role in set(roles) - {self._own}:
            if role not in self._sums:
                self._add(role)
            for each in self._sums[role]:
                each.zero_()

    def _add(self, role: int) -> None:
        self._sums[role], self._views[role] = [], {}
        for bucket in self._buckets:
            total = torch.zeros_like(bucket.grad_data)
            self._sums[role].append(total)
            for parameter in bucket.params_list:
                start, end = bucket.param_to_index[parameter]
                self._views[role][parameter] = total[start:end].view(parameter.main_grad.shape)

    def play(self, role: int) -> None:
        """Have backward passes add to the gradients of a role from now on."""
        if role != self._active:
            for parameter, view in self._views[role].items():
                parameter.main_grad = view
            self._active = role

    def add_up(self, roles: Sequence[int]) -> None:
        """Add the gradients of other roles to the own ones, which DDP then scales and reduces.

        It scales by a power of two if there are as many data-parallel ranks, and the sum is then the same as
        that of scaled ones.
        """
        for role in sorted(set(roles) - {self._own}):
            for bucket, total in zip(self._buckets, self._sums[role], strict=True):
                bucket.grad_data.add_(total)
