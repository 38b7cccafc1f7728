"""Speed of the storage tier and of restores, against the plainest way to move the same bytes.

    python -m benchmarks.storage [--mib N] [--repetitions N] [--directory DIR]
        [--quick] [--output FILE.md]

One rank's state, taken into a region on tmpfs by the engine's own thread:

persist   what the writer process does with it until the checkpoint is complete, and until it is read
          back, and a plain write and fsync of the same bytes; stall.py has other libraries
restore   finding, verifying and copying it into the live state, and copying the same bytes (``copy_``)
          from warm memory
verify    reading a checkpoint and comparing its checksums, as ``python -m moe_ft verify`` does
threads   checksums by 1, 2 and 4 threads, as snapshots, replicas and persisted files get them

Compared functions take turns, and turns alternate in order. Files are new ones each time, written when
the disk has nothing else to write. Numbers are medians (and ranges).
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks import stand_ins
from benchmarks.output import conditions, markdown_table, read_options, show, spread, take_turns
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.requests import PersistRequest
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.files.storage import Storage, file_tag
from moe_ft.format import encoding
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index, check_units
from moe_ft.planning.recovery import Source
from moe_ft.planning.tiers import MEMORY
from moe_ft.recovery.fetch import read_window
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.inspect.verification import verify
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.left import Left
from moe_ft.recovery.put_back import put_back
from moe_ft.recovery.readers import MemoryReader, Readers
from moe_ft.recovery.transfer import OwnUnits
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.dense import DenseStrategy

NUM_PARAMETERS = 40
BYTES_PER_ELEMENT = 4 + 4 + 4  # master weight and two moments: what a snapshot holds
_CHUNK_BYTES = 16 << 20
_ITERATION = 5
_NODE = "node"
NUM_THREADS = (1, 2, 4)
HEADERS = ("what", "s", "GB/s", "ratio")

Samples = dict[str, list[float]]


def new_state(mib: int) -> dict[str, torch.Tensor]:
    """Return the live state of one rank, of which a snapshot has so many MiB."""
    num_elements = mib * 2**20 // (NUM_PARAMETERS * BYTES_PER_ELEMENT)
    state = {}
    for index in range(NUM_PARAMETERS):
        master = torch.randn(num_elements)
        state[f"{index}.weight"] = master.bfloat16()
        state[f"{index}.master"] = master
        state[f"{index}.exp_avg"] = torch.randn(num_elements)
        state[f"{index}.exp_avg_sq"] = torch.rand(num_elements)
    return state


def write_plainly(region: Region, num_bytes: int, path: Path) -> None:
    """Write a region's bytes to a new file and wait until they are on the disk."""
    with path.open("wb", buffering=0) as file, memoryview(region.mapping) as content:
        for start in range(0, num_bytes, _CHUNK_BYTES):
            file.write(content[start : min(start + _CHUNK_BYTES, num_bytes)])
        os.fsync(file.fileno())


def read_index(region: Region) -> Index:
    """Return what a committed region says of itself."""
    return decode(region.index_path.read_bytes(), Index, str(region.index_path))


def check_region(region: Region) -> None:
    """Compare all checksums of a region with its bytes."""
    with memoryview(region.mapping) as content:
        check_units(read_index(region), {"": content}, str(region.data_path))


def measure_persist(region: Region, disk: Path, repetitions: int) -> Samples:
    """Time the writer and a plain write."""
    directory = disk / "persist"
    worker = PersistWorker(disk, Storage(str(directory)), 1)
    index = read_index(region)
    request = PersistRequest(
        rank=0,
        iteration=_ITERATION,
        index=str(region.index_path),
        data=str(region.data_path),
        rotating=(),
        previous="",
        tag=file_tag(index.identity),
        writes_manifest=True,
        deadline_s=3600.0,
    )

    def prepare() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        os.sync()

    complete_s: list[float] = []
    functions: dict[str, Callable[[], object]] = {
        "write and fsync": lambda: write_plainly(region, index.file_bytes, directory / "plain"),
        "persist, and read back": lambda: worker.persist(
            request, tell=lambda _, seconds, __: complete_s.append(seconds)
        ),
        "of which checksums": lambda: check_region(region),
    }
    samples = take_turns(functions, repetitions, prepare)
    samples["of which until complete"] = complete_s[1:]
    prepare()
    worker.persist(request)  # to be verified
    return samples


