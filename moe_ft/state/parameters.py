"""Parameters of a rank: the unit, the global name and the saved slice of each.

Reads the live model chunks and the (chained, distributed) optimizer; no collectives. state/slices.py has the
tensors of a slice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_ft.errors import ConfigError
from moe_ft.format.entries import ParameterEntry
from moe_ft.state.quantized import is_quantized
from moe_ft.state.tensors import inner_optimizers, layer_wise_chains, owned_parameters
from moe_ft.units import UnitId, UnitKind

AssignSlices = Callable[[Sequence[int], int], list[list[tuple[int, int]]]]
_LAYER = re.compile(r"(?P<stack>decoder|mtp)\.layers\.(?P<layer>\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(?P<expert>\d+)\.")
# Transformer Engine's grouped linear layers hold one parameter per expert: weight0, weight1, ...
_GROUPED_EXPERT = re.compile(r"\.experts\.linear_fc[12]\.(?:weight|bias)(?P<expert>\d+)$")
# Homes of moe_ft/elastic: parts of experts' parameters, with dashes for dots in their names.
_HOME = re.compile(r"\.homes\.(?P<expert>\d+)_(?P<name>[^.]+)$")
_OUTSIDE_LAYERS = {
    "embedding.": UnitKind.EMBEDDING,
    "decoder.final_layernorm.": UnitKind.FINAL_NORM,
    "decoder.final_norm.": UnitKind.FINAL_NORM,  # of a hybrid model
    "output_layer.": UnitKind.OUTPUT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """Place of a rank in a group."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlaces:
    """A rank's places in the groups that matter for state, from ProcessGroupCollection.

    Attributes:
        dp: in dp_cp, the data-parallel group of parameters outside of experts.
        expt_dp: in the data-parallel group of expert parameters.
        tp, expt_tp: in the tensor-parallel groups of both.
    """

    dp: GroupPlace
    expt_dp: GroupPlace
    tp: GroupPlace
    expt_tp: GroupPlace


@dataclass(frozen=True, slots=True, eq=False)
class HomePart:
    """Part of an expert's parameter that is a parameter of its own (moe_ft/elastic).

    Attributes:
        num_experts: of the layer.
        start, end: flat range in the expert's parameter; the home may be longer.
        like: parameter of a slot, with the shape of the whole.
    """

    expert: int
    num_experts: int
    start: int
    end: int
    like: torch.nn.Parameter


def mark_home(parameter: Any, part: HomePart) -> None:
    """Note that a parameter is a home."""
    parameter.moe_ft_home = part


def home_part(parameter: torch.nn.Parameter) -> HomePart | None:
    """Return what a home is part of; None for any other parameter."""
    found: HomePart | None = getattr(parameter, "moe_ft_home", None)
    return found


# Buffers of a layer with slots: the table, and the iterations since it was chosen.
SLOT_BUFFERS = ("slot_table", "table_age")


def mark_slot(parameter: Any) -> None:
    """Note that a parameter is a copy of what lies in homes: it is no state."""
    parameter.moe_ft_slot = True


