"""Speed and memory of conversions, next to reading and writing as many bytes.

    python -m benchmarks.convert [--gb N] [--shard-gib N] [--repetitions N] [--directory DIR]
        [--quick] [--output FILE.md]

The source is a checkpoint of random numbers, of a model of Mixtral's shape: two tensor-parallel times two
data-parallel ranks with the distributed optimizer, which each save half of every parameter that they hold.
Layout, files, indexes and manifest come from the code of a run. In each repetition a conversion
and a plain copy take turns: one thread reads the files of the source in pieces of 16 MiB and writes new ones,
as many bytes as the conversion has read from the disk and has written. Before either, the page cache is told
to forget the source. Both end when what they have written is on the disk. What a conversion reads back to
verify it comes from the page cache. Each conversion has a process of its own, whose imports are not timed.

A conversion of weights reads a unit as a whole, moments too: its checksum is of all of it.

GB/s are of bytes read once and bytes written. Memory is the peak of the resident set above that before the
conversion, and includes files that are mapped.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from statistics import median
from typing import Any, override

import torch
from msgspec import structs

from benchmarks.output import conditions, markdown_table, parse_options, show, spread
from moe_ft.engine.memory.layout import FileLayout, lay_out
from moe_ft.engine.persist.manifests import write_manifest
from moe_ft.files.storage import Storage, file_tag, rank_path
from moe_ft.format.encoding import FORMAT, checksum, encode
from moe_ft.format.entries import GlobalPlace, ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import make_identity
from tests.unit.moe_ft.convert.models import KEYS, Known, _record

ITERATION = 1000
_TP, _DP = 2, 2
_HIDDEN, _FFN, _EXPERTS, _HEADS, _GROUPS, _VOCABULARY = 512, 1792, 8, 8, 2, 4096  # Mixtral's, by 8
_POOL_ELEMENTS = 1 << 24


class _Tensor(Known):
    """A tensor of the model; that of an expert has its number."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on a rank."""
        return tuple(
            size // _TP if dim == self.dim else size for dim, size in enumerate(self.shape)
        )

    @override
    def places(self, tp_rank: int) -> Iterator[GlobalPlace]:
        stack = () if self.expert < 0 else (_EXPERTS,)
        for place in super().places(tp_rank):
            yield structs.replace(place, shape=(*stack, *self.shape))


def _tensor(
    unit: UnitId, key: str, shape: tuple[int, ...], dim: int = -1, num_halves: int = 1
) -> _Tensor:
    """Return a tensor that tensor parallelism divides along a dimension, if one is given."""
    name, expert = key, unit.expert if unit.kind is UnitKind.EXPERT else -1
    if expert >= 0:
        name = key.replace(".experts.experts.", f".experts.local_experts.{expert}.")
    return _Tensor(unit, name, key, shape, dim, num_halves, expert)


def _layer(layer: int) -> Iterator[_Tensor]:
    name = f"decoder.layers.{layer}"
    unit = UnitId(kind=UnitKind.NON_EXPERT, layer=layer)
    attention = f"{name}.self_attention"
    rows = _HIDDEN + 2 * _HIDDEN // _HEADS * _GROUPS
    yield _tensor(unit, f"{attention}.linear_qkv.layer_norm_weight", (_HIDDEN,))
    yield _tensor(unit, f"{attention}.linear_qkv.weight", (rows, _HIDDEN), 0)
    yield _tensor(unit, f"{attention}.linear_proj.weight", (_HIDDEN, _HIDDEN), 1)
    yield _tensor(unit, f"{name}.pre_mlp_layernorm.weight", (_HIDDEN,))
    router = UnitId(kind=UnitKind.ROUTER, layer=layer)
    yield _tensor(router, f"{name}.mlp.router.weight", (_EXPERTS, _HIDDEN))
    for expert in range(_EXPERTS):
        unit = UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)
        key = f"{name}.mlp.experts.experts"
        yield _tensor(unit, f"{key}.linear_fc1.weight", (2 * _FFN, _HIDDEN), 0, 2)
        yield _tensor(unit, f"{key}.linear_fc2.weight", (_HIDDEN, _FFN), 1)


