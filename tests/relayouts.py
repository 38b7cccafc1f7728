"""Jobs that continue in another layout, and their tensors before and after, put together independently.

Before: from the files that the dead job has left, which `convert` chooses. After: from the live tensors of
all ranks. Both are read and put together by code of this file, as recovery and `convert` share theirs, and
must be the same, bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.training import get_tensorboard_writer

import pretrain_gpt_moe
from moe_ft.convert.source import open_source
from moe_ft.format.index import Index
from moe_ft.format.packings import Packing
from moe_ft.recovery.meet import Met
from moe_ft.recovery.restore import Restored, restore
from moe_ft.state.packed_values import unpack
from moe_ft.state.parameters import home_part
from moe_ft.state.slices import DTYPES, describe, live_tensor
from moe_ft.state.tensors import buffer_places
from moe_ft.units import Level
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import JobResult, events, run_ranks
from tests.stock import scalars_of

Tensors = dict[tuple[str, str], torch.Tensor]  # by name in the model and kind
Row = tuple[str, Any, tuple[int, ...], int, int, torch.Tensor]  # as `_rows` says
ANY = ("--moe-ft-layout", "any")
_KINDS = {"param": "master", "master_param": "master"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks and how they divide a model; further flags as `model_flags` takes them."""

    ranks: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        named = [f"{name}{size}" for name, size in self.sizes.items()]
        return "-".join([f"{self.ranks}ranks", *named, *map(str, self.changes)])


class LayoutJob:
    """Job whose starts have different layouts.

    Attributes:
        train: runs on every rank with the flags and a folder.
    """

    train: Callable[[list[str], str], None]

    def __init__(self, folder: Path, memory_dir: Path, **common: Any) -> None:
        self.folder, self.memory = folder, memory_dir
        self.storage = folder / "storage"
        self.train = train_and_dump
        self._common: dict[str, Any] = {"train_iters": 8, "lr_decay_style": "cosine", **common}
        self._count = 0

    def run(
        self,
        layout: Layout,
        *flags: str,
        strategy: str = "dense",
        nodes: Sequence[str] | None = None,
    ) -> JobResult:
        """Start the job once."""
        self._count += 1
        words = [
            *self._model(layout),
            *("--moe-ft-strategy", strategy, "--moe-ft-job-id", "job"),
            *("--moe-ft-memory-dir", str(self.memory), *event_flags(self.start)),
            *("--moe-ft-fault-report-grace-s", "0.5"),
            *(() if "--moe-ft-interval" in flags else ("--moe-ft-interval", "1")),
            *flags,
        ]
        return self._run(layout, words, self.start, nodes)

    @property
    def start(self) -> Path:
        """The folder of the last start."""
        return self.folder / f"start_{self._count}"

    def undisturbed(self, layout: Layout) -> dict[int, float]:
        """Return the losses of the job without checkpoints, by iteration."""
        folder = self.folder / "undisturbed"
        self._run(layout, self._model(layout), folder, None).check()
        return losses_of(folder)

    def _model(self, layout: Layout) -> list[str]:
        model = model_flags(**{**self._common, **layout.changes})
        return [*model, *layout_flags(layout.sizes), "--mock-data"]

    def _run(
        self, layout: Layout, words: list[str], folder: Path, nodes: Sequence[str] | None
    ) -> JobResult:
        board = ["--tensorboard-dir", str(folder / "board"), "--tensorboard-log-interval", "1"]
        return run_ranks(
            self.train,
            layout.ranks,
            [*words, *board],
            str(folder),
            log_dir=folder,
            nodes=nodes,
        )

    def left(self, place: Path | None = None) -> Tensors:
        """Return the tensors of the newest state that is in memory, or elsewhere."""
        root = place or self.memory / "job"
        return put_together(
            row
            for state in open_source(str(root)).ranks
            for row in _saved_rows(root, root / state.where, state.index)
        )

    def newest(self, place: Path | None = None) -> int:
        """Return the iteration of the newest state that is in memory, or elsewhere."""
        return open_source(str(place or self.memory / "job")).iteration

    def live(self, layout: Layout) -> Tensors:
        """Return the tensors that the last start has put back, before any iteration."""
        return put_together(
            row
            for rank in range(layout.ranks)
            for row in torch.load(self.start / f"live_{rank}.pt", weights_only=False)
        )

    def recovery(self, rank: int = 0) -> dict[str, Any]:
        """Return the last event of a recovery."""
        found: dict[str, Any] = events(self.start, rank, "recovery")[-1]
        return found


def losses_of(folder: Path) -> dict[int, float]:
    """Return the losses of a run that has ended, by iteration."""
    return dict(scalars_of(folder / "board")["lm loss"])


def train_and_dump(flags: list[str], folder: str) -> None:
    """Train on this rank; write its live tensors as soon as a recovery has put them back."""

    def restore_and_dump(*args: Any) -> Restored:
        restored = restore(*args)
        torch.save(_rows(args[2]), Path(folder) / f"live_{args[2].site.rank}.pt")
        return restored

    with patch("moe_ft.recovery.start.restore", restore_and_dump):
        pretrain_gpt_moe.main(flags)
    if (writer := get_tensorboard_writer()) is not None:
        writer.flush()  # the rank ends without closing it


