"""Scripts and modules that ranks run, with their arguments, as Python's own command line has them."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from moe_ft.cluster.link import wants_repair

USAGE = (
    "moe_ft keep [--preload MODULE]... [NODES] [--] SCRIPT ARGS... | -m MODULE ARGS..., where NODES is "
    "--nodes N|MIN:N --ranks-per-node K --meet HOST:PORT [--number I] [--store I] [--lost-after SECONDS] "
    "[--grace SECONDS] [--status FILE]"
)
OF_NODES: Mapping[str, str] = {
    "nodes": "number of nodes that train, MIN:N if some may be missing (--moe-ft-elastic); with it, `keep` "
    "starts the ranks of this node, without torchrun",
    "ranks-per-node": "ranks of each node",
    "meet": "HOST:PORT of the node that keeps the job's store",
    "number": "of this node, from 0, spares last; default: SLURM_PROCID",
    "store": "number of the node that keeps the job's store: 0, or one that runs no ranks (default 0)",
    "lost-after": "seconds of silence after which a node is lost (default 10)",
    "grace": "seconds from SIGTERM to SIGKILL of what has started this process (default 30)",
    "status": "file that gets the exit code of the job, and the names of the nodes",
}
_NEEDED = ("nodes", "ranks-per-node", "meet")
GRACE_S = 30  # of SLURM's KillWait, and of Kubernetes, by default
_LEAST_GRACE_S = 10  # a spare takes over, or ranks get SIGTERM, in the first 5 s
LEAVING_S = 30.0  # of it, for ranks to leave breakpoints and end
TOKEN = "MOE_FT_KEEP_TOKEN"
_FEWEST_BYTES = 16
# These take seconds to import. A script's own modules may need Megatron as moe_ft has wrapped it.
PRELOADED = (
    "megatron.fault_tolerance.launch.pretraining",  # with torch, Megatron and moe_ft
    "megatron.core.tokenizers.text.text_tokenizer",
    "transformer_engine.pytorch",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A script or a module to run."""

    words: tuple[str, ...]  # as they follow `python` on a command line
    preload: tuple[str, ...]  # modules to import before ranks are forked
    # Variables of the ranks, if this process stands for a node instead of one of its ranks; else empty.
    of_node: dict[str, str] = field(default_factory=dict)

    @property
    def is_module(self) -> bool:
        """True for `-m MODULE`."""
        return self.words[0] == "-m"

    @property
    def name(self) -> str:
        """The path of the script, or the name of the module."""
        return self.words[self.is_module]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Its arguments."""
        return self.words[1 + self.is_module :]

    @property
    def first_path(self) -> str:
        """The folder that Python puts first on the path of imports."""
        return os.getcwd() if self.is_module else _folder_of(self.name)

    @property
    def first_path_of_imports(self) -> str:
        """The folder in which a Megatron of the user's own may lie: that of the script which trains."""
        is_run = self.is_module and self.name == "moe_ft" and self.arguments[:1] == ("run",)
        script = self.arguments[1] if is_run and len(self.arguments) > 1 else "-"
        return self.first_path if script.startswith("-") else _folder_of(script)


def _folder_of(script: str) -> str:
    return os.path.dirname(os.path.realpath(script))


def read_target(words: Sequence[str]) -> Target:
    """Read the command line after `keep`; end the process with exit code 2 if it names nothing to run."""
    rest, preload, options = list(words), list[str](), dict[str, str]()
    while len(rest) > 1 and rest[0].removeprefix("--") in ("preload", *OF_NODES):
        name, value = rest[0].removeprefix("--"), rest[1]
        if name == "preload":
            preload.append(value)
        else:
            options[name] = value
        del rest[:2]
    if rest[:1] == ["--"]:
        del rest[:1]
    if not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        given = f"{rest[0]} is no script" if rest else "there is no script"
        _refuse(f"{given}. Write {USAGE}")
    if rest[0] != "-m" and not Path(rest[0]).is_file():
        _refuse(f"{rest[0]} is no file. Give the path of the pretraining script: {USAGE}")
    of_node = _of_node(options, os.environ) if options else {}
    if of_node.get("MOE_FT_KEEP_FEWEST") and "--moe-ft-elastic" not in rest:
        _refuse(
            f"--nodes {options['nodes']} needs ranks with --moe-ft-elastic: others have a fixed number of "
            "ranks. Add the flag, or give the number of nodes that train; spares need no range"
        )
    if of_node and not wants_repair(rest):
        _refuse(
            f"--nodes {options['nodes']} needs ranks with --moe-ft-repair auto: without it neither a rank "
            "nor a node that is lost would be replaced. Add the flag, or use torchrun or srun without keep"
        )
    target = Target(words=tuple(rest), preload=(*PRELOADED, *preload), of_node=of_node)
    for name in preload:
        _check_is_there(name, target.first_path_of_imports)
    return target


