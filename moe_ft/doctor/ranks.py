"""Facts that every process of a doctor tells the others, and the rows that follow from them."""

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import moe_ft
from moe_ft.config.config import MemoryConfig
from moe_ft.doctor.meeting import MeetingPlace
from moe_ft.doctor.rows import CheckRow, Result, failed, join_nodes, passed, refused, warned
from moe_ft.errors import ConfigError
from moe_ft.installation import versions
from moe_ft.launches import shares_store
from moe_ft.processes import boot_id

_VERSIONS, _GPUS, _NODES, _RANKS, _JOB = "versions", "gpus", "node names", "ranks", "job name"
_STORE, _VARIABLES, _HANGS = "shared store", "variables", "hangs"
# Copies of what constraints.txt pins; a unit test compares them with it.
TESTED = {"torch": "2.13.0", "megatron-core": "0.19.2"}
TESTED_PYTHON = ("3.12",)
_CONTAINER = re.compile(r"[0-9a-f]{12}")  # a name that docker draws
_GIVE_NAMES = "Set MOE_FT_NODE_ID on each node to a name that it keeps."
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "fsspec")
# Variables that change results or recoveries, and must be the same everywhere.
_SHARED = re.compile(
    r"(NCCL|TORCH_NCCL|TORCH_DISABLE|GLOO|CUBLAS|NVTE)_\w+|CUDA_DEVICE_MAX_CONNECTIONS"
)
_OF_A_NODE = re.compile(r"\w*_(IFNAME|HCA|TOPO_FILE|HOSTID)")


class ProcessFacts(msgspec.Struct, frozen=True):
    """Facts of one process.

    Attributes:
        node: empty if the name cannot be one, for the reason in `node_problem`.
        node_source: what gave the name.
        boot: see `boot_id`.
        versions: of packages; those that are missing are left out.
        variables: those that must be the same everywhere.
        address: host and port at which it listens; None if that has failed.
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


def find_facts(
    place: MeetingPlace, memory: MemoryConfig, environment: Mapping[str, str]
) -> ProcessFacts:
    """Return the facts of this process, without an address."""
    host = socket.gethostname()
    try:
        node, problem = memory.resolve_node_id(environment, host), ""
    except ConfigError as error:
        node, problem = "", str(error)
    given = ("MOE_FT_NODE_ID", "SLURMD_NODENAME")
    source = next((name for name in given if environment.get(name)), "the host name")
    return ProcessFacts(
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
    """Return versions of what training needs; no code of theirs is imported for it."""
    found = {package: version for package, (version, _) in versions(_PACKAGES).items()}
    return {"moe_ft": moe_ft.__version__, "python": platform.python_version(), **found}


def count_gpus(environment: Mapping[str, str], devices: Path) -> int:
    """Return the GPUs whose devices this process may use: those of the driver, or fewer if it is told so."""
    num_gpus = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(devices))
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return num_gpus
    return min(
        num_gpus, len([each for each in chosen.split(",") if each.strip() not in ("", "-1")])
    )


def check_names(everyone: Sequence[ProcessFacts], environment: Mapping[str, str]) -> list[CheckRow]:
    """Return rows on the names of nodes; all are taken to be in containers if this process is."""
    rows = [
        failed(_NODES, f"rank {facts.rank}", facts.node_problem, _GIVE_NAMES)
        for facts in everyone
        if facts.node_problem
    ]
    machines: dict[str, set[str]] = {}
    nodes: dict[str, list[str]] = {}
    for facts in everyone:
        machines.setdefault(facts.node, set()).add(facts.boot or facts.host)
        nodes.setdefault(facts.boot or facts.host, []).append(facts.node)
    for node, boots in machines.items():
        if len(boots) > 1:
            found = f"{len(boots)} machines have this name: their memory would count as one"
            rows.append(failed(_NODES, node, found, _GIVE_NAMES))
    for names in nodes.values():
        distinct = list(dict.fromkeys(names))
        if len(distinct) > 1:
            found = "are one machine: a failure takes all of them, replicas included"
            remedy = "Nothing for a test. Else give the ranks of a machine one name."
            rows.append(warned(_NODES, join_nodes(distinct), found, remedy))
    unstable = [facts for facts in everyone if _may_change(facts, environment)]
    if unstable:
        found = (
            "the host name of a container, which a restart may change: memory would not be found"
        )
        rows.append(warned(_NODES, unstable[0].node, found, _GIVE_NAMES))
    if rows:
        return rows
    names = list(machines)
    return [passed(_NODES, join_nodes(names), f"{len(names)}, from {everyone[0].node_source}")]


def _may_change(facts: ProcessFacts, environment: Mapping[str, str]) -> bool:
    is_drawn = _CONTAINER.fullmatch(facts.host) or "KUBERNETES_SERVICE_HOST" in environment
    return facts.node_source == "the host name" and bool(is_drawn)


def check_ranks(
    everyone: Sequence[ProcessFacts], planned: tuple[int, int] | None
) -> list[CheckRow]:
    """Return a row on the ranks of each node, and the nodes that training needs.

    Args:
        planned: ranks of the job and of a node, None if they are not known.
    """
    counts: dict[str, int] = {}
    for facts in everyone:
        counts[facts.node] = counts.get(facts.node, 0) + 1
    found = f"{len(everyone)} processes of doctor on {len(counts)} nodes"
    most = max(counts.values())
    fewer = [node for node, count in counts.items() if count < most]
    if fewer:
        found = f"{counts[fewer[0]]} processes; other nodes have {most}"
        return [warned(_RANKS, join_nodes(fewer), found, "Start as many processes on every node.")]
    if planned is not None and len(everyone) > 1:
        world_size, per_node = planned
        needed = -(-world_size // per_node)
        text = f"training starts {world_size} ranks, {per_node} on a node: {needed} nodes"
        if needed != len(counts):
            remedy = "Start doctor on the nodes of training, or correct the launcher's numbers."
            return [failed(_RANKS, "all nodes", f"{len(counts)} nodes; {text}", remedy)]
        found = f"{found}; {text}"
    return [passed(_RANKS, "all nodes", found)]


def check_job(
    memory: MemoryConfig, environment: Mapping[str, str], *, is_planned: bool
) -> CheckRow:
    """Return a row on the name by which a restart finds its memory; planned if training's flags are known."""
    try:
        return passed(_JOB, "this job", memory.resolve_job_id(environment))
    except ConfigError as error:
        return refused(_JOB, "this job", error, Result.FAIL if is_planned else Result.WARN)


