"""State of one rank, of four units: its values say which rank, unit and iteration they are of."""

from typing import Any

import torch

from moe_ft.format.entries import UnitEntry
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.units import Level
from tests.unit.moe_ft.builders import (
    WINDOW_UNITS,
    make_optimizer,
    make_parameter,
    window_position,
)

_NAMES = [str(unit) for unit in WINDOW_UNITS]
_OFFSETS = {"weight": 0.0, "param": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}


class SmallRank:
    """The live state of a rank: BF16 weights, fp32 masters, and a real optimizer once it has stepped.

    Attributes:
        parameters: one for each of `WINDOW_UNITS`.
    """

    def __init__(
        self, rank: int = 0, *, num_elements: int = 9, kind: str = "adam", is_sharded: bool = False
    ) -> None:
        """Make parameters of zeros without moments.

        Args:
            rank: its number, which decides the values.
            num_elements: of each parameter.
            kind: optimizer, see `make_optimizer`.
            is_sharded: see `make_parameter`.
        """
        self._rank, self.num_elements = rank, num_elements
        self.parameters: list[LocalParameter] = []
        for unit in WINDOW_UNITS:
            master = torch.zeros(num_elements)
            self.parameters.append(
                make_parameter(
                    unit,
                    parameter=torch.zeros(num_elements, dtype=torch.bfloat16),
                    optimizer=make_optimizer(master, kind=kind),
                    master=master,
                    is_sharded=is_sharded,
                )
            )

    def catalog(self) -> UnitCatalog:
        """Return the units of this state."""
        return UnitCatalog(self.parameters, leaves_out_frozen=False)

    def value(self, name: str, key: str, iteration: int) -> float:
        """Return the value of all elements of a tensor at an iteration."""
        return iteration + _OFFSETS[key] + 32 * _NAMES.index(name) + 256 * self._rank

    def step(self, iteration: int, *, has_moments: bool = True) -> None:
        """Have the state of an iteration, as the optimizer leaves it."""
        for local in self.parameters:
            name, master = str(local.unit), local.master
            assert master is not None
            local.parameter.data.fill_(self.value(name, "weight", iteration))
            master.fill_(self.value(name, "param", iteration))
            for key in ("exp_avg", "exp_avg_sq") if has_moments else ():
                state = local.optimizer.optimizer.state[master]
                state[key] = torch.full((self.num_elements,), self.value(name, key, iteration))

    def has_written(self, content: Any, name: str, entry: UnitEntry) -> bool:
        """Return whether a unit version in the content of a file is the state of its iteration."""
        for tensor in entry.tensors:
            dtype = torch.bfloat16 if tensor.dtype == "BF16" else torch.float32
            offset = entry.offset + tensor.offset
            found = torch.frombuffer(content, dtype=dtype, count=self.num_elements, offset=offset)
            value = self.value(name, tensor.key, entry.iteration)
            if not torch.equal(found, torch.full((self.num_elements,), value, dtype=dtype)):
                return False
        return True


def window_plan(length: int) -> WindowPlan:
    """Return a window in which each unit is FULL where `window_position` says."""
    levels = (
        {
            unit: Level.FULL if window_position(unit, length) == position else Level.COMPUTE
            for unit in WINDOW_UNITS
            if window_position(unit, length) >= position
        }
        for position in range(length)
    )
    snapshots = tuple(SnapshotPlan(levels=each) for each in levels)
    return WindowPlan(snapshots=snapshots, key=length)
