"""Restarts of a job by its launcher, as opposed to starts by a person or a scheduler.

Flags that say where to begin hold for the first start of a launcher only. torchrun counts its restarts after
failures, but not those after nodes have come or gone; so each node remembers which launcher started it last,
and which starts there were before that.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from moe_ft.engine.memory.private_files import read_private, write_atomically
from moe_ft.engine.persist.origin import agent_name

_NAME = "launcher"


class Launcher(msgspec.Struct, frozen=True):
    """Note of a node on what started its ranks.

    Attributes:
        process: name of torchrun's agent; empty for anything else.
        known: names of the starts that had left something when it first started the job.
    """

    process: str
    known: tuple[str, ...]


_LAUNCHER = msgspec.json.Decoder(Launcher)


def is_counted_restart(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or SLURM says that it has started this job before."""
    counts = (environment.get(f"{name}_RESTART_COUNT", "0") for name in ("TORCHELASTIC", "SLURM"))
    return any(count.isdecimal() and int(count) > 0 for count in counts)


def recall_launcher(node_dir: Path, environment: Mapping[str, str]) -> Launcher | None:
    """Return a node's note of its launcher; None if that has not started its ranks before.

    Args:
        node_dir: the memory directory of the job on this node.
    """
    with suppress(OSError, ValueError):
        known = _LAUNCHER.decode(read_private(node_dir / _NAME))
        process = agent_name(environment)
        is_requeued = environment.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        is_same = known.process == process if process else is_counted_restart(environment)
        return known if is_same or is_requeued else None
    return None


def note_launcher(node_dir: Path, environment: Mapping[str, str], known: Iterable[str]) -> None:
    """Note the launcher that starts a node's ranks for the first time. Called by one rank of a node.

    Args:
        node_dir: the memory directory of the job on this node.
        known: names of all starts that have left something.
    """
    launcher = Launcher(process=agent_name(environment), known=tuple(known))
    with suppress(OSError):  # at worst a flag that names where to begin holds for one more start
        write_atomically(node_dir / _NAME, msgspec.json.encode(launcher))