def check_versions(everyone: Sequence[ProcessFacts]) -> list[CheckRow]:
    """Return rows on the versions of all ranks that have answered."""
    names = sorted({name for facts in everyone for name in facts.versions})
    rows = [row for name in names for row in _compare(name, everyone)]
    own = everyone[0].versions
    for name, tested in TESTED.items():
        if name not in own:
            rows.append(
                failed(_VERSIONS, "all ranks", f"no {name}", f"pip install {name}=={tested}")
            )
        elif own[name].partition("+")[0] != tested:
            found = f"{name} {own[name]}; tested with {tested}"
            rows.append(
                warned(_VERSIONS, "all ranks", found, f"Install {tested}, or try a short run.")
            )
    if own["python"].rpartition(".")[0] not in TESTED_PYTHON:
        found = f"python {own['python']}; tested with {' and '.join(TESTED_PYTHON)}"
        rows.append(warned(_VERSIONS, "all ranks", found, f"Use Python {TESTED_PYTHON[0]}."))
    if rows:
        return rows
    found = ", ".join(f"{name} {version}" for name, version in own.items())
    return [passed(_VERSIONS, "all ranks", found)]


def _compare(name: str, everyone: Sequence[ProcessFacts]) -> list[CheckRow]:
    holders: dict[str, list[ProcessFacts]] = {}
    for facts in everyone:
        holders.setdefault(facts.versions.get(name, "missing"), []).append(facts)
    if len(holders) == 1:
        return []
    parts = [
        f"{version} on {join_nodes(list(dict.fromkeys(facts.node for facts in group)))} "
        f"(rank {group[0].rank}{', ...' if len(group) > 1 else ''})"
        for version, group in holders.items()
    ]
    remedy = "Start the same environment on all nodes."
    return [failed(_VERSIONS, "all ranks", f"{name}: {'; '.join(parts)}", remedy)]


