"""Pipeline stages of a job that need not exist: Megatron's model and optimizer, without memory for them.

Each stage is built once, on the meta device and in a fake world: Megatron makes the groups of one rank, and
nothing is sent. The other ranks of a stage hold the same tensors, other slices of them, and other experts.
Slices come from the mapping of Megatron's distributed optimizer, which is asked for each rank; experts are
numbered on. Nothing of the state is typed in: state/ names the units and their tensors, as in training.

plan.py reads the command line.
"""

import argparse
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import global_vars, initialize, training

from megatron.fault_tolerance.program.model import embedding_ranks, stock_config
from megatron.fault_tolerance.seams.collectives import alone, fake_world
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.versions import installed_version, later
from moe_ft.arithmetic import round_up
from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.format.entries import TensorEntry, tensor_bytes
from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.loop.training_loop import state_places
from moe_ft.planning.planned_job import PlannedRank, PlannedStage, UnitBytes
from moe_ft.recovery.assembly import replicated_bytes, slice_assignment
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import GroupPlace, LocalParameter, home_part, local_parameters
from moe_ft.state.tensors import inner_optimizers, layer_wise_chains
from moe_ft.strategies.registry import chosen
from moe_ft.units import Level, UnitId, UnitKind, UnitPart

# By the name that this file gives each: Megatron's.
_GROUPS = {
    "dp": "DATA_PARALLEL_GROUP_WITH_CP",
    "expt_dp": "EXPERT_DATA_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
}
_TYPES = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}

Function = Callable[..., Any]
Slices = Mapping[str, tuple[int, int]]  # by name of a parameter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BuiltStages:
    """The stages of a job.

    Attributes:
        by_sharding: each kind of stages once, as --moe-ft-sharding divides replicated state; "equal" alone if
            the distributed optimizer divides all.
        parameters: of every unit of the model, copies in other stages left out.
    """

    by_sharding: Mapping[str, tuple[PlannedStage, ...]]
    parameters: Mapping[UnitId, int]


def build_stages(
    args: argparse.Namespace, config: MoeFtConfig, describe_optimizer: Callable[[Any], None]
) -> BuiltStages:
    """Build each pipeline stage of a job as one of its ranks.

    Args:
        args: Megatron's validated arguments, of what can be built on this machine.
        describe_optimizer: makes Megatron's outermost optimizer say what the one of training keeps.
    """
    if (builder := later("megatron.training.models.gpt", "GPTModelBuilder")) is None:
        raise ConfigError(
            f"moe_ft plan needs megatron-core 0.19 or newer, and {installed_version()} is used. Put a newer "
            "one first on PYTHONPATH."
        )
    kinds: dict[Hashable, _Ranks] = {}
    parameters: dict[UnitId, int] = {}
    pipeline = [0]  # the first rank of each stage, known once a world is made
    # Megatron lists the ranks of every group for each world; all worlds have the same groups.
    rank_groups = functools.cache(_rank_groups)
    for number in range(args.pipeline_model_parallel_size):
        model_config, described = stock_config(args)
        with (
            _world(args, model_config, pipeline[number], rank_groups) as world,
            _without_memory(),
            alone(),
        ):
            groups = ProcessGroupCollection.use_mpu_process_groups()
            model = builder(model_config).build_distributed_models(
                pg_collection=groups,
                ddp_config=described["cfg_container"].ddp,
                overlap_param_gather_with_optimizer_step=args.overlap_param_gather_with_optimizer_step,
                data_parallel_random_init=False,
            )
            settings, overrides = training.get_megatron_optimizer_config(args)
            optimizer = get_megatron_optimizer(
                settings, model, config_overrides=overrides, use_gloo_process_groups=False
            )
            describe_optimizer(optimizer)
            own = local_parameters(
                model, optimizer, state_places(groups), slice_assignment("equal")
            )
        pipeline = next(ranks for ranks in world.ranks["pp"] if world.rank in ranks)
        ranks = _Ranks(config, optimizer, own, world)
        parameters |= ranks.count(with_copies=False)
        kinds.setdefault(ranks.kind(), ranks).numbers.append(number)
    is_divided = all(ranks.is_divided for ranks in kinds.values())
    return BuiltStages(
        by_sharding={
            sharding: tuple(ranks.planned_stage(sharding) for ranks in kinds.values())
            for sharding in (("equal",) if is_divided else ("none", "equal"))
        },
        parameters=parameters,
    )


