"""Cells of a global batch: samples of one micro-batch of one data-parallel rank, equal ones or not.

Whatever ranks are left, an iteration has the same samples. Where cells differ in size, that needs
`--calculate-per-token-loss`: the mean is then over all tokens.
"""

import math
from contextlib import suppress
from dataclasses import dataclass

from moe_ft.arithmetic import ceil_div
from moe_ft.errors import PlanError

Sizes = tuple[tuple[int, ...], ...]  # [micro-batch][data-parallel rank] samples


def cell_sizes(global_batch_size: int, micro_batch_size: int, num_ranks: int) -> Sizes:
    """Divide a global batch into cells whose sizes differ by 1 at most, all ranks in every micro-batch.

    Ranks with all experts of a layer need the same number of micro-batches: each takes part in every
    all-to-all.

    Args:
        global_batch_size: samples of an iteration.
        micro_batch_size: samples of a cell, at most.
        num_ranks: data-parallel ranks.

    Returns:
        ``[micro-batch][rank]`` samples, as few micro-batches as can be. If the ranks divide the batch, they
        are Megatron's.

    Raises:
        PlanError: if there are fewer samples than cells.
    """
    count = ceil_div(global_batch_size, micro_batch_size * num_ranks)
    size, rest = divmod(global_batch_size, count * num_ranks)
    if not size:
        raise PlanError(
            f"a global batch of {global_batch_size} samples has none for some of {num_ranks} data-parallel "
            f"ranks, each with {count} micro-batches"
        )
    cells = [size + (cell < rest) for cell in range(count * num_ranks)]
    return tuple(tuple(cells[row * num_ranks :][:num_ranks]) for row in range(count))


def samples_of(sizes: Sizes, consumed: int, micro_batch: int, rank: int) -> range:
    """Return the samples of a cell: micro-batch after micro-batch, in each rank after rank.

    Args:
        sizes: of the cells of the iteration.
        consumed: samples of all iterations before.
    """
    before = sum(map(sum, sizes[:micro_batch])) + sum(sizes[micro_batch][:rank])
    return range(consumed + before, consumed + before + sizes[micro_batch][rank])


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Ranks that hold a whole model, and what a job of several of them needs.

    Attributes:
        num_ranks: pipeline stages x the ranks of each that belong together.
        num_readers: data-parallel ranks among those of one stage.
        num_experts: of a layer; 0 for a model without experts.
        num_slots: of all its ranks, for experts of one layer.
        batch: global and micro-batch size.
        is_even: whether all cells must have the size of a micro-batch.
    """

    num_ranks: int
    num_readers: int = 1
    num_experts: int = 0
    num_slots: int = 0
    batch: tuple[int, int]
    is_even: bool = False

    def fit(self, num_ranks: int) -> tuple[Sizes, int]:
        """Return the cells of as many data-parallel ranks as can train, and the ranks that are left over.

        Raises:
            PlanError: if the ranks are too few.
        """
        for size in range(num_ranks // self.num_ranks, 0, -1):
            if size * self.num_slots < self.num_experts:
                break
            with suppress(PlanError):  # too many for the batch
                sizes = cell_sizes(*self.batch, size * self.num_readers)
                if not self.is_even or min(map(min, sizes)) == self.batch[1]:
                    return sizes, num_ranks - size * self.num_ranks
        raise PlanError(
            f"{num_ranks} ranks are too few: a whole model takes {self.num_ranks}, "
            f"{self.num_experts} experts of a layer {self.fewest_ranks()}"
        )

    def fewest_ranks(self) -> int:
        """Return the fewest ranks on which it trains."""
        return self.num_ranks * max(1, ceil_div(self.num_experts, self.num_slots or 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Layout of the ranks that are there.

    Attributes:
        ep: expert-parallel ranks.
        num_waiting: ranks that are left over.
    """

    ep: int
    sizes: Sizes
    num_waiting: int


def ranks_of_model(
    *,
    num_stages: int,
    tensor_ranks: int,
    context_ranks: int = 1,
    expert_ranks: int = 1,
    ep: int = 1,
) -> int:
    """Return the ranks of the smallest whole model, as `fit_ranks` says."""
    return num_stages * math.lcm(tensor_ranks * context_ranks, expert_ranks * ep)


def fit_ranks(
    num_ranks: int,
    *,
    num_stages: int,
    tensor_ranks: int,
    context_ranks: int = 1,
    expert_ranks: int = 1,
    ep: int = 1,
    batch: tuple[int, int],
    is_even: bool,
    num_experts: int = 0,
    num_slots: int = 0,
) -> Fit:
    """Choose the layout of the ranks that are there: data parallelism shrinks first, then `ep`.

    Ranks of a stage that share tensors, sequences or experts come and go together. Where not even one such
    group is left, experts are on fewer ranks: on as many as still fit, and a rank then has more of them.

    Args:
        expert_ranks: tensor-parallel ranks of an expert.
        ep: expert-parallel ranks at most; a divisor of the number of experts.
        batch: global and micro-batch size.
        num_experts: of a layer, times the slots that each must have.
        num_slots: of a rank, for experts of one layer; 0 where Megatron places experts.

    Raises:
        PlanError: if no whole model fits, or none that can share the batch.
    """
    sizes_of_model = {
        "num_stages": num_stages,
        "tensor_ranks": tensor_ranks,
        "context_ranks": context_ranks,
        "expert_ranks": expert_ranks,
    }
    for size in (each for each in range(ep, 0, -1) if ep % each == 0):
        whole = ranks_of_model(**sizes_of_model, ep=size)
        replica = Replica(
            num_ranks=whole,
            num_readers=whole // (num_stages * tensor_ranks * context_ranks),
            num_experts=num_experts if num_slots else 0,
            num_slots=whole // num_stages * num_slots,
            batch=batch,
            is_even=is_even,
        )
        with suppress(PlanError):
            sizes, num_waiting = replica.fit(num_ranks)
            return Fit(ep=size, sizes=sizes, num_waiting=num_waiting)
    fewest = replica.fewest_ranks()  # experts on one rank each: the smallest model
    if num_ranks < fewest:
        raise PlanError(f"{num_ranks} ranks are too few: a whole model takes at least {fewest}")
    raise PlanError(
        f"whole models of {num_ranks} ranks or fewer, {fewest} at least, cannot share a global batch of "
        f"{batch[0]} samples{' equally' * is_even} in micro-batches of {batch[1]}"
    )