def check_gpus(everyone: Sequence[ProcessFacts], ranks_per_node: int | None) -> list[CheckRow]:
    """Return a row on the GPUs of each node; `ranks_per_node` is None if it is not known."""
    rows = []
    most = max(facts.num_gpus for facts in everyone)
    for facts in {each.node: each for each in reversed(everyone)}.values():
        found = f"{facts.num_gpus} GPUs" if facts.num_gpus else "no GPU: training runs on the CPU"
        if facts.num_gpus < most:
            remedy = "Look at nvidia-smi there, or leave the node out."
            row = failed(_GPUS, facts.node, f"{found}; other nodes have {most}", remedy)
        elif not facts.num_gpus:
            row = warned(
                _GPUS, facts.node, found, "Look for GPUs with nvidia-smi, unless you mean it."
            )
        elif "+cpu" in facts.versions.get("torch", ""):
            found = f"{found}, and torch {facts.versions['torch']}, which uses none"
            row = failed(_GPUS, facts.node, found, "Install a build of torch for CUDA.")
        elif ranks_per_node is not None and facts.num_gpus < ranks_per_node:
            found = f"{found} for {ranks_per_node} ranks of a node"
            row = failed(_GPUS, facts.node, found, "Start as many ranks as there are GPUs.")
        else:
            row = passed(_GPUS, facts.node, found)
        rows.append(row)
    return rows[::-1]


_REMEDY = f"export {VARIABLE}=1 before torchrun starts, with --rdzv-backend c10d."


def check_store(
    environment: Mapping[str, str],
    *,
    restarts: bool = False,
    backend: str | None = None,
    is_alone: bool = False,
) -> CheckRow:
    """Return a row on torchrun's store: shared with ranks, it gives restarted ranks addresses of dead ones.

    Args:
        restarts: whether the command of training has --max-restarts.
        backend: its --rdzv-backend; None if it has no torchrun.
        is_alone: whether the job has one node, whose ranks meet at a store of their own.
    """
    is_disabled = environment.get(VARIABLE) == "1"
    if backend is None:  # the launcher of doctor may also be that of training
        restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        is_shared = shares_store(environment)
        found = "shared"
    else:
        is_shared = not (is_disabled and backend == "c10d")
        found = f"{VARIABLE}={environment.get(VARIABLE, '')}, --rdzv-backend={backend or 'static'}"
    if is_alone:
        return passed(_STORE, "torchrun", "one node: its ranks meet at a store of their own")
    if restarts and is_shared:
        return failed(_STORE, "torchrun", f"{found}, and --max-restarts is given", _REMEDY)
    if restarts or is_disabled:
        return passed(_STORE, "torchrun", "not shared: ranks can restart")
    return passed(_STORE, "torchrun", f"no --max-restarts, which would need {VARIABLE}=1")


def check_variables(everyone: Sequence[ProcessFacts]) -> list[CheckRow]:
    """Return rows on variables that differ between ranks, or keep hangs from ending."""
    rows = []
    first = everyone[0]
    for name in sorted({name for facts in everyone for name in facts.variables}):
        others = [
            facts for facts in everyone if facts.variables.get(name) != first.variables.get(name)
        ]
        if others:
            values = [facts.variables.get(name, "not set") for facts in (first, others[0])]
            found = f"{name} is {values[0]} on {first.node} and {values[1]} here"
            nodes = join_nodes(list(dict.fromkeys(facts.node for facts in others)))
            rows.append(warned(_VARIABLES, nodes, found, "Set it the same on all nodes."))
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if first.variables.get(name) == "0":
            found = f"{name}=0: ranks that wait for a lost one never end"
            rows.append(warned(_HANGS, "all nodes", found, f"unset {name}"))
    names = sorted(first.variables)
    return rows or [
        passed(_VARIABLES, "all nodes", f"the same: {', '.join(names) or 'none is set'}")
    ]