class _PlannedWorld:
    """Groups that Megatron makes, of all ranks, as seen by one of them.

    Attributes:
        rank: this one.
        ranks: by name of a group in `_GROUPS`, those of each group.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ranks: dict[str, list[list[int]]] = {name: [] for name in _GROUPS}

    def note(self, original: Function, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        """Note the ranks of a group, and make it if this rank is in it."""
        for name, description in _GROUPS.items():
            if kwargs["group_desc"] == description:
                self.ranks[name].append(list(ranks))
        return original(ranks, *args, **kwargs) if dist.get_rank() in ranks else None

    def places(self, name: str) -> dict[int, tuple[int, GroupPlace]]:
        """Return the number of each rank's group, and its place in there."""
        return {
            rank: (number, GroupPlace(rank=place, size=len(ranks)))
            for number, ranks in enumerate(self.ranks[name])
            for place, rank in enumerate(ranks)
        }


_list_groups: Callable[..., list[list[int]]] = parallel_state.generate_masked_orthogonal_rank_groups


def _rank_groups(
    world_size: int, parallel_size: tuple[int, ...], mask: tuple[bool, ...]
) -> list[list[int]]:
    return _list_groups(world_size, [*parallel_size], [*mask])


@contextmanager
def _world(
    args: argparse.Namespace, model_config: Any, rank: int, rank_groups: Function
) -> Iterator[_PlannedWorld]:
    """Let this process be a rank of the job, whose peers do not exist."""
    assert not dist.is_initialized(), "a plan is made where nothing trains"
    world = _PlannedWorld(rank)
    args.rank = rank
    with fake_world(args), Patches() as patches:
        patches.set(global_vars, "_GLOBAL_ARGS", args)
        patches.wrap(parallel_state, "create_group", world.note)
        patches.set(
            parallel_state,
            "generate_masked_orthogonal_rank_groups",
            lambda size, parallel, mask: [
                [*ranks] for ranks in rank_groups(size, tuple(parallel), tuple(mask))
            ],
        )
        try:
            initialize._initialize_distributed(
                functools.partial(embedding_ranks, model_config), None, None
            )
            initialize._set_random_seed(args.seed)
            yield world
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@contextmanager
def _without_memory() -> Iterator[None]:
    """Make tensors on the meta device, whatever device Megatron names."""
    with Patches() as patches, torch.device("meta"):
        patches.set(torch.cuda, "current_device", lambda: torch.device("meta"))
        patches.set(torch.Tensor, "type", _type_of)
        yield


def _type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the name by which Megatron's optimizers tell types, as if the tensor were on a GPU."""
    if args or kwargs:
        return tensor.to(*args, **kwargs)
    return f"torch.cuda.{_TYPES.get(tensor.dtype, tensor.dtype)}Tensor"