def measure_restore(
    state: Mapping[str, torch.Tensor],
    parameters: Sequence[LocalParameter],
    region: Region,
    memory: Path,
    repetitions: int,
) -> Samples:
    """Time a restore from memory and a copy of the same tensors.

    A start opens its regions anyway, for its next snapshots; mapping them is not part of the restore.
    """
    live = [tensor for name, tensor in state.items() if not name.endswith(".weight")]
    copies = [tensor.clone() for tensor in live]
    catalog, fetched = stand_ins.catalog_of(parameters), Fetched()

    def fetch_state() -> None:
        nonlocal fetched
        versions = look_at_memory(memory, _NODE, stand_ins.JOB_ID).versions
        sources = [Source(tier=MEMORY, version=version) for version in versions]
        readers = Readers(lambda source: MemoryReader(region.index_path, [region]))
        left = Left(readers, sources)
        index = left.first_index()
        assert index is not None
        fetched = read_window(left, OwnUnits(left, catalog), index, catalog.units)

    def put_state_back() -> None:
        put_back(list(fetched.units.values()), catalog, _ITERATION, stand_ins.no_fault)

    def restore() -> None:
        fetch_state()
        put_state_back()

    def copy() -> None:
        for target, source in zip(live, copies, strict=True):
            target.copy_(source)

    samples = take_turns({"copy": copy, "restore": restore}, repetitions)
    parts = {"of which finding and verifying": fetch_state, "of which copying": put_state_back}
    samples |= take_turns(parts, repetitions)
    for tensor in live:
        tensor.zero_()
    restore()
    if not all(torch.equal(*pair) for pair in zip(live, copies, strict=True)):
        raise RuntimeError("the restored state is not the saved one")
    return samples


def measure_verification(region: Region, disk: Path, memory: Path, repetitions: int) -> Samples:
    """Time checksums alone, and what the command line does with memory and with storage."""

    def verify_all(directory: Path) -> None:
        _, wrong = verify(str(directory))
        if wrong:
            raise RuntimeError(f"damaged: {wrong}")

    def forget() -> None:
        for path in disk.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    warm = {
        "checksums of a mapped region": lambda: check_region(region),
        "verify memory": lambda: verify_all(memory),
        "verify storage, in the page cache": lambda: verify_all(disk / "persist"),
    }
    cold = {"verify storage, read from the disk": lambda: verify_all(disk / "persist")}
    return take_turns(warm, repetitions) | take_turns(cold, repetitions, forget)


def measure_threads(region: Region, repetitions: int) -> Samples:
    """Time checksums of all units by several numbers of threads, also by more than there are cores."""

    def check(num_threads: int) -> None:
        with mock.patch.object(encoding, "num_cores_of_rank", lambda: num_threads + 1):
            check_region(region)

    functions = {f"{each} threads": partial(check, each) for each in NUM_THREADS}
    return take_turns(functions, repetitions)


def rows(samples: Samples, num_bytes: int, base: str) -> list[tuple[str, ...]]:
    """Return a table's rows; the ratio is that of the medians of a row and of the row `base`."""
    base_s = median(samples[base])
    return [
        (
            name,
            spread(values),
            f"{num_bytes / median(values) / 1e9:.2f}",
            f"{median(values) / base_s:.2f}",
        )
        for name, values in samples.items()
    ]


def main() -> None:
    """Measure and print the tables."""
    options = read_options(
        mib=(512, 8, "of a snapshot"),
        repetitions=(5, 1, "after one unmeasured one"),
        directory=(None, None, "on the disk to write to (default: TMPDIR)"),
    )
    torch.set_num_threads(1)
    state = new_state(options.mib)
    parameters = stand_ins.parameters_of(state, stand_ins.adam())
    plan = DenseStrategy(each.unit for each in parameters).plan_window(0)
    layout = stand_ins.layouts_of(parameters).lay_out(plan)
    with (
        tempfile.TemporaryDirectory(prefix="storage_", dir=options.directory) as disk_name,
        tempfile.TemporaryDirectory(prefix="storage_", dir="/dev/shm") as memory_name,
    ):
        disk, memory = Path(disk_name), Path(memory_name)
        region = stand_ins.snapshot(parameters, plan, layout, memory / "rank_00000", _ITERATION)
        count = options.repetitions
        tables = {
            "Persist": (measure_persist(region, disk, count), "write and fsync"),
            "Restore from memory": (
                measure_restore(state, parameters, region, memory, count),
                "copy",
            ),
            "Verify": (
                measure_verification(region, disk, memory, count),
                "checksums of a mapped region",
            ),
            "Checksums by several threads": (measure_threads(region, count), "1 threads"),
        }
        parts = [
            conditions(
                f"{layout.num_bytes / 2**20:.0f} MiB in {len(layout.units)} units; median (range) of {count}."
            )
        ]
        for title, (samples, base) in tables.items():
            table = rows(samples, layout.num_bytes, base)
            parts += [title, markdown_table(table, HEADERS)]
    show(parts, options.output)


if __name__ == "__main__":
    main()
