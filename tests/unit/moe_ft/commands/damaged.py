"""Checkpoints with one damage each, for tests of commands."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_ft.engine.memory.regions import UnitPool
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum
from tests.unit.moe_ft.builders import (
    add_units,
    fill_region,
    make_identity,
    persist_checkpoint,
    put_in_slot,
)

Act = Callable[[Path], object]


def change(path: Path, update: Callable[[Any], object]) -> None:
    """Change the body of an index or manifest, and make its checksum right."""
    body = json.loads(path.read_bytes())["body"]
    update(body)
    seal(path, json.dumps(body).encode())


def seal(path: Path, body: bytes) -> None:
    """Write a body with its checksum."""
    path.write_bytes(b'{"xxh3_64":"%s","body":%s}\n' % (checksum(body).encode(), body))


def flip(path: Path, position: int) -> None:
    """Flip a bit of a byte."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def persisted(damage: Act = lambda iteration: None) -> Act:
    """Return what makes a checkpoint of two ranks and damages its directory."""

    def prepare(directory: Path) -> None:
        persist_checkpoint(Storage(str(directory)), 10, make_identity(world_size=2))
        damage(directory / "iter_0000010")

    return prepare


def manifest_of(iteration: Path) -> Path:
    """Return the path of a checkpoint's only manifest."""
    (path,) = iteration.glob("manifest*.json")
    return path


def manifest(update: Callable[[Any], object]) -> Act:
    """Return what makes a checkpoint whose manifest has been changed."""
    return persisted(lambda iteration: change(manifest_of(iteration), update))


def file_of(iteration: Path, rank: int, suffix: str = "safetensors") -> Path:
    """Return the path of a rank's file."""
    (path,) = iteration.glob(f"rank_{rank:05d}_*.{suffix}")
    return path


def nest(iteration: Path) -> None:
    """Put brackets in brackets in brackets into a value that may have any type."""
    body = json.loads(manifest_of(iteration).read_bytes())["body"]
    body["identity"]["fingerprint"]["--seed"] = "HERE"
    text = json.dumps(body).replace('"HERE"', "[" * 100_000 + "]" * 100_000)
    seal(manifest_of(iteration), text.encode())


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def in_memory(damage: Act = lambda rank: None) -> Act:
    """Return what makes a region with a pool and damages its directory."""

    def prepare(directory: Path) -> None:
        rank = directory / "job/node-a/rank_00000"
        region, index = fill_region(rank)
        pool = UnitPool(rank, 256, 4)
        pool.open()
        add_units(region, index, dict([put_in_slot(pool, 1, 0)]))
        damage(rank)

    return prepare


def pool_of(rank: Path) -> Path:
    """Return the path of the pool."""
    (path,) = rank.glob("pool_*.safetensors")
    return path


def touch_gap(rank: Path) -> None:
    """Change a byte that lies between units."""
    body = json.loads((rank / "region_0.json").read_bytes())["body"]
    used = {
        byte
        for unit in body["units"].values()
        if not unit.get("file")
        for byte in range(unit["offset"], unit["offset"] + unit["num_bytes"])
    }
    gaps = set(range(body["header_bytes"], body["file_bytes"])) - used
    flip(rank / body["file"], min(gaps))


def empty_region(rank: Path) -> None:
    change(rank / "region_0.json", lambda body: body.update(file_bytes=0, header_bytes=0, units={}))
    os.truncate(rank / "region_0.safetensors", 0)
