"""Parity of simulated jobs: what a lost rank's state is by its own rules, and the settings of such jobs."""

import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from moe_ft.engine.memory.parity import ParityIndex
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import decode
from moe_ft.format.identity import Start
from moe_ft.format.index import Index
from tests.simulation.job import Setup

_Version = tuple[
    Start, int, tuple[int, ...], int
]  # writer, iteration, and the group's ranks and stripes
SHARE = 0.06  # of the schedules
_PLACES = ((1, 3, 3), (1, 4, 4), (2, 3, 3), (1, 6, 3), (2, 2, 4))  # stages, ranks of each, nodes


def with_parity(setup: Setup, rng: random.Random) -> Setup:
    """Return a job whose ranks keep parity of each other's state."""
    stages, dp, nodes = rng.choice(_PLACES)
    changes: dict[str, object] = {
        "stages": stages,
        "dp": dp,
        "tp": 1,
        "ep": 1,
        "nodes": nodes,
        "parity": rng.choice((3, 4)),
        "replication": "auto",
        "iterations": min(setup.iterations, 6),
        "is_followed": False,
        "upstream_log": False,
        "recovery": "auto",
        "later": (),
    }
    if setup.strategy not in ("dense", "sparse"):
        changes |= {"strategy": "dense", "options": {}, "interval": "1", "boost": 0.0}
    if setup.sharding == "adaptive":
        changes["sharding"] = "equal"
    changed: Setup = msgspec.structs.replace(setup, **changes)
    return changed


def made_again(
    root: Path, nodes: Collection[str], held: Sequence[tuple[Path, Index]]
) -> Iterator[tuple[Index, bytes]]:
    """Yield what parity has of ranks whose own state is gone: their index, and the bytes of their region.

    Args:
        held: whole windows of ranks in their own memory, which are intact, and the folders that they are in.
    """
    found: dict[_Version, dict[int, tuple[Path, ParityIndex]]] = {}
    for path in root.glob("*/*/rank_*/parity_*.json"):
        if path.parents[1].name not in nodes:
            continue
        try:
            index = decode(path.read_bytes(), ParityIndex, str(path))
        except CorruptStateError:
            continue
        group = index.group
        key = (index.identity.start, index.iteration, group.ranks, group.stripe_bytes)
        found.setdefault(key, {})[index.holder] = path.with_suffix(".xor"), index
    for (start, iteration, ranks, size), parities in found.items():
        here = {
            index.rank: folder / index.file
            for folder, index in held
            if (index.identity.start, index.iteration) == (start, iteration)
        }
        for lost in ranks:
            others = [each for each in ranks if each != lost]
            if lost not in here and all(each in here and each in parities for each in others):
                yield _make(lost, ranks, size, parities, here)


def _make(
    lost: int,
    ranks: Sequence[int],
    size: int,
    parities: dict[int, tuple[Path, ParityIndex]],
    held: dict[int, Path],
) -> tuple[Index, bytes]:
    content = b""
    for holder in (each for each in ranks if each != lost):
        path, index = parities[holder]
        stripe = int.from_bytes(path.read_bytes(), "big")
        for source in index.sources:
            if source.rank == lost:
                own = source
                continue
            others = [each for each in ranks if each != source.rank]
            start = others.index(holder) * size
            data = held[source.rank].read_bytes()[: _end_of(source)]
            stripe ^= int.from_bytes(data[start : start + size].ljust(size, b"\0"), "big")
        content += stripe.to_bytes(size, "big")
    return own, content


def _end_of(index: Index) -> int:
    return max(
        (each.offset + each.num_bytes for _, each in index.entries()), default=index.header_bytes
    )


def is_intact(index: Index, content: bytes) -> bool:
    """Return whether bytes are what an index says."""
    header = xxhash.xxh3_64_hexdigest(content[: index.header_bytes]) == index.header_checksum
    return header and all(
        xxhash.xxh3_64_hexdigest(content[each.offset : each.offset + each.num_bytes])
        == each.checksum
        for _, each in index.entries()
    )
