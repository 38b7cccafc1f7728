"""A rank with an optimizer and a real peer, which follows it by gradients; no training loop."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from moe_ft.engine.background import EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import PeerReplicator
from moe_ft.engine.memory.layout import UnitPlace, lay_out
from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.engine.updates.capture import GradientCapture
from moe_ft.faults import Phase
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.entries import ParameterEntry, UnitEntry
from moe_ft.format.index import Index
from moe_ft.state.gradients import check_repeatable
from moe_ft.state.parameters import GroupPlace, LocalParameter, StatePlaces
from moe_ft.state.slices import describe, live_tensor
from moe_ft.topology import RankInfo
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import make_record, make_state
from tests.unit.moe_ft.peer import SOURCE, TOKEN, Peer, replica_of

SIZES = {"embedding": 301, "layer.0.router": 77, "layer.0.expert.1": 400}
UNITS = {
    "embedding": UnitId(kind=UnitKind.EMBEDDING),
    "layer.0.router": UnitId(kind=UnitKind.ROUTER, layer=0),
    "layer.0.expert.1": UnitId(kind=UnitKind.EXPERT, layer=0, expert=1),
}
CLIP = 0.5
ALONE = GroupPlace(rank=0, size=1)
PLACES = StatePlaces(dp=ALONE, expt_dp=ALONE, tp=ALONE, expt_tp=ALONE)


class Owner:
    """A rank with an optimizer, whose peer keeps replicas of each of its iterations."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        *,
        factor: int = 1,
        peer: RankInfo | None = None,
        rotating: str = "",
        **options: Any,
    ) -> None:
        """Begin with parameters of `SIZES` numbers times a factor, and another peer than one of its own.

        Args:
            rotating: the name of a unit that lies in slots.
            options: of the optimizer, which may round otherwise than its peer.
        """
        self.generator = torch.Generator().manual_seed(3)
        self.dtype, self.iteration = dtype, 0
        self.complete: int | None = None
        masters = {name: self._random(size * factor) for name, size in SIZES.items()}
        optimizer = torch.optim.AdamW([*masters.values()], lr=1e-2, weight_decay=0.1, **options)
        scaler = SimpleNamespace(inv_scale=torch.tensor([2.0**-10]))
        config = SimpleNamespace(optimizer="adam", clip_grad=CLIP)
        self.inner = SimpleNamespace(optimizer=optimizer, config=config, grad_scaler=scaler)
        self.parameters = [self._parameter(name, each) for name, each in masters.items()]
        check_repeatable(self.parameters, PLACES, allows_lossy=True)
        in_slots = [each for each in self.parameters if each.name == rotating]
        in_region = [each for each in self.parameters if each.name != rotating]
        self.rotating = frozenset(each.unit for each in in_slots)
        self.followed: frozenset[UnitId] = frozenset()
        self.capture = GradientCapture(self.parameters, self.rotating)
        self.capture.start()
        self.layout, pooled = (
            lay_out((local.unit, Level.FULL, describe(local, Level.FULL)) for local in each)
            for each in (in_region, in_slots)
        )
        self.pool = self.slot = None
        if in_slots:
            (self.slot,) = pooled.units
            self.pool = UnitPool(folder / "own", self.slot.num_bytes, 2)
            self.pool.open()
        size = self.layout.num_bytes
        self.regions = [Region(folder / "own", number, size) for number in range(2)]
        for region in self.regions:
            region.open()
            region.begin(self.layout.header)
        self.reports, self.faults = EventQueue(), set[int]()
        if peer is None:
            self.peer = Peer(folder, size)
            if self.pool is not None:
                self.peer.keep_in_slots(self.pool.slot_bytes)
            peer = self.peer.info
        self.replicator = PeerReplicator([peer], TOKEN, self.reports, self._hook, Clock())

    def _random(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator)

    def _hook(self, phase: Phase, iteration: int) -> None:
        if iteration in self.faults:
            raise ConnectionResetError("the network")

    def _parameter(self, name: str, master: torch.Tensor) -> LocalParameter:
        parameter: Any = torch.nn.Parameter(master.to(self.dtype))
        parameter.main_grad = torch.zeros(len(master), dtype=self.dtype)
        return LocalParameter(
            unit=UNITS[name],
            name=name,
            entry=ParameterEntry(shape=(len(master),)),
            parameter=parameter,
            start=0,
            end=len(master),
            optimizer=self.inner,
            master=master,
            is_sharded=True,
            is_expert=False,
        )

    def train(self, *, steps: bool = True) -> None:
        """Run an iteration, as Megatron does: unscale, find the norm, clip, step."""
        self.iteration += 1
        self.capture.note_reduced(self.iteration, self.followed)
        if not steps:
            return
        for local in self.parameters:
            raw = (self._random(local.end) * 100).to(self.dtype)
            reduced: Any = local.parameter
            reduced.main_grad.copy_(raw)
            local.master.grad = raw.float() * self.inner.grad_scaler.inv_scale  # type: ignore[union-attr]
        self.inner.grad_scaler.inv_scale /= 2  # that of the next iteration
        grads = [local.master.grad for local in self.parameters]  # type: ignore[union-attr]
        norm = float(torch.cat(grads).norm())  # type: ignore[arg-type]
        for grad in grads if norm > CLIP else ():
            grad.mul_(CLIP / (norm + 1e-6))  # type: ignore[union-attr]
        self.inner.optimizer.param_groups[0]["lr"] = 1e-2 / self.iteration
        self.capture.capture(self.iteration, norm)
        self.inner.optimizer.step()

    def save(self) -> Index:
        """Take a snapshot, have the peer keep it, and complete it."""
        region = self.regions[self.iteration % 2]
        for local in self.parameters:
            content, place = self._place(local, region)
            for tensor in place.tensors:
                live = live_tensor(local, tensor.key)
                assert live is not None
                at = place.offset + tensor.offset
                content[at : at + 4 * live.numel()] = live.detach().numpy().tobytes()
        index = self._index(region)
        region.commit(encode(index), self.iteration)
        lent = self.capture.lend(self.iteration)
        replica = replica_of(region, index, self.complete, self.pool)
        self.replicator.replicate(replace(replica, lent=lent))
        lent.release()
        self.complete = self.iteration
        return index

    def _place(self, local: LocalParameter, region: Region) -> tuple[memoryview, UnitPlace]:
        """Return the memory of this iteration's version of a unit, and where it lies there."""
        if self.pool is not None and self.slot is not None and local.unit in self.rotating:
            at = self.pool.offset_of(self.iteration % 2)
            return memoryview(self.pool.mapping), replace(self.slot, offset=at)
        place = next(each for each in self.layout.units if each.unit == local.unit)
        return memoryview(region.mapping), place

    def _index(self, region: Region) -> Index:
        units = {}
        for content, place in (self._place(each, region) for each in self.parameters):
            units[str(place.unit)] = UnitEntry(
                offset=place.offset,
                num_bytes=place.num_bytes,
                iteration=self.iteration,
                level="full",
                checksum=checksum(content[place.offset : place.offset + place.num_bytes]),
                tensors=place.tensors,
                file=self.pool.name if self.pool and place.unit in self.rotating else "",
            )
        header = self.layout.header
        return msgspec.structs.replace(
            make_state(SOURCE, self.iteration)[0],
            file=region.data_path.name,
            file_bytes=self.layout.num_bytes,
            header_bytes=len(header),
            header_checksum=checksum(header),
            units=units,
            parameters={each.name: each.entry for each in self.parameters},
            records=(make_record(self.iteration),),
        )

    def sent(self) -> dict[str, Any]:
        """Return what the last replica took."""
        (report,) = (each for each in self.reports.drain() if each.event == "replicate")
        return report.fields

    def check_replica(self) -> None:
        """Check that the peer has the newest state, bit for bit."""
        kept, own = self.peer.committed(), self.regions[self.iteration % 2]
        for place in self.layout.units:
            stretch = slice(place.offset, place.offset + place.num_bytes)
            assert kept[self.iteration][stretch] == own.mapping[stretch]
        for local in self.parameters if self.pool else ():
            if local.unit in self.rotating:
                content, place = self._place(local, own)
                own_bytes = bytes(content[place.offset : place.offset + place.num_bytes])
                assert self.peer.in_slot(self.iteration, str(local.unit)) == own_bytes

    def close(self) -> None:
        self.replicator.close()
        if hasattr(self, "peer"):
            self.peer.close()
