"""Facts that every process of a doctor tells the others: versions, names, environment, GPUs."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

import moe_ft
from moe_ft.config.config import MemoryConfig
from moe_ft.doctor.place import Place
from moe_ft.errors import ConfigError
from moe_ft.processes import boot_id

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "fsspec")
# Variables that change results or recoveries, and must be the same everywhere.
_SHARED = re.compile(
    r"(NCCL|TORCH_NCCL|TORCH_DISABLE|GLOO|CUBLAS|NVTE)_\w+|CUDA_DEVICE_MAX_CONNECTIONS"
)
_OF_A_NODE = re.compile(r"\w*_(IFNAME|HCA|TOPO_FILE|HOSTID)")


class RankFacts(msgspec.Struct, frozen=True):
    """Facts of one process.

    Attributes:
        node: name of the node, empty if it cannot be one.
        node_problem: why it cannot be one.
        node_source: what gave the name.
        host: its host name.
        boot: id that the kernel draws when a machine starts; empty if unknown.
        versions: of packages; those that are missing are left out.
        variables: of the environment that must be the same everywhere.
        num_gpus: that this process can see.
        address: host and port at which the node's lowest rank listens; None if listening has failed.
    """

    rank: int
    node: str
    node_problem: str
    node_source: str
    host: str
    boot: str
    local_world_size: int
    versions: dict[str, str]
    variables: dict[str, str]
    num_gpus: int
    address: tuple[str, int] | None = None
    address_problem: str = ""


def find_facts(place: Place, memory: MemoryConfig, environment: Mapping[str, str]) -> RankFacts:
    """Return the facts of this process, without an address."""
    host = socket.gethostname()
    try:
        node, problem = memory.resolve_node_id(environment, host), ""
    except ConfigError as error:
        node, problem = "", str(error)
    given = ("MOE_FT_NODE_ID", "SLURMD_NODENAME")
    source = next((name for name in given if environment.get(name)), "the host name")
    return RankFacts(
        rank=place.rank,
        node=node,
        node_problem=problem,
        node_source="--moe-ft-node-id" if memory.node_id else source,
        host=host,
        boot=boot_id(),
        local_world_size=place.local_world_size,
        versions=find_versions(),
        variables={
            name: value
            for name, value in sorted(environment.items())
            if _SHARED.fullmatch(name) and not _OF_A_NODE.fullmatch(name)
        },
        num_gpus=count_gpus(environment, Path("/dev")),
    )


def find_versions() -> dict[str, str]:
    """Return versions of what training needs; nothing is imported for it."""
    versions = {"moe_ft": moe_ft.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def count_gpus(environment: Mapping[str, str], devices: Path) -> int:
    """Return the GPUs whose devices this process may use: those of the driver, or fewer if it is told so."""
    num_gpus = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(devices))
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return num_gpus
    return min(
        num_gpus, len([each for each in chosen.split(",") if each.strip() not in ("", "-1")])
    )