def _model(num_layers: int) -> list[_Tensor]:
    ends = (
        (UnitKind.EMBEDDING, "embedding.word_embeddings.weight", (_VOCABULARY, _HIDDEN), 0),
        (UnitKind.FINAL_NORM, "decoder.final_layernorm.weight", (_HIDDEN,), -1),
        (UnitKind.OUTPUT, "output_layer.weight", (_VOCABULARY, _HIDDEN), 0),
    )
    outside = [_tensor(UnitId(kind=kind), key, shape, dim) for kind, key, shape, dim in ends]
    return [*outside, *(each for layer in range(num_layers) for each in _layer(layer))]


def _bytes_of(model: list[_Tensor]) -> int:
    return sum(4 * len(KEYS) * torch.Size(each.shape).numel() for each in model)


def write_checkpoint(directory: Path, num_bytes: int) -> int:
    """Write a checkpoint of about so many bytes to a new persist directory; return its size."""
    per_layer = _bytes_of(_model(2)) - _bytes_of(_model(1))
    num_layers = max(1, round((num_bytes - _bytes_of(_model(0))) / per_layer))
    model, storage = _model(num_layers), Storage(str(directory))
    storage.make_root()
    who = _identity(num_layers)
    tag = file_tag(who)
    pool = torch.randn(_POOL_ELEMENTS, generator=torch.Generator().manual_seed(1))
    for rank in range(_TP * _DP):
        _write_rank(storage, rank, model, who, tag, pool)
    write_manifest(storage, ITERATION, tag, _TP * _DP)
    return _bytes_of(model)