class _Ranks:
    """The ranks of a stage of which one was built.

    Attributes:
        numbers: of the stages that are like it.
        is_divided: whether the distributed optimizer divides all that several ranks hold.
    """

    def __init__(
        self,
        config: MoeFtConfig,
        optimizer: Any,
        parameters: Sequence[LocalParameter],
        world: _PlannedWorld,
    ) -> None:
        self.numbers: list[int] = []
        self.is_divided = all(each.is_sharded for each in parameters)
        self._config = config
        self._optimizer = optimizer
        self._parameters = parameters
        self._world = world
        self._ep_ranks = next(ranks for ranks in world.ranks["ep"] if world.rank in ranks)
        self._num_local = len({each.unit.expert for each in parameters if each.unit.expert >= 0})
        # Parts of all experts, of the rank that has the most: its slices are those of all ranks.
        self._homes = {
            each.name: part
            for each in parameters
            if (part := home_part(each.parameter)) is not None
        }
        self._sizes: dict[tuple[str, bool, int], Mapping[UnitId, UnitBytes]] = {}

    def kind(self) -> Hashable:
        """Return what stages have in common that differ in the numbers of their layers alone."""
        layers = dict.fromkeys((each.unit.block, each.unit.layer) for each in self._parameters)
        places = {layer: place for place, layer in enumerate(layers)}
        units = (
            (
                (each.unit.kind, each.unit.block, each.unit.expert),
                places[each.unit.block, each.unit.layer],
                (each.entry.shape, each.entry.tp_size, each.parameter.dtype, each.is_sharded),
            )
            for each in self._parameters
        )
        buckets = (
            (bucket.offset, bucket.grad_data.numel())
            for buffer in self._buffers()
            for bucket in buffer.buckets
        )
        return tuple(units), tuple(buckets)

    def _buffers(self) -> Iterator[Any]:
        for inner in inner_optimizers(self._optimizer):
            yield from getattr(inner, "buffers", ())

    def count(self, *, with_copies: bool) -> dict[UnitId, int]:
        """Return the parameters of every unit of the stage, over all ranks that divide it.

        Args:
            with_copies: whether an output that shares the embedding's weights counts.
        """
        counts: dict[UnitId, int] = defaultdict(int)
        for local in self._parameters:
            is_copy = getattr(local.parameter, "shared_embedding", False)
            if is_copy and local.unit.kind is UnitKind.OUTPUT and not with_copies:
                continue
            part = self._homes.get(local.name)
            whole = local.parameter if part is None else part.like
            for ep_rank in range(len(self._ep_ranks) if local.is_expert and part is None else 1):
                unit = self._numbered(local.unit, ep_rank)
                counts[unit] += whole.numel() * local.entry.tp_size
        return counts

    def planned_stage(self, sharding: str) -> PlannedStage:
        """Return the stage with all its ranks."""
        places = {name: self._world.places(name) for name in _GROUPS}
        own = places["pp"][self._world.rank][1].rank
        members = sorted(rank for rank, (_, place) in places["pp"].items() if place.rank == own)
        return PlannedStage(
            numbers=tuple(self.numbers),
            ranks=tuple(
                self._planned_rank(rank, {name: of[rank] for name, of in places.items()}, sharding)
                for rank in members
            ),
            elements=self.count(with_copies=True),
        )

    def _numbered(self, unit: UnitId, ep_rank: int) -> UnitId:
        """Return a unit of the rank that was built as another expert-parallel rank has it."""
        if unit.kind is not UnitKind.EXPERT or self._homes:
            return unit
        own = self._ep_ranks.index(self._world.rank)
        return replace(unit, expert=unit.expert + (ep_rank - own) * self._num_local)

    def _planned_rank(
        self, rank: int, places: Mapping[str, tuple[int, GroupPlace]], sharding: str
    ) -> PlannedRank:
        group, dp = places["dp"]
        ep_rank = 0 if self._homes else places["ep"][1].rank
        others = self._sizes_of(dp, sharding, is_expert=False)
        experts = self._sizes_of(places["expt_dp"][1], sharding, is_expert=True)
        units = dict.fromkeys(each.unit for each in self._parameters)
        return PlannedRank(
            rank=rank,
            group=group,
            dp_rank=dp.rank,
            ep_rank=ep_rank,
            sizes={
                self._numbered(unit, ep_rank): found
                for unit in units
                if (found := others.get(unit) or experts.get(unit))
            },
            replicated=self._replicated,
        )

    def _sizes_of(
        self, place: GroupPlace, sharding: str, *, is_expert: bool
    ) -> Mapping[UnitId, UnitBytes]:
        """Return what a rank at a place among those with the same parameters saves of their units."""
        key = (sharding, is_expert, place.rank)
        if key not in self._sizes:
            own = [each for each in self._parameters if each.is_expert == is_expert]
            slices = self._slices(own, place, sharding)
            self._sizes[key] = self._measure(own, slices)
        return self._sizes[key]

    def _measure(self, own: Sequence[LocalParameter], slices: Slices) -> Mapping[UnitId, UnitBytes]:
        moved = [
            replace(each, start=slices[each.name][0], end=slices[each.name][1]) for each in own
        ]
        leaves_out = chosen(self._config).leaves_out_frozen
        packings = self._config.precision.packings
        catalog = UnitCatalog(moved, leaves_out_frozen=leaves_out, packings=packings)
        live = UnitCatalog(moved, leaves_out_frozen=leaves_out)
        return {unit: bytes_of(unit, catalog, live) for unit in catalog.units}

    def _slices(self, own: Sequence[LocalParameter], place: GroupPlace, sharding: str) -> Slices:
        """Return the slices that Megatron's optimizer gives a rank, and those of what it does not divide."""
        names = {
            each.parameter: each.name
            for each in own
            if each.is_sharded and each.name not in self._homes
        }
        slices = dict.fromkeys(names.values(), (0, 0))
        slices |= {each.name: (each.start, each.end) for each in own if each.name in self._homes}
        for buffer in self._buffers() if names else ():
            if buffer.params[0] not in names:
                continue
            for bucket in buffer.buckets:
                # Megatron's own map of a bucket lists the shards of all ranks for each of them.
                size = bucket.grad_data.numel() // place.size
                start = bucket.offset + place.rank * size
                ranges = DistributedOptimizer._build_model_gbuf_param_range_map(
                    buffer.param_index_map, Range(start, start + size), bucket.offset
                )
                for parameter, found in ranges.items():
                    slices[names[parameter]] = found["param"].start, found["param"].end
        for chain in layer_wise_chains(self._optimizer):
            is_expert = any(each.is_expert for each in own)
            ranks = chain.expt_dp_params_list if is_expert else chain.dp_cp_params_list
            slices |= {
                names[each]: (0, each.numel()) for each in (ranks or {place.rank: ()})[place.rank]
            }
        if place.size == 1:
            slices |= {each.name: (each.start, each.end) for each in own if each.is_sharded}
        shared = [each for each in own if not each.is_sharded]
        elements = tuple(each.parameter.numel() for each in shared)
        assigned = _assign(sharding, elements, place.size)[place.rank]
        return slices | {each.name: one for each, one in zip(shared, assigned, strict=True)}

    @functools.cached_property
    def _replicated(self) -> tuple[int, int]:
        """Return elements and bytes outside experts that all data-parallel ranks hold, undivided."""
        shared = [each for each in self._parameters if not each.is_sharded and not each.is_expert]
        catalog = UnitCatalog(
            shared, leaves_out_frozen=False, packings=self._config.precision.packings
        )
        return sum(each.parameter.numel() for each in shared), replicated_bytes(catalog)