def _rows(met: Met) -> list[Row]:
    """Return each live tensor: kind, places, shape, flat range, and its elements."""
    rows: list[Row] = []
    for local in met.live.parameters:
        places = local.entry.places or ()
        shape = tuple(local.entry.shape)
        flat = local.parameter.detach().view(-1).clone()
        first, end = 0, len(flat)
        if home_part(local.parameter) is not None:
            first, end = local.start, local.end
        rows.append(("weight", places, shape, first, end, flat[: end - first]))
        own = local if local.is_sharded else local.whole
        for entry in describe(own, Level.FULL):
            tensor = live_tensor(own, entry.key)
            if tensor is not None and entry.key != "weight":
                kind = _KINDS.get(entry.key, entry.key)
                flat = tensor.detach().clone().view(-1)
                rows.append((kind, places, shape, entry.start, entry.end, flat))
    for name, (module, key) in buffer_places(met.live.built[0]).items():
        buffer, places = module._buffers[key], met.live.model_places.buffers.get(name, ())
        if buffer is not None and places:
            flat = buffer.detach().clone().view(-1)
            rows.append(("weight", places, tuple(buffer.shape), 0, len(flat), flat))
    return rows


def _saved_rows(root: Path, index_path: Path, index: Index) -> Iterator[Row]:
    """Yield each tensor that a rank has saved, as `_rows` does of live ones; nothing of it may be packed."""
    for unit in index.units.values():
        # A unit names a file by its path on storage, in memory by its name.
        own = index_path.parent / index.file
        path = next(
            each for each in (root / unit.file, own.parent / unit.file, own) if each.is_file()
        )
        content = bytearray(path.read_bytes()[unit.offset : unit.offset + unit.num_bytes])
        have_weights = {each.parameter for each in unit.tensors if each.key == "weight"}
        for entry in unit.tensors:
            if entry.is_absent:
                continue
            assert entry.packing == Packing.EXACT
            described = index.parameters[entry.parameter]
            shape, places = tuple(described.shape), described.places or ()
            count = entry.end - entry.start
            flat = torch.frombuffer(
                content, dtype=DTYPES[entry.dtype], count=count, offset=entry.offset
            )
            kind = _KINDS.get(entry.key, entry.key)
            yield kind, places, shape, entry.start, entry.end, flat
            if kind == "master" and entry.parameter not in have_weights:
                weights = flat.to(DTYPES[described.dtype or ""])
                yield "weight", places, shape, entry.start, entry.end, weights
    for name, places in index.model_places.buffers.items():
        if (packed := index.records[-1].buffers.get(name)) is not None:
            buffer = unpack(packed)
            yield "weight", places, tuple(buffer.shape), 0, buffer.numel(), buffer.view(-1)


def put_together(rows: Iterable[Row]) -> Tensors:
    """Return the tensors of the model; fail if ranks differ in an element, or none has it."""
    found: Tensors = {}
    seen: Tensors = {}
    for kind, places, shape, first, end, flat in rows:
        values = torch.zeros(prod(shape), dtype=flat.dtype)
        known = torch.zeros(prod(shape), dtype=torch.bool)
        values[first:end], known[first:end] = flat, True
        for place in places:
            _add(found, seen, kind, place, values.view(shape), known.view(shape))
    assert all(bool(each.all()) for each in seen.values()), "something is on no rank"
    return found


def _add(
    found: Tensors, seen: Tensors, kind: str, place: Any, values: torch.Tensor, known: torch.Tensor
) -> None:
    stacked = len(place.shape) - len(place.extent)
    name = place.key
    if stacked:
        name = name.replace(".experts.experts.", f".experts.experts.{place.offset[0]}.")
    whole = tuple(place.shape[stacked:])
    to = found.setdefault((name, kind), torch.zeros(whole, dtype=values.dtype))
    there = seen.setdefault((name, kind), torch.zeros(whole, dtype=torch.bool))
    corners = zip(place.offset[stacked:], place.start, place.extent, strict=True)
    for dim, (offset, corner, extent) in enumerate(corners):
        to, there = to.narrow(dim, offset, extent), there.narrow(dim, offset, extent)
        values, known = values.narrow(dim, corner, extent), known.narrow(dim, corner, extent)
    assert not ((to != values) & there & known).any(), f"ranks differ in {name}"
    to.copy_(torch.where(known, values, to))
    there |= known


def check_same(before: Tensors, after: Tensors) -> None:
    """Fail unless all tensors that were are there again, bit for bit."""
    assert before
    wrong = [key for key in before if key not in after or not _are_equal(before[key], after[key])]
    assert not wrong, f"{len(wrong)} of {len(before)} tensors differ: {wrong[:3]}"


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    ours, theirs = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return one.dtype == other.dtype and torch.equal(ours, theirs)