def _write_rank(
    storage: Storage, rank: int, model: list[_Tensor], who: Identity, tag: str, pool: torch.Tensor
) -> None:
    entries: dict[UnitId, list[TensorEntry]] = {}
    for each in model:
        numel = torch.Size(each.local_shape).numel()
        start, end = (numel * (rank // _TP + more) // _DP for more in (0, 1))
        entries.setdefault(each.unit, []).extend(
            TensorEntry(each.parameter, key, start, end, "F32", 0) for key in KEYS
        )
    layout = lay_out((unit, Level.FULL, tensors) for unit, tensors in entries.items())
    units: dict[str, UnitEntry] = {}
    data = rank_path(ITERATION, rank, tag, "safetensors")
    storage.write(data, _pieces(layout, pool, units))
    index = Index(
        format=FORMAT,
        identity=who,
        rank=rank,
        node="node",
        iteration=ITERATION,
        file=data.rpartition("/")[2],
        file_bytes=layout.num_bytes,
        header_bytes=len(layout.header),
        header_checksum=checksum(layout.header),
        units=units,
        parameters={
            each.parameter: ParameterEntry(
                shape=each.local_shape, dtype="BF16", places=tuple(each.places(rank % _TP))
            )
            for each in model
        },
        records=(structs.replace(_record(ITERATION), buffers={}),),
    )
    storage.write_atomically(rank_path(ITERATION, rank, tag, "json"), encode(index))


def _pieces(
    layout: FileLayout, pool: torch.Tensor, units: dict[str, UnitEntry]
) -> Iterator[memoryview]:
    """Yield the bytes of a file, and note its units."""
    yield memoryview(layout.header)
    end = len(layout.header)
    for number, place in enumerate(layout.units):
        yield memoryview(bytes(place.offset - end))
        content = bytearray(place.num_bytes)
        for tensor in place.tensors:
            count = tensor.end - tensor.start
            first = (number * 1000) % (_POOL_ELEMENTS - count)
            target = torch.frombuffer(
                content, dtype=torch.float32, count=count, offset=tensor.offset
            )
            target.copy_(pool[first : first + count])
        units[str(place.unit)] = UnitEntry(
            offset=place.offset,
            num_bytes=place.num_bytes,
            iteration=ITERATION,
            level=place.level.value,
            checksum=checksum(memoryview(content)),
            tensors=place.tensors,
        )
        yield memoryview(content)
        end = place.offset + place.num_bytes
    yield memoryview(bytes(layout.num_bytes - end))


def _identity(num_layers: int) -> Identity:
    settings = {
        "--num-layers": num_layers,
        "--hidden-size": _HIDDEN,
        "--ffn-hidden-size": _FFN,
        "--moe-ffn-hidden-size": _FFN,
        "--num-attention-heads": _HEADS,
        "--group-query-attention": True,
        "--num-query-groups": _GROUPS,
        "--kv-channels": _HIDDEN // _HEADS,
        "--num-experts": _EXPERTS,
        "--moe-router-topk": 2,
        "--max-position-embeddings": 4096,
        "--position-embedding-type": "rope",
        "--rotary-base": 1000000,
        "--normalization": "RMSNorm",
        "--layernorm-epsilon": 1e-5,
        "--swiglu": True,
        "--untie-embeddings-and-output-weights": True,
        "--padded-vocab-size": _VOCABULARY,
        "--vocab-size": _VOCABULARY,
        "--bf16": True,
        "--use-distributed-optimizer": True,
        "--tensor-model-parallel-size": _TP,
    }
    return structs.replace(make_identity(world_size=_TP * _DP), fingerprint=settings)


# --- the conversions

_PIECE_BYTES = 16 << 20
_GIB = 1 << 30
HEADERS = (
    "conversion",
    "GB/s",
    "read and write, GB/s",
    "of that",
    "shard, MB",
    "memory, MB",
    "shards",
)

# (name, source, format, further settings of the request)
CONVERSIONS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("moe_ft -> torch_dist", "moe_ft", "torch_dist", {}),
    ("moe_ft -> safetensors", "moe_ft", "safetensors", {}),
    ("moe_ft -> safetensors, weights", "moe_ft", "safetensors", {"what": "weights"}),
    ("moe_ft -> hf", "moe_ft", "hf", {"what": "weights"}),
    ("hf -> torch_dist", "hf", "torch_dist", {}),
)


def files_of(directory: Path) -> list[Path]:
    """Return all files below a directory."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def bytes_of(directory: Path) -> int:
    """Return the size of all files below a directory."""
    return sum(path.stat().st_size for path in files_of(directory))


def forget(directory: Path) -> None:
    """Have the page cache forget all files below a directory."""
    os.sync()
    for path in files_of(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy_plainly(source: Path, target: Path, num_read: int, num_written: int) -> float:
    """Read some bytes of a directory and write some to new files; return the seconds."""
    begin = time.perf_counter()
    target.mkdir()
    content = memoryview(bytearray(_PIECE_BYTES))
    with (target / "plain").open("wb", buffering=0) as file:
        for path in files_of(source):
            with path.open("rb", buffering=0) as opened:
                while num_read > 0 and (
                    count := opened.readinto(content[: min(num_read, _PIECE_BYTES)])
                ):
                    num_read -= count
                    num_written -= _write(file, content[: min(count, num_written)])
        while num_written > 0:
            num_written -= _write(file, content[:num_written])
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def _write(file: io.FileIO, content: memoryview) -> int:
    return file.write(content) or 0


def status_bytes(name: str) -> int:
    """Return a number of /proc/self/status, such as VmRSS or VmHWM."""
    text = Path("/proc/self/status").read_text()
    (line,) = (each for each in text.splitlines() if each.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def bytes_read() -> int:
    """Return the bytes that the disk has given to this process so far."""
    (line,) = (
        each
        for each in Path("/proc/self/io").read_text().splitlines()
        if each.startswith("read_bytes:")
    )
    return int(line.split()[1])


def convert_here(request: dict[str, Any]) -> dict[str, float]:
    """Convert in this process; return the seconds, the bytes read from the disk, and the peak of memory.

    The peak is that above the memory before.
    """
    from moe_ft.commands.convert import keep_freed_memory
    from moe_ft.convert.conversion import ConversionRequest, convert

    keep_freed_memory()  # as the command does
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = status_bytes("VmRSS")
    num_read, begin = bytes_read(), time.perf_counter()
    with redirect_stderr(io.StringIO()):
        convert(ConversionRequest(**request))
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "read": bytes_read() - num_read,
        "memory": status_bytes("VmHWM") - before,
    }


def convert_apart(request: dict[str, Any]) -> dict[str, float]:
    """Convert in a process of its own."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.convert", "--request"]
    done = subprocess.run([*words, json.dumps(request)], check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(
    source: Path, to: str, further: dict[str, Any], folder: Path, shard_bytes: int, repetitions: int
) -> tuple[str, ...]:
    """Time one conversion and the plain copy in turns; return the cells of its row."""
    target, plain = folder / "converted", folder / "plain"
    request = {
        "source": str(source),
        "destination": str(target),
        "to": to,
        "shard_bytes": shard_bytes,
    }
    ours: list[float] = []
    raw: list[float] = []
    memory: list[float] = []
    sizes: list[int] = []
    num_read = num_written = 0

    def convert_once() -> None:
        nonlocal num_read, num_written
        found = convert_apart({**request, **further})
        ours.append(found["seconds"])
        memory.append(found["memory"])
        sizes[:] = [path.stat().st_size for path in files_of(target)]
        num_written = sum(sizes)
        # Without what the kernel has read ahead of the end of a file, again after it was forgotten.
        num_read = min(int(found["read"]), bytes_of(source))

    def copy_once() -> None:
        raw.append(copy_plainly(source, plain, num_read, num_written))

    for turn in range(repetitions + 1):
        for step in (convert_once, copy_once) if turn % 2 == 0 else (copy_once, convert_once):
            for path in (target, plain):
                shutil.rmtree(path, ignore_errors=True)
            forget(source)
            step()
    for path in (target, plain):
        shutil.rmtree(path, ignore_errors=True)
    moved = num_read + num_written
    shares = [raw_s / ours_s for raw_s, ours_s in zip(raw[1:], ours[1:], strict=True)]
    return (
        *(_rates(moved, each[1:]) for each in (ours, raw)),
        spread(shares, ".0%"),
        f"{max(sizes) / 1e6:.0f}",
        f"{median(memory[1:]) / 1e6:.0f}",
        f"{median(memory[1:]) / max(sizes):.2f}",
    )


def _rates(num_bytes: int, seconds: Sequence[float]) -> str:
    return spread([num_bytes / each / 1e9 for each in seconds], ".2f")


def rows(
    folder: Path, num_bytes: int, shard_bytes: int, repetitions: int
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    sources = {"moe_ft": folder / "persist", "hf": folder / "hf"}
    write_checkpoint(sources["moe_ft"], num_bytes)
    places = {"source": str(sources["moe_ft"]), "destination": str(sources["hf"])}
    convert_apart({**places, "to": "hf", "shard_bytes": shard_bytes})
    for name, source, to, further in CONVERSIONS:
        cells = measure(sources[source], to, further, folder, shard_bytes, repetitions)
        print(name, *cells, file=sys.stderr, flush=True)
        yield (name, *cells)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="of the checkpoint")
    parser.add_argument(
        "--shard-gib", type=float, help="largest file (default: an eighth, at most 2)"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="after one unmeasured one")
    parser.add_argument("--directory", type=Path, help="on the disk to write to (default: TMPDIR)")
    parser.add_argument("--request", help=argparse.SUPPRESS)  # of the process that converts
    options = parse_options(parser, gb=0.02, repetitions=1)
    if options.request:
        print(json.dumps(convert_here(json.loads(options.request))))
        return
    num_bytes = int(options.gb * 1e9)
    shard_bytes = (
        int(options.shard_gib * _GIB) if options.shard_gib else min(num_bytes // 8, 2 * _GIB)
    )
    with tempfile.TemporaryDirectory(prefix="convert_", dir=options.directory) as name:
        table = list(rows(Path(name), num_bytes, shard_bytes, options.repetitions))
    described = conditions(
        f"A checkpoint of {options.gb:g} GB of 4 ranks, shards of {shard_bytes / 1e6:.0f} MB; median (range) "
        f"of {options.repetitions}."
    )
    show([described, markdown_table(table, HEADERS)], options.output)


if __name__ == "__main__":
    main()
