"""Options of `launch` and `keep`: from the command line, or from variables of torchrun or SLURM.

One frozen object has all of them. It is handed on as it is, to the processes that are forked too.
"""

import hmac
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from moe_ft.cluster.link import wants_repair
from moe_ft.cluster.target import (
    BEFORE_BRIDGE,
    BRIDGE,
    OF_BRIDGE,
    PRELOADED,
    Target,
    check_bridge,
)
from moe_ft.command_lines import flag_value
from moe_ft.errors import ConfigError
from moe_ft.spelling import hint

USAGE = "[OPTIONS] [--] SCRIPT ARGS... | [OPTIONS] [--] -m MODULE ARGS..."
# By name: what stands for the value, and the meaning.
HELP: Mapping[str, tuple[str, str]] = {
    "ranks-per-node": (
        "K",
        "ranks of each node (default 1; of launch: the GPUs of the node, else 1)",
    ),
    "nodes": (
        "N|MIN:N",
        "number of nodes that train, MIN:N if some may be missing (--moe-ft-elastic); default: those of "
        "torchrun, else 1",
    ),
    "meet": (
        "HOST:PORT",
        "of the node that keeps the job's store, where the nodes meet; default: torchrun's; of launch: also "
        "MASTER_ADDR:MASTER_PORT",
    ),
    "number": (
        "I",
        "number of this node, from 0, spares last; default: that of torchrun, else SLURM_PROCID",
    ),
    "store": (
        "I",
        "number of the node that keeps the job's store: 0, or one that runs no ranks (default 0)",
    ),
    "kernel-silence": (
        "SECONDS",
        "silence of a node's kernel after which it is lost, if two others notice (default 1; 2 where links "
        "flap; 0: only --lost-after counts)",
    ),
    "lost-after": (
        "SECONDS",
        "silence of a node's agent after which the node is lost, whatever its kernel does (default 10)",
    ),
    "grace": ("SECONDS", "from SIGTERM to SIGKILL of what has started this process (default 30)"),
    "max-restarts": (
        "N",
        "restarts of all ranks in a row without a finished iteration, where repairs are not possible; "
        "default: those that torchrun has left, else 0 (of launch: 3)",
    ),
    "status": ("FILE", "file that gets the exit code of the job, and the names of the nodes"),
    "preload": ("MODULE", "module to import before ranks are forked; may be given several times"),
}
TOKEN = "MOE_FT_KEEP_TOKEN"
GRACE_S = 30  # of SLURM's KillWait, and of Kubernetes, by default
LEAVING_S = 30.0  # of it, for ranks to leave breakpoints and end
_LEAST_GRACE_S = 10  # a spare takes over, or ranks get SIGTERM, in the first 5 s
_FEWEST_BYTES = 16
_TOKEN_BYTES = 32
_ONE_NODE = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepOptions:
    """Options of one node's agent.

    Attributes:
        fewest: nodes with which an elastic job trains; 0 if none may be missing.
        number: of this node among those that were started, from 0.
        store: number of the node that keeps the job's store.
        is_alone: whether the job has this node and no other, also no spare.
        meet: host and port of the job's store; port 0 is one that is free.
        kernel_silence_s: after which two nodes may say that another one is lost; 0 if none may.
        max_restarts: of all ranks, in a row without a finished iteration.
        name: of this node.
        run, restart: name of the launcher's run, and how often it has started the agents before.
        token: secret of the start.
    """

    target: Target
    ranks_per_node: int = 1
    num_nodes: int = 1
    fewest: int = 0
    number: int = 0
    store: int = 0
    is_alone: bool = True
    meet: tuple[str, int] = (_ONE_NODE, 0)
    lost_after_s: float = 10.0
    kernel_silence_s: float = 1.0
    grace_s: float = GRACE_S
    max_restarts: int = 0
    status: str = ""
    name: str = ""
    run: str = "none"
    restart: int = 0
    token: str = ""

    @property
    def keeps_store(self) -> bool:
        """True if this node keeps the job's store."""
        return self.number == self.store

    @property
    def has_ranks(self) -> bool:
        """True if this node trains or is a spare."""
        return not self.keeps_store or self.number == 0

    @property
    def words(self) -> tuple[str, ...]:
        """Command line of the ranks."""
        return self.target.words

    @property
    def repairs(self) -> bool:
        """True if dead ranks are replaced in place."""
        return wants_repair(self.words)

    def flag(self, name: str) -> str:
        """Return the value of a flag of the ranks; empty if it is not given."""
        return flag_value(self.words, name)


