"""A rank with random state whose snapshots are packed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch

from moe_ft.engine.memory.pool import Pool
from moe_ft.engine.memory.regions import MappedFile, Region
from moe_ft.engine.snapshots.job import SnapshotRequest, SnapshotState
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.format.entries import TensorEntry, UnitEntry, tensor_pieces
from moe_ft.format.packings import Packing
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.slices import live_tensor
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import make_optimizer, make_parameter
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import SnapshotRank
from tests.unit.moe_ft.engine.snapshots.test_packed import image_of

EMBEDDING, ROUTER = UnitId(kind=UnitKind.EMBEDDING), UnitId(kind=UnitKind.ROUTER, layer=0)
EXPERTS = [UnitId(kind=UnitKind.EXPERT, layer=0, expert=each) for each in range(2)]
# The embedding is larger than a buffer, the router has fp32 weights.
SIZES = {EMBEDDING: 200_000, ROUTER: 129, EXPERTS[0]: 1, EXPERTS[1]: 8193}
STAGING_BYTES = 1 << 20
SLACK_BYTES = 1 << 15  # for windows of several snapshots
Packings = Mapping[str, Packing]
MIXED: Packings = {
    "master": Packing.SPLIT,
    "exp_avg": Packing.BF16,
    "exp_avg_sq": Packing.E4M3_BLOCKS,
}


class Rank(SnapshotRank):
    """A rank with random state, which may be packed."""

    def __init__(
        self, directory: Path, packings: Packings, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.parameters = []
        for unit, size in SIZES.items():
            short = torch.float32 if unit is ROUTER else torch.bfloat16
            master = torch.zeros(size)
            self.parameters.append(
                make_parameter(
                    unit,
                    parameter=torch.zeros(size, dtype=short),
                    optimizer=make_optimizer(master),
                    master=master,
                )
            )
        self.catalog = UnitCatalog(self.parameters, leaves_out_frozen=False, packings=packings)
        self.layouts = UnitLayouts(self.catalog, 0)
        self.pool = Pool(directory, self.layouts.place(EXPERTS[1], 0).num_bytes, num_slots=2)
        self.pool.open()
        plans = [SnapshotPlan(levels=dict.fromkeys(SIZES, Level.FULL))]
        self.window(plans)
        self.layouts.region_bytes = self.layout.num_bytes + SLACK_BYTES
        self.window(plans)
        regions = [Region(directory, each, self.layout.num_bytes) for each in range(2)]
        super().__init__(self.parameters, regions, pool=self.pool, staging_bytes=staging_bytes)
        self.train()

    def window(self, plans: list[SnapshotPlan]) -> None:
        """Have windows of these snapshots from now on."""
        self.plans, self.layout = plans, self.layouts.lay_out(WindowPlan(snapshots=tuple(plans)))

    def train(self) -> None:
        """Have new state; weights are rounded from their masters."""
        for local in self.parameters:
            assert local.master is not None
            self.draw(local.master)
            local.parameter.data.copy_(local.master)
            for key in ("exp_avg", "exp_avg_sq"):
                state = local.optimizer.optimizer.state[local.master]
                self.draw(state.setdefault(key, torch.zeros_like(local.master)))

    def draw(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with random numbers."""
        tensor.copy_(torch.randn(tensor.shape, generator=self.random))

    def request(
        self, iteration: int = 5, *, position: int = 0, region: int = 0, **changes: Any
    ) -> SnapshotRequest:
        """Return the request for a snapshot of the state as it is."""
        layout = self.layout
        request = SnapshotRequest(
            region=self.regions[region],
            window=lambda: layout,
            position=position,
            iteration=iteration,
            keep_iteration=None,
            plan=self.plans[position],
        )
        return replace(request, **changes)

    def take(self, iteration: int = 5, **which: int) -> SnapshotState:
        """Take a snapshot and return how it ended."""
        return self.run(self.request(iteration, **which)).state

    def header(self) -> dict[str, tuple[str, int]]:
        """Return the type and the size of every tensor in a region's file, as safetensors reads it."""
        found = safetensors.deserialize(bytes(self.regions[0].mapping))  # type: ignore[no-untyped-call]
        return {name: (each["dtype"], *each["shape"]) for name, each in found}

    def odd_tensors(self, region: int = 0) -> list[str]:
        """Return the tensors in a region, or in the pool, that are not those of the state as it is."""
        odd = []
        for name, entry in self.index(region).entries():
            file: MappedFile = self.pool if entry.file else self.regions[region]
            odd += [
                f"{name}/{tensor.key}"
                for tensor in entry.tensors
                if not tensor.is_absent and not self.has_arrived(file, entry, tensor)
            ]
        return odd

    def has_arrived(self, file: MappedFile, entry: UnitEntry, tensor: TensorEntry) -> bool:
        """Return whether a file has of a tensor what packing it as it is now would write."""
        (local,) = [each for each in self.parameters if each.name == tensor.parameter]
        live, packing = live_tensor(local, tensor.key), Packing(tensor.packing)
        assert live is not None
        image = image_of(packing, live, live_tensor(local, "weight")).numpy().tobytes()
        at = entry.offset + tensor.offset
        return all(
            file.mapping[at + each.offset : at + each.offset + each.num_bytes]
            == image[each.offset : each.offset + each.num_bytes]
            for each in tensor_pieces(tensor)
        )


MakeRank = Callable[..., Rank]


def request_with_slot(rank: Rank, slot: int) -> SnapshotRequest:
    """Return a request that has an expert in the pool."""
    levels = {unit: Level.FULL for unit in SIZES if unit != EXPERTS[1]}
    rank.window([SnapshotPlan(levels=levels)])
    return rank.request(slots=[rank.layouts.place(EXPERTS[1], rank.pool.offset_of(slot))])
