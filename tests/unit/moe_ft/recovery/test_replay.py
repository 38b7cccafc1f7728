"""A window becomes the state at its end: snapshot by snapshot, each on top of what a replay has made."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ft.engine.memory.regions import own_directory
from moe_ft.engine.memory.unit_layouts import UnitLayouts
from moe_ft.faults import Phase
from moe_ft.format.entries import ModelPlaces
from moe_ft.planning.recovery import Source, Tier
from moe_ft.recovery import replay
from moe_ft.recovery.agree import Agreed
from moe_ft.recovery.fetch import read_window
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.meet import LiveState
from moe_ft.recovery.put_back import SharedSlices
from moe_ft.recovery.readers import MemoryReader, Readers
from moe_ft.recovery.replay import Conversion
from moe_ft.state.catalog import UnitCatalog
from moe_ft.units import UnitId
from tests.unit.moe_ft.builders import (
    WINDOW_UNITS,
    fill_window,
    make_optimizer,
    make_parameter,
    make_window,
    window_position,
)

NUM_ELEMENTS = 33
GARBAGE = -7.0
EARLY, _, MIDDLE, LATE = WINDOW_UNITS  # FULL in the snapshots 0, 1 and 2 of three


class Rank:
    """A rank whose masters are garbage, and the window that it recovers from.

    Attributes:
        applied: iterations of the records that were put back.
        faults: (phase, iteration) at which the hook was called.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int = 3) -> None:
        self.length, self.window = length, make_window(length=length)
        self.masters: dict[UnitId, torch.Tensor] = {}
        self.applied: list[int] = []
        self.faults: list[tuple[Phase, int]] = []
        parameters = []
        for unit in WINDOW_UNITS:
            self.masters[unit] = torch.full((NUM_ELEMENTS,), GARBAGE)
            parameters.append(
                make_parameter(
                    unit,
                    parameter=torch.full((NUM_ELEMENTS,), GARBAGE, dtype=torch.bfloat16),
                    optimizer=make_optimizer(self.masters[unit], kind="lion"),
                    master=self.masters[unit],
                    is_sharded=True,
                )
            )
        self.weights = {local.unit: local.parameter for local in parameters}
        catalog = UnitCatalog(parameters, leaves_out_frozen=False)
        fill_window(own_directory(tmp_path, 0), length=length)
        (version,) = look_at_memory(tmp_path, "node-a", "job").versions
        readers = Readers(lambda source: MemoryReader(tmp_path / source.version.path))
        self.fetched = read_window(
            [Source(tier=Tier.MEMORY, version=version)], WINDOW_UNITS, catalog, readers
        )
        monkeypatch.setattr(
            replay.records,
            "apply",
            lambda record, *rest: self.applied.append(record.iteration),
        )
        alone = SharedSlices(dp=[{}], expt_dp=[{}])
        self.positions = {unit: window_position(unit, length) for unit in WINDOW_UNITS}
        agreed = Agreed(
            fetched=self.fetched, slices=[(alone, alone)] * length, positions=self.positions
        )
        optimizer = SimpleNamespace(_copy_main_params_to_model_params=self._refresh)
        records: Any = None
        live = LiveState(
            model_places=ModelPlaces(),
            built=([], optimizer, None),
            parameters=parameters,
            catalog=catalog,
            layouts=UnitLayouts(catalog, 0),
            records=records,
            groups=SimpleNamespace(dp_cp=None, expt_dp=None),
            phase_hook=lambda phase, iteration: self.faults.append((phase, iteration)),
        )
        self.conversion = Conversion(agreed, live)

    def _refresh(self) -> None:
        """Make the weights from the masters, as Megatron's optimizers do."""
        for unit, master in self.masters.items():
            self.weights[unit].data.copy_(master)

    def saved(self, unit: UnitId, key: str, position: int | None = None) -> torch.Tensor:
        """Return a tensor as the window has it, at FULL or in the snapshot at COMPUTE."""
        index = self.window.index
        units = index.units if position is None else index.compute[position]
        entry = units[str(unit)]
        (tensor,) = [each for each in entry.tensors if each.key == key]
        dtype = torch.float32 if tensor.dtype == "F32" else torch.bfloat16
        start = entry.offset + tensor.offset
        content = bytearray(self.window.content)
        return torch.frombuffer(content, dtype=dtype, count=NUM_ELEMENTS, offset=start)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, whatever the bits mean."""
    return torch.equal(
        first.detach().contiguous().view(torch.uint8),
        second.detach().contiguous().view(torch.uint8),
    )


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(tmp_path, monkeypatch)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_window_takes_one_replay_less_than_it_has_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    assert Rank(tmp_path, monkeypatch, length).conversion.num_replays == length - 1


@pytest.mark.parametrize(("position", "expected"), [(0, {MIDDLE, LATE}), (1, {LATE}), (2, set())])
def test_units_are_frozen_until_their_snapshot_has_been_put_back(
    rank: Rank, position: int, expected: set[UnitId]
) -> None:
    assert rank.conversion.frozen_units(position) == expected


def test_first_snapshot_puts_back_masters_and_moments_of_its_group_only(rank: Rank) -> None:
    rank.conversion.load(0)
    assert same(rank.masters[EARLY], rank.saved(EARLY, "param"))
    for unit in (MIDDLE, LATE):
        assert torch.equal(rank.masters[unit], torch.full((NUM_ELEMENTS,), GARBAGE))


def test_weights_of_the_group_follow_from_its_masters(rank: Rank) -> None:
    rank.conversion.load(0)
    assert same(rank.weights[EARLY].data, rank.saved(EARLY, "param").to(torch.bfloat16))


@pytest.mark.parametrize("position", [0, 1])
def test_weights_of_units_that_come_later_are_those_of_this_snapshot_whatever_their_masters(
    rank: Rank, position: int
) -> None:
    for each in range(position + 1):
        rank.conversion.load(each)
    for unit in WINDOW_UNITS:
        if window_position(unit, 3) > position:
            assert same(rank.weights[unit].data, rank.saved(unit, "weight", position))


def test_later_snapshot_leaves_what_a_replay_has_made_of_earlier_groups(rank: Rank) -> None:
    rank.conversion.load(0)
    rank.masters[EARLY].fill_(3.0)  # the replay has trained it
    rank.conversion.load(1)
    assert torch.equal(rank.masters[EARLY], torch.full((NUM_ELEMENTS,), 3.0))
    assert same(rank.masters[MIDDLE], rank.saved(MIDDLE, "param"))
    assert torch.equal(rank.masters[LATE], torch.full((NUM_ELEMENTS,), GARBAGE))
