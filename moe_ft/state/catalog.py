"""Catalog of one rank's units and of the tensors in each.

state/parameters.py assigns parameters to units; engine/snapshots/windows.py places units in files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import msgspec
import torch

from moe_ft.arithmetic import round_up
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import FROZEN, TensorEntry, tensor_bytes
from moe_ft.format.packings import ALIGNMENT_BYTES, Packing
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import MASTER_KEYS, describe, follows_masters, live_tensor
from moe_ft.units import Level, UnitId

Slices = Mapping[str, tuple[int, int]]  # flat ranges by parameter name


class UnitCatalog:
    """All units of a rank, including those that other ranks save completely."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        *,
        leaves_out_frozen: bool,
        packings: Mapping[str, Packing] = MappingProxyType({}),
    ) -> None:
        """Sort parameters into units.

        Args:
            leaves_out_frozen: whether units exclude parameters that are not trained. These keep the values
                that they had when the run began.
            packings: of fp32 tensors, by part of the state ("master", "exp_avg", "exp_avg_sq").
        """
        self._packings = packings
        self.parameters = tuple(parameters)
        self._frozen = [each for each in parameters if leaves_out_frozen and not each.optimizer]
        self._by_unit: dict[UnitId, list[LocalParameter]] = {}
        frozen = {each.name for each in self._frozen}
        for local in parameters:
            if local.name not in frozen:
                self._by_unit.setdefault(local.unit, []).append(local)

    @property
    def units(self) -> tuple[UnitId, ...]:
        """Whole units."""
        return tuple(self._by_unit)

    @property
    def frozen_names(self) -> set[str]:
        """Names of the parameters that are in no unit."""
        return {local.name for local in self._frozen}

    def has(self, unit: UnitId) -> bool:
        """Return whether this rank has a unit, even if others save it."""
        return unit.whole in self._by_unit

    def parameters_of(self, unit: UnitId) -> list[LocalParameter]:
        """Return the parameters of a unit, or of the unit that a part belongs to."""
        return self._by_unit[unit.whole]

    def tensors(
        self, unit: UnitId, level: Level, slices: Slices | None = None
    ) -> list[TensorEntry]:
        """Return the tensors of a unit that this rank saves, without offsets; none if others save all.

        Args:
            slices: ranges of parameters that a plan divides differently than at start.
        """
        found = []
        for local in self.parameters_of(unit):
            if slices is not None and local.name in slices:
                start, end = slices[local.name]
                local = replace(local, start=start, end=end)
            found += [self._packed(local, each) for each in describe(local, level, unit.part)]
        return found

    def _packed(self, local: LocalParameter, tensor: TensorEntry) -> TensorEntry:
        """Return a tensor with its packing; only fp32 tensors may be packed."""
        part = "master" if tensor.key in MASTER_KEYS else tensor.key
        packing = self._packings.get(part, Packing.EXACT)
        has_weights = local.parameter.dtype is torch.bfloat16 and not follows_masters(local)
        if packing is Packing.SPLIT and not has_weights:
            packing = Packing.EXACT
        if tensor.dtype != "F32" or packing is Packing.EXACT:
            return tensor
        return msgspec.structs.replace(tensor, packing=packing.value)

    def owns(self, unit: UnitId) -> bool:
        """Return whether this rank saves any part of a unit."""
        return bool(self.tensors(unit, Level.FULL))

    def num_bytes(self, unit: UnitId, level: Level = Level.FULL, *, alignment: int = 1) -> int:
        """Return the bytes that this rank saves of a unit, each tensor rounded up to an alignment."""
        sizes = map(tensor_bytes, self.tensors(unit, level))
        return sum(round_up(size, alignment) for size in sizes)

    def most_bytes(self, unit: UnitId) -> int:
        """Return the most bytes that a version of a unit may take, whatever packing another start used."""
        return sum(
            max(
                round_up(
                    tensor_bytes(msgspec.structs.replace(tensor, packing=each)), ALIGNMENT_BYTES
                )
                for each in (Packing if tensor.dtype == "F32" else (Packing.EXACT,))
            )
            for tensor in self.tensors(unit, Level.FULL)
        )

    def origins(self, units: Sequence[UnitId]) -> dict[str, str]:
        """Return checksums of the current weights of units, and of all frozen parameters.

        They cover the whole of a parameter that data-parallel ranks replicate, however it is divided.
        """
        found = {
            str(unit): _checksum_of(self.parameters_of(unit)) for unit in units if self.owns(unit)
        }
        if self._frozen:
            found[FROZEN] = _checksum_of(self._frozen)
        return found


def _checksum_of(parameters: Sequence[LocalParameter]) -> str:
    sums = []
    for local in parameters:
        whole = local if local.is_sharded else local.whole
        if whole.start == whole.end:
            continue
        key = "weight" if local.optimizer is None or local.master is None else "param"
        tensor = live_tensor(whole, key)
        if tensor is not None:
            data = tensor.detach().to("cpu").contiguous().view(torch.uint8)
            sums.append(checksum(data.numpy().data))
    return checksum(" ".join(sums).encode())