def _of_node(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that all ranks of a node have, as torchrun would set them, and some of keep's own."""
    for name in _NEEDED:
        if name not in options:
            _refuse(
                f"--{name} is missing: a node needs all of {', '.join(f'--{n}' for n in _NEEDED)}"
            )
    least, is_range, most = options["nodes"].rpartition(":")
    nodes, ranks = (
        _number("nodes", most, 1),
        _number("ranks-per-node", options["ranks-per-node"], 1),
    )
    if is_range and _number("nodes", least, 1) > nodes:
        _refuse(f"--nodes {options['nodes']} must be MIN:N with MIN at most N. Correct it")
    host, colon, port = options["meet"].rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not host or not colon or not 0 < _digits(port) < 1 << 16:
        _refuse(
            f"--meet {options['meet'][:80]} must be HOST:PORT of the node that keeps the job's store, node 0 "
            "unless --store says otherwise, such as node1:29500, with a port up to 65535"
        )
    number = options.get("number", environment.get("SLURM_PROCID", ""))
    if not number:
        _refuse(
            "--number is missing, and SLURM_PROCID not set: number the nodes from 0; spares come last"
        )
    if len(environment.get(TOKEN, "")) < _FEWEST_BYTES:
        _refuse(
            f"the environment variable {TOKEN} must be the same on all nodes, secret, and have at least "
            f"{_FEWEST_BYTES} characters: others who reach {options['meet']} do not know it. Set it to the "
            "output of `openssl rand -hex 16`"
        )
    store = _number("store", options.get("store", "0"), 0)
    if 0 < store < nodes:
        _refuse(
            f"--store {store} is the number of a node that trains, of which --nodes {nodes} has 0 to "
            f"{nodes - 1}: if it is lost, its ranks cannot be replaced. Give a number from {nodes} on, of a "
            "machine that runs nothing else of the job, or leave the option out: node 0 keeps the store then"
        )
    return {
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(_number("number", number, 0)),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": environment.get("TORCHELASTIC_RUN_ID", "none"),
        "TORCHELASTIC_RESTART_COUNT": environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        "MOE_FT_KEEP_STORE_ON": str(store),
        "MOE_FT_KEEP_LOST_AFTER_S": str(_number("lost-after", options.get("lost-after", "10"), 3)),
        "MOE_FT_KEEP_GRACE_S": str(
            _number("grace", options.get("grace", str(GRACE_S)), _LEAST_GRACE_S)
        ),
        "MOE_FT_KEEP_FEWEST": least,
        "MOE_FT_KEEP_STATUS": options.get("status", ""),
    }


def _number(name: str, value: str, least: int) -> int:
    if _digits(value) < least:
        _refuse(
            f"--{name} {value[:20]} must be a whole number, at least {least} and below 10^9. Correct it"
        )
    return int(value)


def _digits(text: str) -> int:
    """Return a number that a text is in at most nine digits, -1 if it is none."""
    return int(text) if text.isdecimal() and len(text) < 10 else -1


def _check_is_there(name: str, folder: str) -> None:
    """Refuse a module that cannot be found; whether it can be imported is seen in the zygote."""
    sys.path.insert(0, folder)
    try:
        is_there = is_found(name)
    finally:
        sys.path.remove(folder)
    if not is_there:
        _refuse(
            f"--preload={name} must name a module that Python finds from {folder} or PYTHONPATH. Correct the "
            "name, or leave the flag out: ranks import what they need themselves"
        )


def is_found(name: str) -> bool:
    """Return whether a module is there, without importing its packages."""
    if not all(map(str.isidentifier, name.split("."))):
        return False
    package, _, rest = name.partition(".")
    spec = importlib.util.find_spec(package)
    while spec is not None and rest:
        part, _, rest = rest.partition(".")
        package, folders = f"{package}.{part}", spec.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(package, folders)
    return spec is not None


def _refuse(problem: str) -> NoReturn:
    print(f"error: moe_ft keep: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)
