"""Small states that are real in form: identities, records, indexes, data files, regions, checkpoints."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from emerging_optimizers.scalar_optimizers import Lion

from moe_ft.engine.memory.layout import FileLayout, lay_out, lay_out_window
from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.engine.persist.manifests import find_manifests, read_manifest, write_manifest
from moe_ft.files.storage import Storage, file_tag, rank_path
from moe_ft.format.encoding import FORMAT, checksum, encode
from moe_ft.format.entries import ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import History, Identity, Start
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest
from moe_ft.format.records import IterationRecord, OptimizerRecord, RecordTensor
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import Level, UnitId, UnitKind

FRESH = ((0, 0),)


def numbers(seed: str, num_bytes: int) -> bytes:
    """Return random bytes that are finite numbers, as 16-bit and 32-bit floats."""
    content = bytearray(random.Random(seed).randbytes(num_bytes))
    content[1::2] = bytes(byte & 0x3F for byte in content[1::2])
    return bytes(content)


def make_history(starts: Sequence[tuple[int, int]], lineage: str = "run-a") -> History:
    """Return the history of starts of which each has found those before: number and iteration of each."""
    return tuple(
        Start(number=number, resumed_at=at, name=f"{lineage}-{number}-{at}")
        for number, at in starts
    )


def make_identity(
    lineage: str = "run-a",
    history: Sequence[tuple[int, int]] = FRESH,
    *,
    world_size: int = 1,
    job_id: str = "job",
    superseded: tuple[str, ...] = (),
) -> Identity:
    """Return who wrote something."""
    return Identity(
        job_id=job_id,
        lineage=lineage,
        history=make_history(history, lineage),
        superseded=superseded,
        fingerprint={"--hidden-size": 64, "--seed": 1},
        world_size=world_size,
        strategy="dense",
    )


def make_record(iteration: int) -> IterationRecord:
    """Return a record with something in every field."""
    packed = RecordTensor(dtype="F32", shape=(2,), data=b"\x00\x01\x02\x03\x04\x05\x06\xff")
    return IterationRecord(
        iteration=iteration,
        grad_norm=1.5,
        grad_norms_by_group={"mtp": "inf"},
        num_tokens=None,
        optimizers=(
            OptimizerRecord(groups=({"lr": 1e-3, "wd": 0.1},), steps={"*": 3.0}, found_inf=False),
        ),
        scheduler={"num_steps": 12},
        consumed_train_samples=8 * iteration,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        num_floating_point_operations=1e15,
        num_microbatches=2,
        rng={"python": [3, [1, 2], None]},
        buffers={"layer.0.expert_bias": packed},
        extra_state={},
        tokens_per_expert={"layer.0": (5, 3)},
        loop_state={"epoch": 1, "shards": ["a", "b"]},
    )


def make_state(
    rank: int = 0,
    iteration: int = 5,
    identity: Identity | None = None,
    *,
    file: str = "region_0.safetensors",
    num_elements: int = 33,
) -> tuple[Index, bytes]:
    """Return an index and the content of its data file; rank and iteration decide the bytes."""
    units = [UnitId(kind=UnitKind.EMBEDDING)]
    units += [UnitId(kind=UnitKind.EXPERT, layer=0, expert=expert) for expert in range(2)]
    layout = lay_out(
        (
            unit,
            Level.FULL,
            [
                TensorEntry(f"{unit}.weight", key, 0, num_elements, "F32", 0)
                for key in ("param", "exp_avg")
            ],
        )
        for unit in units
    )
    data = numbers(f"{rank} {iteration}", layout.num_bytes - len(layout.header))
    content = layout.header + data
    index = Index(
        format=FORMAT,
        identity=identity or make_identity(),
        rank=rank,
        node="node-a",
        iteration=iteration,
        file=file,
        file_bytes=layout.num_bytes,
        header_bytes=len(layout.header),
        header_checksum=checksum(layout.header),
        units={
            str(place.unit): UnitEntry(
                offset=place.offset,
                num_bytes=place.num_bytes,
                iteration=iteration,
                level=place.level.value,
                checksum=checksum(content[place.offset : place.offset + place.num_bytes]),
                tensors=place.tensors,
            )
            for place in layout.units
        },
        parameters={f"{unit}.weight": ParameterEntry(shape=(num_elements,)) for unit in units},
        records=(make_record(iteration),),
    )
    return index, content


def fill_region(
    directory: Path,
    number: int = 0,
    *,
    rank: int = 0,
    iteration: int = 5,
    identity: Identity | None = None,
    num_elements: int = 33,
) -> tuple[Region, Index]:
    """Return an open region that holds a committed state, and its index."""
    index, content = make_state(rank, iteration, identity, num_elements=num_elements)
    region = Region(directory, number, len(content))
    index = msgspec.structs.replace(index, file=region.data_path.name)
    region.open()
    region.mapping[:] = content
    region.commit(encode(index), iteration)
    return region, index


WINDOW_UNITS = (
    *(UnitId(kind=UnitKind.EXPERT, layer=0, expert=expert) for expert in range(3)),
    UnitId(kind=UnitKind.EMBEDDING),
)
WINDOW_FILE_BYTES = 16384  # enough for windows of any length here


def window_position(unit: UnitId, length: int) -> int:
    """Return which snapshot of `make_window` has a unit at FULL."""
    return WINDOW_UNITS.index(unit) * length // len(WINDOW_UNITS)


@dataclass(frozen=True, kw_only=True)
class WindowState:
    """A window of snapshots.

    Attributes:
        layout, content: of the file in which all of them are.
        index: of all of them.
    """

    layout: FileLayout
    content: bytes
    index: Index

    @property
    def first_iteration(self) -> int:
        """The iteration of the first snapshot."""
        return self.index.iteration - self.index.num_snapshots + 1

    def up_to(self, num_snapshots: int) -> Index:
        """Return the index that there is when so many snapshots have been taken."""
        last = self.first_iteration + num_snapshots - 1
        units = self.index.units.items()
        return msgspec.structs.replace(
            self.index,
            iteration=last,
            num_snapshots=num_snapshots,
            records=self.index.records[:num_snapshots],
            units={name: unit for name, unit in units if unit.iteration <= last},
            compute=self.index.compute[:num_snapshots],
        )

    def stretch(self, position: int) -> tuple[int, int]:
        """Return where what a snapshot adds begins and ends."""
        return (self.layout.ends[position - 1] if position else 0), self.layout.ends[position]


def _window_units(
    position: int, length: int, num_elements: int
) -> list[tuple[UnitId, Level, list[TensorEntry]]]:
    """Return what one snapshot of `make_window` holds."""
    found = []
    for unit in WINDOW_UNITS:
        at = window_position(unit, length)
        level = Level.FULL if at == position else Level.COMPUTE
        keys = {"param": "F32", "exp_avg": "F32"} if at == position else {"weight": "BF16"}
        if at >= position:
            tensors = [
                TensorEntry(f"{unit}.weight", key, 0, num_elements, dtype, 0)
                for key, dtype in keys.items()
            ]
            found.append((unit, level, tensors))
    return found


def make_window(
    rank: int = 0,
    first_iteration: int = 5,
    length: int = 3,
    identity: Identity | None = None,
    *,
    file: str = "region_0.safetensors",
    num_elements: int = 33,
) -> WindowState:
    """Return a window of four units; rank and iteration decide the bytes.

    Every unit has an fp32 master and a moment at FULL, and a BF16 weight at COMPUTE.
    """
    layout = lay_out_window(
        [_window_units(each, length, num_elements) for each in range(length)], WINDOW_FILE_BYTES
    )
    seed = f"{rank} {first_iteration} {length}"
    content = layout.header + numbers(seed, layout.num_bytes - len(layout.header))

    def entries(position: int, level: Level) -> dict[str, UnitEntry]:
        return {
            str(place.unit): UnitEntry(
                offset=place.offset,
                num_bytes=place.num_bytes,
                iteration=first_iteration + position,
                level=place.level.value,
                checksum=checksum(content[place.offset : place.offset + place.num_bytes]),
                tensors=place.tensors,
            )
            for place in layout.snapshots[position]
            if place.level is level
        }

    full = [entries(position, Level.FULL) for position in range(length)]
    index = Index(
        format=FORMAT,
        identity=identity or make_identity(),
        rank=rank,
        node="node-a",
        iteration=first_iteration + length - 1,
        file=file,
        file_bytes=layout.num_bytes,
        header_bytes=len(layout.header),
        header_checksum=checksum(layout.header),
        units={name: unit for units in full for name, unit in units.items()},
        parameters={
            f"{unit}.weight": ParameterEntry(shape=(num_elements,)) for unit in WINDOW_UNITS
        },
        records=tuple(make_record(first_iteration + position) for position in range(length)),
        window=length,
        num_snapshots=length,
        compute=tuple(entries(position, Level.COMPUTE) for position in range(length))
        if length > 1
        else (),
    )
    return WindowState(layout=layout, content=content, index=index)


def fill_window(
    directory: Path,
    number: int = 0,
    *,
    rank: int = 0,
    first_iteration: int = 5,
    length: int = 3,
    num_snapshots: int | None = None,
    identity: Identity | None = None,
) -> tuple[Region, WindowState]:
    """Return an open region that holds a window, or its first snapshots, and the window."""
    region = Region(directory, number, WINDOW_FILE_BYTES)
    window = make_window(rank, first_iteration, length, identity, file=region.data_path.name)
    index = window.up_to(num_snapshots or length)
    region.open()
    region.mapping[:] = window.content
    region.commit(encode(index), index.iteration)
    return region, window


def persist_window(
    storage: Storage, iteration: int, identity: Identity, length: int = 3
) -> Manifest:
    """Write the files of all ranks, each a window that ends at an iteration, and the manifest."""
    tag = file_tag(identity)
    for rank in range(identity.world_size):
        data_path = rank_path(iteration, rank, tag, "safetensors")
        name, first = data_path.rpartition("/")[2], iteration - length + 1
        window = make_window(rank, first, length, identity, file=name)
        storage.write(data_path, [memoryview(window.content)])
        storage.write_atomically(rank_path(iteration, rank, tag, "json"), encode(window.index))
    return write_manifest(storage, iteration, tag, identity.world_size)


def persist_rank(storage: Storage, rank: int, iteration: int, identity: Identity) -> None:
    """Write one rank's files of a checkpoint."""
    tag = file_tag(identity)
    data_path = rank_path(iteration, rank, tag, "safetensors")
    index, content = make_state(rank, iteration, identity, file=data_path.rpartition("/")[2])
    storage.write(data_path, [memoryview(content)])
    storage.write_atomically(rank_path(iteration, rank, tag, "json"), encode(index))


