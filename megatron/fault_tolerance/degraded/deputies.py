"""Shards of the optimizer that dead ranks had, on the live ranks that are their deputies.

A deputy builds Megatron's distributed optimizer again, over the same buffers, for the place of the dead rank.
Masters and moments come from the memory tier. In each step it runs before the deputy's own optimizer, whose
gather of weights then carries both.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import RepairError
from moe_ft.loop.listeners import Built
from moe_ft.loop.training_loop import state_places
from moe_ft.planning.recovery import Source, Tier
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.put_back import put_back
from moe_ft.recovery.readers import FetchedUnit, MemoryReader, read_unit
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import local_parameters
from moe_ft.state.tensors import inner_optimizers, owned_parameters
from moe_ft.units import Level

Function = Callable[..., Any]


class Deputies:
    """Shards of others on this rank. Owned by the training thread.

    Attributes:
        shards: by dead rank, Megatron's optimizer of its shard.
    """

    def __init__(self) -> None:
        self.shards: dict[int, Any] = {}
        self._build: Function | None = None
        self._gathered: list[list[Any]] = []

    def install(self, patches: Patches) -> None:
        """Watch the optimizer being built."""
        patches.wrap(training, "get_megatron_optimizer", self._note)

    def _note(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Build the optimizer, and remember how, with what ranks have told each other meanwhile."""

        def gather(gather_original: Function, values: list[Any], *rest: Any, **given: Any) -> None:
            gather_original(values, *rest, **given)
            self._gathered.append(list(values))

        self._gathered = []
        with Patches() as patches:
            patches.wrap(dist, "all_gather_object", gather)
            result = original(*args, **kwargs)

        def build() -> Any:
            answers = iter(self._gathered)

            def answer(values: list[Any], *_: Any, **__: Any) -> None:
                values[:] = next(answers)

            with Patches() as patches:
                patches.set(dist, "all_gather_object", answer)
                return original(*args, **kwargs)

        self._build = build
        return result

    def take(self, dead: int, built: Built, memory: "Memory", iteration: int) -> None:
        """Become the deputy of a dead rank, with its state at an iteration. Not collective.

        Raises:
            RepairError: if that state is not in this node's memory.
        """
        model, optimizer, _ = built
        shard = self._build_for(dead, model)
        memory.put_back(dead, (model, shard), iteration)
        for inner, own in _pairs(shard, optimizer):
            _take_steps(inner, own)
            # One collective answers for both: others expect no second one.
            inner.has_grad_norm_group = own.has_grad_norm_group
            inner._defer_param_sync = True  # the own ones gather afterwards
        self.shards[dead] = shard

    def _build_for(self, dead: int, model: Sequence[Any]) -> Any:
        """Build the optimizer of a dead rank's shard; what points from weights to masters stays."""
        assert self._build is not None
        with Patches() as patches:
            for chunk in model:
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    group = buffer.data_parallel_group
                    patches.set(buffer, "data_parallel_group", _Seat(group, dead))
                for parameter in chunk.parameters():
                    for name in ("main_param", "main_param_sharded"):
                        patches.set(parameter, name, getattr(parameter, name, None))
            return self._build()

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Have a step of the outermost optimizer be that of all shards."""
        more = []
        for inner, own in (
            pair for each in self.shards.values() for pair in _pairs(each, optimizer)
        ):
            groups = zip(inner.optimizer.param_groups, own.optimizer.param_groups, strict=True)
            for group, of_own in groups:  # which the scheduler has set
                group.update({key: value for key, value in of_own.items() if key != "params"})
            more.append(inner)
        chain = optimizer.chained_optimizers
        optimizer.chained_optimizers = [*more, *chain]
        try:
            yield
        finally:
            optimizer.chained_optimizers = chain


def _pairs(shard: Any, optimizer: Any) -> list[tuple[Any, Any]]:
    return list(zip(inner_optimizers(shard), inner_optimizers(optimizer), strict=True))


def _take_steps(inner: Any, own: Any) -> None:
    """Give the state of each parameter the number of steps that all parameters have taken."""
    steps = [state["step"] for state in own.optimizer.state.values() if "step" in state]
    for _, master, _ in owned_parameters(inner) if steps else ():
        state = inner.optimizer.state[master]
        state["step"] = steps[0].clone() if isinstance(steps[0], torch.Tensor) else steps[0]


class _Seat:
    """Stands for a group while an optimizer asks it for its rank: that of a dead member."""

    def __init__(self, group: Any, dead: int) -> None:
        self._group, self._rank = group, dist.get_process_group_ranks(group).index(dead)

    def rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class Memory:
    """Memory of this node, as a deputy reads it: regions of its ranks, and replicas of others."""

    def __init__(self, node_dir: Path, node: str, job_id: str) -> None:
        self._node_dir, self._node, self._job_id = node_dir, node, job_id

    def find(self, rank: int, iteration: int) -> Source | None:
        """Return the source of a rank's state at an iteration; None if it is not here."""
        inventory = look_at_memory(self._node_dir, self._node, self._job_id)
        for version in inventory.versions:
            if (version.rank, version.iteration, version.window) == (rank, iteration, 1):
                return Source(tier=Tier.MEMORY, version=version)
        return None

    def put_back(self, rank: int, live: tuple[Sequence[Any], Any], iteration: int) -> None:
        """Copy a rank's masters and moments into an optimizer of its shard.

        Raises:
            RepairError: if they are not here.
        """
        source = self.find(rank, iteration)
        if source is None:
            raise RepairError(
                f"nobody can stand in for rank {rank}: its state at iteration {iteration} is not in the "
                f"memory of node {self._node}, where its deputy is"
            )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        places = state_places(groups)
        seats = {"dp": _Seat(groups.dp_cp, rank), "expt_dp": _Seat(groups.expt_dp, rank)}
        places = replace(
            places,
            **{
                name: replace(getattr(places, name), rank=seat.rank())
                for name, seat in seats.items()
            },
        )
        parameters = local_parameters(*live, places, assign_equal_slices)
        catalog = UnitCatalog(parameters, leaves_out_frozen=False)
        reader = MemoryReader(self._node_dir / source.version.path)
        found = []
        for unit in catalog.units:
            if catalog.tensors(unit, Level.FULL):
                entry, content = read_unit(reader, str(unit))
                found.append(
                    FetchedUnit(unit=unit, source=source, entry=entry, content=content, stays=False)
                )
        put_back(found, catalog, iteration, None)
