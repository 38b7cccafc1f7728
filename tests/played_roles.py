"""Jobs of tests whose ranks die between two iterations, and whose peers play their roles."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.training import get_args, training

import pretrain_gpt_moe
from megatron.fault_tolerance.degraded.degradation import Degradation
from megatron.fault_tolerance.degraded.roles import CellBatches, RolePlace
from megatron.fault_tolerance.repair.catch_up import Step
from megatron.fault_tolerance.seams import hooks
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Layers
from moe_ft.engine.memory.job_directory import node_directory
from moe_ft.loop.listeners import Built, Listeners
from moe_ft.planning.schedules import Cell
from moe_ft.recovery.inventory import look_at_memory
from tests.waiting import wait_for

LOST_AT = 2  # the first iteration without a rank
LOST = "MOE_FT_TEST_LOST_RANKS"
NODES = ("node0", "node1") * 4
# Clipping would add up another norm: sums of fp32 in another order.
COMMON = {"attention_dropout": 0.1, "clip_grad": 0.0}


@dataclass(frozen=True, kw_only=True)
class Running:
    """A job that is about to run an iteration, on one rank."""

    degradation: Degradation
    iteration: int
    built: Built
    listeners: Listeners
    step: Step


def run(
    flags: list[str],
    before: Callable[[Running], None],
    degrade: Callable[[DataSets], Degradation] = Degradation,
) -> Running:
    """Train; call something before each iteration. Return what ran last.

    Args:
        degrade: makes what plays roles.
    """
    found: list[Running] = []
    known: list[Listeners] = []

    def install(original: Any, listeners: Listeners, *given: Any) -> Any:
        known.append(listeners)
        return original(listeners, *given)

    def step(degradation: Degradation, *called: Any, **kwargs: Any) -> Any:
        (listeners,), original, args = known, partial(play, degradation, called[0]), called[1:]
        running = Running(
            degradation=degradation,
            iteration=kwargs["iteration"],
            built=args[2:5],
            listeners=listeners,
            step=Step(original, args, kwargs, listeners.loop),
        )
        found[:] = [running]
        before(running)
        return original(*args, **kwargs)

    data_sets, play = DataSets(), Degradation._train_step
    with Patches() as patches, Layers() as layers:
        patches.set(Degradation, "_train_step", step)
        data_sets.install(layers)
        degrade(data_sets).install(layers)
        patches.wrap(hooks, "installed", install)
        pretrain_gpt_moe.main(flags)
        return found[0]


def lost_ranks() -> list[int]:
    """Return the ranks that the test loses."""
    return list(json.loads(os.environ[LOST]))


def wait_for_snapshots(iteration: int) -> None:
    """Wait until all ranks have a snapshot of an iteration on a node with a rank that is not lost."""
    args, ranks = get_args(), range(int(os.environ["WORLD_SIZE"]))
    nodes = {NODES[rank] for rank in ranks if rank not in lost_ranks()}

    def are_there() -> bool:
        found = set[int]()
        for node in nodes:
            node_dir = node_directory(args.moe_ft_memory_dir, args.moe_ft_job_id, node)
            versions = look_at_memory(node_dir, node, args.moe_ft_job_id).versions
            found |= {each.rank for each in versions if each.iteration == iteration}
        return found == set(ranks)

    wait_for(are_there, f"snapshots of iteration {iteration}", 60.0)


def lose(running: Running) -> None:
    """Lose ranks, and go on without them from their last snapshot."""
    iteration, listeners = running.iteration, running.listeners
    wait_for_snapshots(iteration)
    if int(os.environ["RANK"]) in lost_ranks():
        os._exit(0)
    listeners.suspend(iteration)
    running.degradation.begin(lost_ranks(), running.built, listeners)
    listeners.loop.most_iteration = iteration
    listeners.after_setup(running.built, iteration)
    assert listeners.loop.iteration == iteration
    listeners.begin_iteration(iteration)


class ReadSamples:
    """Data set that writes down which samples are read, by iteration and data-parallel rank they are of.

    Without workers, the loop reads a batch when it needs it.
    """

    def __init__(self) -> None:
        self._data_set: Any = None
        self._reader: int | None = None
        self._read: dict[int, dict[int, list[int]]] = {}
        self._iteration = 0

    def install(self, patches: Patches) -> None:
        """Stand in for the data set that loaders are built of, until the patches end."""

        def load(original: Callable[..., Any], data_set: Any, *args: Any) -> Any:
            if data_set is None or self._data_set is not None:
                return original(data_set, *args)  # of validation
            self._data_set = data_set
            return original(self, *args)

        def read(
            original: Callable[..., Any], batches: CellBatches, place: RolePlace, cell: Cell
        ) -> Any:
            self._reader = place.reader_of(cell.pipeline)
            return original(batches, place, cell)

        patches.wrap(training, "build_pretraining_data_loader", load)
        original = CellBatches.read
        patches.set(CellBatches, "read", lambda *args: read(original, *args))

    def begin(self, iteration: int) -> None:
        """Begin an iteration; write down what those before it have read."""
        path = Path(get_args().moe_ft_event_log) / f"samples_{os.environ['RANK']}.json"
        path.write_text(json.dumps(self._read))
        self._reader, self._iteration = None, iteration

    def __len__(self) -> int:
        return len(self._data_set)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data_set, name)

    def __getitem__(self, index: int) -> Any:
        reader = mpu.get_data_parallel_rank() if self._reader is None else self._reader
        self._read.setdefault(self._iteration, {}).setdefault(reader, []).append(int(index))
        return self._data_set[index]