def read_options(words: Sequence[str], environment: Mapping[str, str]) -> KeepOptions:
    """Read the command line after `keep`.

    Raises:
        ConfigError: if it cannot be meant.
        SystemExit: with code 2 on all but one process of a node on which torchrun has started several.
    """
    given, preload, rest = split_options(words)
    is_torchruns = is_of_torchrun(environment)
    if is_torchruns and (local := environment.get("LOCAL_WORLD_SIZE", "1")) != "1":
        _refuse_ranks_of_torchrun(local, rest, is_first=environment.get("LOCAL_RANK") == "0")
    target = _checked_target(rest, preload)
    by_torchrun = environment if is_torchruns else {}
    nodes = given.get("nodes", by_torchrun.get("GROUP_WORLD_SIZE", "1"))
    least, is_range, most = nodes.rpartition(":")
    num_nodes = _number("nodes", most, 1)
    fewest = _number("nodes", least, 1) if is_range else 0
    if fewest > num_nodes:
        raise ConfigError(f"--nodes {nodes} must be MIN:N with MIN at most N. Correct it")
    if fewest and "--moe-ft-elastic" not in rest:
        raise ConfigError(
            f"--nodes {nodes} needs ranks with --moe-ft-elastic: others have a fixed number of ranks. Add "
            "the flag, or give the number of nodes that train; spares need no range"
        )
    is_alone = num_nodes == 1 and "meet" not in given
    meet = (_ONE_NODE, 0) if is_alone else _meet(given, nodes, by_torchrun)
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    restart = _digits(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    left = _digits(by_torchrun.get("TORCHELASTIC_MAX_RESTARTS", "0")) - restart
    names = (environment.get(name) for name in ("MOE_FT_NODE_ID", "SLURMD_NODENAME"))
    return KeepOptions(
        target=target,
        ranks_per_node=_number("ranks-per-node", given.get("ranks-per-node", "1"), 1),
        num_nodes=num_nodes,
        fewest=fewest,
        number=_own_number(given, environment, by_torchrun, is_alone=is_alone),
        store=_store(given, nodes, num_nodes),
        is_alone=is_alone,
        meet=meet,
        lost_after_s=float(_number("lost-after", given.get("lost-after", "10"), 3)),
        kernel_silence_s=float(_number("kernel-silence", given.get("kernel-silence", "1"), 0)),
        grace_s=float(_number("grace", given.get("grace", str(GRACE_S)), _LEAST_GRACE_S)),
        max_restarts=_number("max-restarts", given.get("max-restarts", str(max(0, left))), 0),
        status=given.get("status", ""),
        name=next(filter(None, names), socket.gethostname()),
        run=run,
        restart=max(0, restart),
        token=secrets.token_hex(_TOKEN_BYTES // 2)
        if is_alone
        else _token(environment, meet, f"{run} {restart}"),
    )


def is_of_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in environment and "GROUP_RANK" in environment


def split_options(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the options by name, the modules to import beforehand, and the command line of the ranks."""
    rest, preload, given = list(words), list[str](), dict[str, str]()
    while len(rest) > 1 and rest[0].startswith("--"):
        name, is_joined, value = rest[0].removeprefix("--").partition("=")
        if name not in HELP:
            break
        del rest[0]
        if not is_joined:
            value = rest.pop(0)
        if name == "preload":
            preload.append(value)
        else:
            given[name] = value
    if rest[:1] == ["--"]:
        del rest[:1]
    return given, preload, rest


def check_target(rest: Sequence[str]) -> None:
    """Raise ConfigError if the words after the options name neither a file nor a module."""
    if not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        given = f"{rest[0]} is no option and no script" if rest else "there is no script"
        meant = hint(rest[0], [f"--{name}" for name in HELP]) if rest else ""
        raise ConfigError(f"{given}.{meant} Write {USAGE}; --help lists the options")
    if rest[0] != "-m" and not Path(rest[0]).is_file():
        raise ConfigError(f"{rest[0]} is no file. Give the path of the pretraining script: {USAGE}")


def _checked_target(rest: Sequence[str], preload: Sequence[str]) -> Target:
    check_target(rest)
    target = Target(words=tuple(rest), preload=(*PRELOADED, *preload))
    for name in preload:
        if not target.finds(name):
            raise ConfigError(
                f"--preload={name} must name a module that Python finds from "
                f"{target.first_path_of_imports} or PYTHONPATH. Correct the name, or leave the flag out: "
                "ranks import what they need themselves"
            )
    if target.is_of_bridge:
        check_bridge(target.arguments_of_script, is_there=target.finds(BRIDGE))
        # Those of the user come first: they may be what Bridge needs to be imported.
        target = replace(target, preload=(*PRELOADED, BEFORE_BRIDGE, *preload, *OF_BRIDGE))
    return target


def _refuse_ranks_of_torchrun(local: str, rest: Sequence[str], *, is_first: bool) -> NoReturn:
    """Refuse to be one of several processes of a node, which is said once."""
    if not is_first:
        raise SystemExit(2)
    raise ConfigError(
        f"torchrun has started {local} processes on this node (--nproc-per-node), and one forks all ranks of "
        "its node. Write: torchrun --nproc-per-node 1 ... -m moe_ft launch --ranks-per-node "
        f"{local} {' '.join(rest[:2])} ..."
    )


def _meet(given: Mapping[str, str], nodes: str, by_torchrun: Mapping[str, str]) -> tuple[str, int]:
    """Return where the job's store is."""
    meet = given.get("meet")
    if meet is None:
        if by_torchrun and by_torchrun.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return by_torchrun["MASTER_ADDR"], int(by_torchrun["MASTER_PORT"])
        remedy = "Give HOST:PORT of node 0, with a port that is free there"
        if by_torchrun:
            remedy = (
                "torchrun keeps the port that it gives to the ranks: set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before it starts"
            )
        raise ConfigError(f"--meet is missing, and --nodes {nodes} are to meet. {remedy}")
    host, colon, port = meet.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not host or not colon or not 0 < _digits(port) < 1 << 16:
        raise ConfigError(
            f"--meet {meet[:80]} must be HOST:PORT of the node that keeps the job's store, node 0 unless "
            "--store says otherwise, such as node1:29500, with a port up to 65535"
        )
    return host, int(port)


def _own_number(
    given: Mapping[str, str],
    environment: Mapping[str, str],
    by_torchrun: Mapping[str, str],
    *,
    is_alone: bool,
) -> int:
    number = given.get("number") or by_torchrun.get("GROUP_RANK")
    number = number or environment.get("SLURM_PROCID", "0" if is_alone else "")
    if not number:
        raise ConfigError(
            "--number is missing, and SLURM_PROCID not set: number the nodes from 0; spares come last"
        )
    if is_alone and number != "0":
        raise ConfigError(
            f"--number {number} needs --nodes and --meet: this is not the only node. Give both on all nodes, "
            "or start one process"
        )
    return _number("number", number, 0)


def _store(given: Mapping[str, str], nodes: str, num_nodes: int) -> int:
    store = _number("store", given.get("store", "0"), 0)
    if 0 < store < num_nodes:
        raise ConfigError(
            f"--store {store} is the number of a node that trains, of which --nodes {nodes} has 0 to "
            f"{num_nodes - 1}: if it is lost, its ranks cannot be replaced. Give a number from {num_nodes} "
            "on, of a machine that runs nothing else of the job, or leave the option out: node 0 keeps the "
            "store then"
        )
    return store


def _token(environment: Mapping[str, str], meet: tuple[str, int], start: str) -> str:
    """Return the token of a start of agents, which all nodes make of the job's secret."""
    secret = environment.get(TOKEN, "")
    if len(secret) < _FEWEST_BYTES:
        raise ConfigError(
            f"the environment variable {TOKEN} must be the same on all nodes, secret, and have at least "
            f"{_FEWEST_BYTES} characters: others who reach {meet[0]}:{meet[1]} do not know it. Set it to the "
            "output of `openssl rand -hex 16`"
        )
    return hmac.digest(secret.encode(), start.encode(), "sha256").hex()[:_TOKEN_BYTES]


def _number(name: str, value: str, least: int) -> int:
    if _digits(value) < least:
        raise ConfigError(
            f"--{name} {value[:20]} must be a whole number, at least {least} and below 10^9. Correct it"
        )
    return int(value)


def _digits(text: str) -> int:
    """Return a number that a text is in at most nine digits, -1 if it is none."""
    return int(text) if text.isdecimal() and len(text) < 10 else -1