@functools.lru_cache(maxsize=8)  # each rank of a stage asks for all
def _assign(
    sharding: str, num_elements: tuple[int, ...], num_ranks: int
) -> Sequence[Sequence[tuple[int, int]]]:
    return slice_assignment(sharding)(num_elements, num_ranks)


def bytes_of(unit: UnitId, catalog: UnitCatalog, live: UnitCatalog) -> UnitBytes:
    """Return what a rank saves of a unit; a second catalog says it of the unpacked state."""
    is_expert = unit.kind is UnitKind.EXPERT

    def part(which: UnitPart) -> int:
        tensors = catalog.tensors(replace(unit, part=which), Level.FULL)
        return _placed(tensors) if is_expert else 0

    tensors = catalog.tensors(unit, Level.FULL)
    return UnitBytes(
        full=_placed(tensors),
        compute=_placed(catalog.tensors(unit, Level.COMPUTE)),
        weights=part(UnitPart.WEIGHTS),
        moments=part(UnitPart.MOMENTS),
        live=_placed(live.tensors(unit, Level.FULL)),
        slot=catalog.most_bytes(unit),
        moments_slot=catalog.most_bytes(replace(unit, part=UnitPart.MOMENTS)) if is_expert else 0,
        elements=sum(each.end - each.start for each in catalog.parameters_of(unit)),
        tensors=len(tensors),
    )


def _placed(tensors: Sequence[TensorEntry]) -> int:
    """Return the bytes that tensors of a unit take, as engine/memory/layout.py places them."""
    end = 0
    for tensor in tensors:
        end = round_up(end, ALIGNMENT_BYTES) + tensor_bytes(tensor)
    return end
