"""Iterations whose samples the data-parallel ranks cannot share equally: Megatron's counts and sampler.

moe_ft/planning/cells.py divides a global batch into cells. Megatron counts an iteration as whole
micro-batches of all ranks: here its samples are those of the global batch, and each rank reads its cells.
elastic.py decides when that is needed.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, override

from megatron.core import num_microbatches_calculator as calculators
from megatron.core.datasets.utils import Split
from megatron.training import get_args
from megatron.training.datasets import data_samplers

from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Layer, Layers
from megatron.fault_tolerance.seams.versions import setting
from moe_ft.planning.cells import cell_sizes, samples_of

_SAMPLER = "MegatronPretrainingSampler"


class UnevenBatches(calculators.ConstantNumMicroBatchesCalculator):  # type: ignore[misc]
    """Calculator of a constant batch that whole micro-batches of all ranks need not divide."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ) -> None:
        calculators.NumMicroBatchesCalculator.__init__(self)
        self.num_micro_batches = len(
            cell_sizes(global_batch_size, micro_batch_size, data_parallel_size)
        )
        self.current_global_batch_size = global_batch_size
        self.current_running_global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size


class CellSampler(data_samplers.MegatronPretrainingSampler):  # type: ignore[misc]
    """Sampler of one rank's cells: an iteration has the samples of a global batch."""

    @override
    def __iter__(self) -> Iterator[list[int]]:
        batch_size = calculators.get_current_running_global_batch_size()
        num_ranks = self.micro_batch_times_data_parallel_size // self.micro_batch_size
        sizes = cell_sizes(batch_size, self.micro_batch_size, num_ranks)
        consumed = self.consumed_samples
        while consumed + batch_size <= self.total_samples:
            for number in range(len(sizes)):
                yield list(samples_of(sizes, consumed, number, self.data_parallel_rank))
            consumed += batch_size


def allow_uneven_batches() -> None:
    """Have Megatron accept a batch that whole micro-batches do not divide. For the whole process."""
    calculators.ConstantNumMicroBatchesCalculator = UnevenBatches


def samples_of_iteration(args: argparse.Namespace) -> int:
    """Return the samples that the whole job reads in the current iteration."""
    return _counted(args) - excess_samples(args)


def excess_samples(args: argparse.Namespace) -> int:
    """Return the samples of an iteration that Megatron counts and that no rank reads; 0 with equal cells."""
    is_uneven = isinstance(calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR, UnevenBatches)
    batch_size = calculators.get_current_running_global_batch_size() if is_uneven else 0
    return _counted(args) - batch_size if is_uneven else 0


def _counted(args: argparse.Namespace) -> int:
    num_readers = args.data_parallel_size * setting(args, "gtp_weight_remat_size")
    return int(calculators.get_num_microbatches() * args.micro_batch_size * num_readers)


@contextmanager
def stepping_by_samples(scheduler: Any) -> Iterator[None]:
    """Step Megatron's scheduler by the samples of an iteration instead of those that Megatron counts."""

    def step(original: Callable[..., Any], increment: int) -> Any:
        return original(increment=increment - excess_samples(get_args()))

    with Layers() as layers:
        if scheduler is not None and excess_samples(get_args()):
            layers.put(Layer.LISTENERS, {"OptimizerParamScheduler.step": step}, of=scheduler)
        yield


def load_cells(original: Callable[..., Any], dataset: Any, consumed_samples: int) -> Any:
    """Build Megatron's loader of training data, which reads cells if they are not equal."""
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    if not excess_samples(get_args()) or split in (Split.valid, Split.test):
        return original(dataset, consumed_samples)
    with Patches() as patches:
        patches.set(data_samplers, _SAMPLER, CellSampler)
        return original(dataset, consumed_samples)
