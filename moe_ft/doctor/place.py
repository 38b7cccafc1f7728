"""Place of this process among those that were launched together: torchrun's, SLURM's, or alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_ft.errors import ConfigError
from moe_ft.failure_domains import expand
from moe_ft.launches import launch_of, shares_store

TOKEN_NAME = "MOE_FT_DOCTOR_TOKEN"
_LEAST_TOKEN = 16  # characters: the proofs in the store let strangers try tokens at leisure
_LEAST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that Linux gives to outgoing connections


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process and where its launch meets.

    Attributes:
        master: host and port where they meet.
        has_agent_store: whether the launcher listens there already.
        token: secret that all processes were given; empty if there is none.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master: tuple[str, int] = ("127.0.0.1", 0)
    has_agent_store: bool = False
    token: str = field(default="", repr=False)

    @property
    def is_alone(self) -> bool:
        """True if there is nobody to meet."""
        return self.world_size == 1


def find_place(environment: Mapping[str, str]) -> Place:
    """Return the place that the launcher's variables give.

    Raises:
        ConfigError: if they say that there are several processes, and not where they meet; if the token is
            short; if torchrun has started doctor again.
    """
    names = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_world_size": "LOCAL_WORLD_SIZE"}
    if "RANK" not in environment and "SLURM_STEP_ID" in environment:
        names = {"rank": "SLURM_PROCID", "world_size": "SLURM_STEP_NUM_TASKS"}
    numbers = {key: _number(environment, name) for key, name in names.items()}
    world_size = numbers["world_size"]
    if world_size is None or world_size == 1:
        return Place(master=(environment.get("MASTER_ADDR", "127.0.0.1"), 0))
    rank = numbers["rank"]
    if rank is None or not 0 <= rank < world_size:
        raise ConfigError(
            f"{names['rank']}={environment.get(names['rank'], '')} must be a number below "
            f"{names['world_size']}={world_size}. Start doctor with torchrun or srun, which set both."
        )
    _check_is_first_start(environment)
    local = numbers.get("local_world_size") or tasks_on_node(environment)
    return Place(
        rank=rank,
        world_size=world_size,
        local_world_size=local,
        master=_master(environment),
        has_agent_store=shares_store(environment),
        token=_token(environment),
    )


def _check_is_first_start(environment: Mapping[str, str]) -> None:
    """Refuse a restart: torchrun's store still has what the processes before have shown."""
    if count := launch_of(environment).start:
        raise ConfigError(
            f"TORCHELASTIC_RESTART_COUNT={count} must be 0: doctor has already run. Its table is above. "
            "Start it with torchrun --max-restarts 0, then it runs once."
        )


def _token(environment: Mapping[str, str]) -> str:
    token = environment.get(TOKEN_NAME, "")
    if 0 < len(token) < _LEAST_TOKEN:
        raise ConfigError(
            f"{TOKEN_NAME} has {len(token)} characters and must have at least {_LEAST_TOKEN}, or be unset. "
            "Set it to the same random value on all nodes, such as what `openssl rand -hex 16` prints."
        )
    return token


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def tasks_on_node(environment: Mapping[str, str]) -> int:
    """Return SLURM's processes on this node, from a list such as 8(x2),4."""
    counts: list[int] = []
    for text in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environment, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else 1


def _master(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return where the processes meet: MASTER_ADDR and MASTER_PORT, else the first node of the SLURM step."""
    host, port = environment.get("MASTER_ADDR"), _number(environment, "MASTER_PORT")
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if not host and nodes:
        host = _first_node(nodes)
    job = _number(environment, "SLURM_JOB_ID")
    if port is None and job is not None:
        port = _LEAST_PORT + job % _NUM_PORTS
    if not host or port is None:
        raise ConfigError(
            f"MASTER_ADDR={host or ''} and MASTER_PORT={port or ''} must say where the processes of doctor "
            "meet. Set both, or start it with torchrun or srun."
        )
    return host, port


def _first_node(nodes: str) -> str:
    """Return the first of SLURM's list of nodes, such as gpu[003-007,9],login."""
    return next(expand(nodes), nodes)
