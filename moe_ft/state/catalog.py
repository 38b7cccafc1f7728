"""The units of one rank and the tensors that they consist of.

Which parameter belongs to which unit is state/parameters.py; how units lie in files engine/unit_layouts.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import msgspec
import torch

from moe_ft.format.encoding import checksum
from moe_ft.format.entries import FROZEN, TensorEntry, tensor_bytes
from moe_ft.format.packings import ALIGNMENT_BYTES, Packing
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import MASTER_KEYS, describe, live_tensor
from moe_ft.units import Level, Part, UnitId

Slices = Mapping[str, tuple[int, int]]  # flat ranges by parameter name


class UnitCatalog:
    """All units of a rank, those included of which other ranks save everything."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        *,
        leaves_out_frozen: bool,
        packings: Mapping[str, Packing] = MappingProxyType({}),
    ) -> None:
        """Sort parameters into units.

        Args:
            parameters: of the rank.
            leaves_out_frozen: whether parameters that are not trained are in no unit: they stay what they
                were when the run began.
            packings: by part of the state ("master", "exp_avg", "exp_avg_sq"), how fp32 tensors are kept.
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
        """Return whether this rank has a unit, whoever saves it."""
        return replace(unit, part=Part.WHOLE) in self._by_unit

    def parameters_of(self, unit: UnitId) -> list[LocalParameter]:
        """Return the parameters of a unit, or of the unit that a part is of."""
        return self._by_unit[replace(unit, part=Part.WHOLE)]

    def tensors(
        self, unit: UnitId, level: Level, slices: Slices | None = None
    ) -> list[TensorEntry]:
        """Return what this rank saves of a unit, without offsets; nothing if other ranks save all.

        Args:
            unit: a unit or a part of one.
            level: of the snapshot.
            slices: for parameters that are divided otherwise than at start.
        """
        found = []
        for local in self.parameters_of(unit):
            if slices is not None and local.name in slices:
                start, end = slices[local.name]
                local = replace(local, start=start, end=end)
            found += [self._packed(local, each) for each in describe(local, level, unit.part)]
        return found

    def _packed(self, local: LocalParameter, tensor: TensorEntry) -> TensorEntry:
        """Return a tensor as files keep it; only what is fp32 may be kept otherwise than it is."""
        part = "master" if tensor.key in MASTER_KEYS else tensor.key
        packing = self._packings.get(part, Packing.EXACT)
        if packing is Packing.SPLIT and local.parameter.dtype is not torch.bfloat16:
            packing = Packing.EXACT
        if tensor.dtype != "F32" or packing is Packing.EXACT:
            return tensor
        return msgspec.structs.replace(tensor, packing=packing.value)

    def owns(self, unit: UnitId) -> bool:
        """Return whether this rank saves something of a unit."""
        return bool(self.tensors(unit, Level.FULL))

    def num_bytes(self, unit: UnitId, level: Level = Level.FULL, *, alignment: int = 1) -> int:
        """Return the bytes that this rank saves of a unit, each tensor rounded up to an alignment."""
        sizes = map(tensor_bytes, self.tensors(unit, level))
        return sum(-(-size // alignment) * alignment for size in sizes)

    def most_bytes(self, unit: UnitId) -> int:
        """Return the bytes that a version of a unit may take, however another start has kept it."""
        return sum(
            max(
                -(-tensor_bytes(msgspec.structs.replace(tensor, packing=each)) // ALIGNMENT_BYTES)
                for each in (Packing if tensor.dtype == "F32" else (Packing.EXACT,))
            )
            * ALIGNMENT_BYTES
            for tensor in self.tensors(unit, Level.FULL)
        )

    def origins(self, units: Sequence[UnitId]) -> dict[str, str]:
        """Return checksums of the weights of units as they are now, and of all that is frozen.

        Of a parameter that data-parallel ranks hold alike all is looked at, however it is divided.
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
        whole = local
        if not local.is_sharded:
            whole = replace(local, start=0, end=local.parameter.numel())
        key = "weight" if local.optimizer is None or local.master is None else "param"
        tensor = live_tensor(whole, key)
        if tensor is not None and whole.start < whole.end:
            data = tensor.detach().to("cpu").contiguous().view(torch.uint8)
            sums.append(checksum(data.numpy().data))
    return checksum(" ".join(sums).encode())