def is_slot(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter is a copy of what lies in homes."""
    return getattr(parameter, "moe_ft_slot", False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalParameter:
    """One parameter of this rank.

    Attributes:
        name: global name, the same in every layout.
        start, end: flat range in the parameter that this rank saves and restores; may be empty.
        offset: where the live parameter begins in what is named; above 0 only in homes of experts.
        optimizer: Megatron's inner optimizer that updates it, None for a frozen parameter.
        master: tensor that the inner optimizer holds for it: the fp32 master weights (this rank's slice of
            them if `is_sharded`) or the parameter itself; None if the slices of other ranks cover it.
        is_sharded: whether a distributed optimizer assigned the slice, or it is a home. A layer-wise one
            assigns whole parameters.
        is_expert: whether the expt_dp group, instead of dp, holds the same parameter.
    """

    unit: UnitId
    name: str
    entry: ParameterEntry
    parameter: torch.nn.Parameter = field(repr=False)
    start: int
    end: int
    offset: int = 0
    optimizer: Any = field(repr=False)
    master: torch.Tensor | None = field(repr=False)
    is_sharded: bool
    is_expert: bool

    @property
    def whole(self) -> "LocalParameter":
        """All of it, as if this rank saved it alone."""
        return replace(self, start=0, end=self.parameter.numel())


def local_parameters(
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    places: StatePlaces,
    assign_slices: AssignSlices,
) -> list[LocalParameter]:
    """Return every parameter of this rank once, in the order of the model chunks.

    A plan assigns slices of parameters that are replicated over data-parallel ranks, so that no two of these
    ranks save the same part.

    Args:
        assign_slices: a function of planning/sharding.py, called with the number of elements of each such
            parameter and the number of ranks.

    Raises:
        ConfigError: if Megatron marks a parameter as an expert's, but its name is not an expert's; if a layer
            does not know its number, or two parameters would have the same global name.
    """
    owners = _owners(optimizer)
    found = []
    for chunk in model:
        modules = dict(chunk.named_modules())
        for local_name, parameter in chunk.named_parameters():
            if is_slot(parameter):
                continue
            unit, name = global_name(local_name, modules)
            _check_kind(unit, name, parameter)
            inner, master, slice_ = owners.get(parameter, (None, None, None))
            if inner is None and is_quantized(parameter):
                raise ConfigError(
                    f"parameter {name} is kept in FP8 (--fp8-param-gather) and not trained, so it has no "
                    "masters that could be saved. Train it, keep it in BF16, or use --moe-ft-strategy none."
                )
            if (part := home_part(parameter)) is not None:
                slice_ = part.start, part.end
            found.append((unit, name, parameter, inner, master, slice_))
    _check_names([name for _, name, *_ in found])
    slices = _replicated_slices(found, places, assign_slices)
    return [
        LocalParameter(
            unit=unit,
            name=name,
            entry=_entry(name, parameter, modules_config(model), places),
            parameter=parameter,
            start=(slice_ or slices[name])[0],
            end=(slice_ or slices[name])[1],
            offset=part.start if (part := home_part(parameter)) else 0,
            optimizer=inner,
            master=master,
            is_sharded=slice_ is not None,
            is_expert=_is_expert(parameter),
        )
        for unit, name, parameter, inner, master, slice_ in found
    ]


def global_name(local_name: str, modules: Mapping[str, torch.nn.Module]) -> tuple[UnitId, str]:
    """Return the unit and the global name of a parameter.

    Args:
        local_name: its name in its model chunk, wrappers (``module.``) included.
    """
    name = local_name
    while name.startswith("module."):
        name = name[len("module.") :]
    match = _LAYER.search(name)
    if match is None:
        kinds = [kind for prefix, kind in _OUTSIDE_LAYERS.items() if name.startswith(prefix)]
        return UnitId(kind=kinds[0] if kinds else UnitKind.OTHER), name
    path = local_name[: len(local_name) - len(name) + match.end() - 1]
    is_mtp = match["stack"] == "mtp"
    # Decoder layers know their global number, from 1. All multi-token prediction layers are on one stage.
    layer = int(match["layer"]) if is_mtp else _number(modules[path], path) - 1
    name = f"{match['stack']}.layers.{layer}.{name[match.end() :]}"
    block = "mtp" if is_mtp else "layer"
    if (home := _HOME.search(name)) is not None:
        weight = home["name"].replace("-", ".")
        name = f"{name[: home.start()]}.experts.local_experts.{home['expert']}.{weight}"
        expert = int(home["expert"])
        return UnitId(kind=UnitKind.EXPERT, block=block, layer=layer, expert=expert), name
    expert_match = _LOCAL_EXPERT.search(name) or _GROUPED_EXPERT.search(name)
    if expert_match is not None:
        moe_path = local_name[: local_name.rindex(".experts.")]
        indices: Any = modules[moe_path].local_expert_indices
        expert = int(indices[int(expert_match["expert"])])
        start, end = expert_match.span("expert")
        name = f"{name[:start]}{expert}{name[end:]}"
        return UnitId(kind=UnitKind.EXPERT, block=block, layer=layer, expert=expert), name
    kind = UnitKind.ROUTER if ".mlp.router." in name else UnitKind.NON_EXPERT
    return UnitId(kind=kind, block=block, layer=layer), name


def name_in_model(model: Sequence[torch.nn.Module], name: str) -> str:
    """Return a name of `named_parameters` as it is in the whole model; what follows a slash stays."""
    chunk, _, rest = name.partition(".")
    local_name, *key = rest.split("/", 1)
    modules = dict(model[int(chunk.removeprefix("chunk"))].named_modules())
    try:
        return "/".join((global_name(local_name, modules)[1], *key))
    except ConfigError:  # of a layer that does not know its number
        return name


def modules_config(model: Sequence[torch.nn.Module]) -> Any:
    """Return the TransformerConfig of the model."""
    chunk: Any = model[0]
    while not hasattr(chunk, "config"):
        chunk = chunk.module
    return chunk.config


def _number(layer: Any, path: str) -> int:
    """Return the number of a layer in the whole model, from 1."""
    if not hasattr(layer, "layer_number"):
        raise ConfigError(
            f"{path} is a layer without a layer_number, which names its parameters in the whole model: give "
            "it one, from 1, as Megatron's TransformerLayer has it, or use --moe-ft-strategy none."
        )
    return int(layer.layer_number)


def _check_names(names: Sequence[str]) -> None:
    """Raise ConfigError if two parameters of a rank have one name, as those of two stacks of layers."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(
                f"two parameters would be called {name} in a checkpoint: the model has several stacks of "
                "layers, but moe_ft can only name the parameters of one. Use --moe-ft-strategy none for this "
                "model."
            )
        seen.add(name)