def persist_checkpoint(storage: Storage, iteration: int, identity: Identity) -> Manifest:
    """Write the files of all ranks and the manifest."""
    for rank in range(identity.world_size):
        persist_rank(storage, rank, iteration, identity)
    return write_manifest(storage, iteration, file_tag(identity), identity.world_size)


def manifest_of(storage: Storage, iteration: int) -> Manifest:
    """Return the only manifest of an iteration; raises if there is none, or there are several."""
    (path,) = find_manifests(storage, iteration)
    return read_manifest(storage, path)


def make_optimizer(*masters: torch.Tensor, kind: str = "adam") -> Any:
    """Return an inner optimizer as Megatron's look from outside, of a kind that decides the moments."""
    kinds = {"adam": torch.optim.Adam, "lion": Lion, "sgd": torch.optim.SGD}
    return SimpleNamespace(
        optimizer=kinds[kind](list(masters), lr=0.125) if masters else None,
        config=SimpleNamespace(optimizer=kind),
    )


def make_parameter(
    unit: UnitId,
    name: str = "",
    *,
    parameter: torch.Tensor | None = None,
    slice_: tuple[int, int] | None = None,
    optimizer: Any = None,
    master: torch.Tensor | None = None,
    is_sharded: bool = False,
) -> LocalParameter:
    """Return a parameter of a unit, by default one of four elements that this rank saves."""
    live = torch.nn.Parameter(torch.zeros(4) if parameter is None else parameter)
    start, end = slice_ or (0, live.numel())
    return LocalParameter(
        unit=unit,
        name=name or f"{unit}.weight",
        entry=ParameterEntry(shape=tuple(live.shape)),
        parameter=live,
        start=start,
        end=end,
        optimizer=optimizer,
        master=master,
        is_sharded=is_sharded,
        is_expert=unit.kind is UnitKind.EXPERT,
    )


def rotating_unit(expert: int) -> UnitId:
    """Return an expert that only some snapshots hold; `make_state` has none of its layer."""
    return UnitId(kind=UnitKind.EXPERT, layer=9, expert=expert)


def put_in_slot(
    pool: UnitPool, slot: int, expert: int, *, iteration: int = 5, num_elements: int = 33
) -> tuple[str, UnitEntry]:
    """Put a version of an expert into a slot of an open pool; expert and iteration decide the bytes."""
    name = str(rotating_unit(expert))
    content = numbers(f"{name} {iteration}", 4 * num_elements)
    offset = pool.offset_of(slot)
    pool.mapping[offset : offset + len(content)] = content
    return name, UnitEntry(
        offset=offset,
        num_bytes=len(content),
        iteration=iteration,
        level=Level.FULL.value,
        checksum=checksum(content),
        tensors=(TensorEntry(f"{name}.weight", "param", 0, num_elements, "F32", 0),),
        file=pool.name,
    )


def add_units(region: Region, index: Index, units: Mapping[str, UnitEntry]) -> Index:
    """Have a committed region's index name units of a pool too."""
    index = msgspec.structs.replace(index, units={**index.units, **units})
    region.commit(encode(index), index.iteration)
    return index
