"""Stand-ins for what the engine is given by a training job, built around plain tensors.

Parameters, an inner optimizer, the record, an identity and a layout: enough to run moe_ft's own classes
without Megatron's model and optimizer. Every parameter is one expert, hence one unit.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from moe_ft.engine.background import EventQueue, ThreadWorker
from moe_ft.engine.clock import Clock
from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.index import RecordLog, SnapshotIndexer
from moe_ft.engine.snapshots.job import SnapshotRequest, SnapshotState
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.engine.snapshots.writer import SnapshotWriter
from moe_ft.errors import SnapshotError
from moe_ft.faults import Phase
from moe_ft.format.entries import ParameterEntry
from moe_ft.format.identity import Identity
from moe_ft.recovery.readers import FetchedUnit
from moe_ft.state import record as records
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import DTYPES
from moe_ft.strategies.interface import WindowPlan
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.builders import make_identity

JOB_ID = "benchmark"
NUM_EXPERTS = 64
LAYER = "layer.0"
_COPY_DEADLINE_S = 60.0
_STATE_NAMES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def adam() -> Any:
    """Return an inner optimizer as Megatron has it, around an Adam that keeps its step in the group."""
    group = {"params": [], "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "step": 1}
    return SimpleNamespace(
        config=SimpleNamespace(optimizer="adam"),
        optimizer=SimpleNamespace(state={}, param_groups=[group]),
    )


def parameters_of(state: Mapping[str, torch.Tensor], optimizer: Any) -> list[LocalParameter]:
    """Make parameters of ``{index}.weight``, ``.master``, ``.exp_avg``, ``.exp_avg_sq``.

    Args:
        state: flat tensors, which the parameters share.
        optimizer: of `adam`, which gets the masters and the moments.
    """
    parameters = []
    for index in range(len(state) // 4):
        weight, master = state[f"{index}.weight"], state[f"{index}.master"]
        optimizer.optimizer.param_groups[0]["params"].append(master)
        optimizer.optimizer.state[master] = {
            key: state[f"{index}.{key}"] for key in ("exp_avg", "exp_avg_sq")
        }
        layer, expert = divmod(index, NUM_EXPERTS)
        parameters.append(
            LocalParameter(
                unit=UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert),
                name=str(index),
                entry=ParameterEntry(shape=tuple(weight.shape)),
                parameter=torch.nn.Parameter(weight, requires_grad=False),
                start=0,
                end=weight.numel(),
                optimizer=optimizer,
                master=master,
                is_sharded=True,
                is_expert=True,
            )
        )
    return parameters


def state_of(units: Mapping[str, FetchedUnit]) -> dict[str, torch.Tensor]:
    """Return restored units under the names of `parameters_of`; weights follow from the masters."""
    state = {}
    for unit in units.values():
        for tensor in unit.entry.tensors:
            value = torch.frombuffer(
                unit.content,
                dtype=DTYPES[tensor.dtype],
                count=tensor.end - tensor.start,
                offset=tensor.offset,
            )
            state[f"{tensor.parameter}.{_STATE_NAMES[tensor.key]}"] = value
            if tensor.key == "param":
                state[f"{tensor.parameter}.weight"] = value.bfloat16()
    return state


def record_taker(optimizer: Any, parameters: Sequence[LocalParameter]) -> records.RecordTaker:
    """Return what takes the records of a job without buffers, as the engine's session makes it."""
    if not torch.cuda.is_available():
        cuda: Any = torch.cuda
        cuda.get_rng_state = torch.get_rng_state
    scheduler = SimpleNamespace(state_dict=lambda: {"num_steps": 1})
    return records.RecordTaker([], optimizer, scheduler, parameters)


def facts(iteration: int) -> records.IterationFacts:
    """Return what a training loop would say of an iteration."""
    return records.IterationFacts(
        iteration=iteration,
        grad_norm=1.0,
        num_tokens=None,
        num_floating_point_operations=0.0,
        tokens_per_expert={},
        counters=records.LoopCounters(consumed_train_samples=iteration, num_microbatches=1),
    )


def identity(world_size: int) -> Identity:
    """Return the identity of a run that was never interrupted."""
    return make_identity(JOB_ID, world_size=world_size, job_id=JOB_ID)


def catalog_of(parameters: Sequence[LocalParameter]) -> UnitCatalog:
    """Return the units of `parameters_of`."""
    return UnitCatalog(parameters, leaves_out_frozen=False)


def layouts_of(parameters: Sequence[LocalParameter]) -> UnitLayouts:
    """Return what lays out the units of `parameters_of`."""
    return UnitLayouts(catalog_of(parameters), dp_rank=0)


def no_fault(phase: Phase, iteration: int) -> None:
    """Be the hook of a job in which nothing fails."""


def snapshot(
    parameters: Sequence[LocalParameter],
    plan: WindowPlan,
    layout: FileLayout,
    directory: Path,
    iteration: int,
) -> Region:
    """Return a region that holds a committed window of one snapshot, taken by the engine's own thread.

    Raises:
        SnapshotError: if that failed.
    """
    region = Region(directory, 0, layout.num_bytes)
    region.open()
    reports = EventQueue()
    taker = record_taker(parameters[0].optimizer, parameters)
    log = RecordLog(taker.complete)
    log.append(iteration, taker.capture(facts(iteration)))
    writer = SnapshotWriter(
        StateCopier(parameters, None, 0),
        SnapshotIndexer(identity(1), 0, "node", parameters, log),
        log,
        None,
        None,
        reports,
        no_fault,
        ThreadWorker("snapshot"),
        Clock(),
    )
    request = SnapshotRequest(
        region=region,
        window=lambda: layout,
        iteration=iteration,
        keep_iteration=None,
        plan=plan.snapshots[0],
    )
    writer.start()
    job = writer.submit(request)
    writer.close(_COPY_DEADLINE_S)
    if job.state is not SnapshotState.COMPLETE:
        raise SnapshotError(f"the snapshot is {job.state.name}: {reports.drain()}")
    return region