def _check_kind(unit: UnitId, name: str, parameter: torch.nn.Parameter) -> None:
    """Raise ConfigError if an expert's parameter has a name that does not include the expert."""
    if _is_expert(parameter) and unit.kind is not UnitKind.EXPERT:
        raise ConfigError(
            f"parameter {name} is an expert's (Megatron marks it with allreduce=False), and must have the "
            "name of one: experts.local_experts.N.*, or experts.linear_fc1.weightN and the like. Other ranks "
            "hold other experts under the same name, so it cannot be saved. Leave out the flag that makes "
            "it (--moe-single-grouped-bias is one), or use --moe-ft-strategy none."
        )


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    """Return whether Megatron marks a parameter as not reduced over the dense data-parallel group."""
    return not getattr(parameter, "allreduce", True)


def _owners(optimizer: Any) -> dict[torch.nn.Parameter, tuple[Any, Any, tuple[int, int] | None]]:
    """Return (inner optimizer, master, slice) per parameter; the slice is None if every rank holds all."""
    owners: dict[torch.nn.Parameter, tuple[Any, Any, tuple[int, int] | None]] = {}
    for inner in inner_optimizers(optimizer) if optimizer is not None else []:
        if hasattr(inner, "model_param_gbuf_map"):  # DistributedOptimizer
            for buffer in inner.buffers:  # other ranks' parameters included
                owners.update(dict.fromkeys(buffer.params, (inner, None, (0, 0))))
        for parameter, master, slice_ in owned_parameters(inner):
            owners[parameter] = (inner, master, slice_)
    for chain in layer_wise_chains(optimizer):
        for ranks in (chain.dp_cp_params_list, chain.expt_dp_params_list):
            for parameter in (each for parameters in ranks or () for each in parameters):
                # Of another rank: which optimizer of the chain steps it there makes no difference here.
                owners.setdefault(parameter, (chain.chained_optimizers[0], None, (0, 0)))
        for inner in chain.chained_optimizers:
            for parameter, master, _ in owned_parameters(inner):
                owners[parameter] = (inner, master, (0, parameter.numel()))
    return owners


def _replicated_slices(
    found: Sequence[tuple[Any, ...]], places: StatePlaces, assign_slices: AssignSlices
) -> dict[str, tuple[int, int]]:
    """Assign slices of parameters that are replicated over the ranks of a data-parallel group."""
    slices: dict[str, tuple[int, int]] = {}
    for is_expert, place in ((False, places.dp), (True, places.expt_dp)):
        shared = [
            (name, parameter.numel())
            for _, name, parameter, _, _, slice_ in found
            if slice_ is None and _is_expert(parameter) == is_expert
        ]
        own = assign_slices([count for _, count in shared], place.size)[place.rank]
        slices.update({name: slice_ for (name, _), slice_ in zip(shared, own, strict=True)})
    return slices


def _entry(
    name: str, parameter: torch.nn.Parameter, config: Any, places: StatePlaces
) -> ParameterEntry:
    part = home_part(parameter)
    shape = tuple((parameter if part is None else part.like).shape)
    num_halves = 2 if config.gated_linear_unit and ".linear_fc1." in name else 1
    if not getattr(parameter, "tensor_model_parallel", False):
        return ParameterEntry(shape=shape, num_halves=num_halves)
    place = places.expt_tp if ".experts." in name else places.tp
    return ParameterEntry(
        shape=shape,
        tp_dim=int(getattr(parameter, "partition_dim", -1)),
        tp_size=place.size,
        tp_rank=place.rank,
        num_halves=num_halves,
    )
