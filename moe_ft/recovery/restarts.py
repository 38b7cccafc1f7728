"""Restarts of a job by its launcher, as opposed to starts by a person or a scheduler.

Flags that say where to begin hold for the first start of a launcher only. torchrun counts its restarts after
failures, but not those after nodes have come or gone; so each node remembers which launcher started it last,
which starts there were before that, and which start was the last. If that was the one before, the memory of
the nodes is the newest state of the run, also while storage cannot be read.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from moe_ft.engine.persist.origin import agent_name
from moe_ft.files.private_files import read_private, write_atomically

_NAME = "launcher"


class Launcher(msgspec.Struct, frozen=True):
    """Note of a node on what started its ranks.

    Attributes:
        process: name of torchrun's agent; empty for anything else.
        known: names of the starts that had left something when it first started the job.
        number: of the last start on the node: SLURM's job, its requeues, and restarts by the launcher.
        has_begun: whether that start, or one before it in the same chain, has got as far as training.
    """

    process: str
    known: tuple[str, ...]
    number: tuple[str, int, int] = ("", 0, 0)
    has_begun: bool = False


_LAUNCHER = msgspec.json.Decoder(Launcher)


def is_counted_restart(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or SLURM says that it has started this job before."""
    _, *counts = _number(environment)
    return any(counts)


def _number(environment: Mapping[str, str]) -> tuple[str, int, int]:
    requeues, restarts = (
        int(count) if (count := environment.get(f"{name}_RESTART_COUNT", "")).isdecimal() else 0
        for name in ("SLURM", "TORCHELASTIC")
    )
    return environment.get("SLURM_JOB_ID", ""), requeues, restarts


def recall_launcher(node_dir: Path, environment: Mapping[str, str]) -> Launcher | None:
    """Return a node's note of its launcher; None if that has not started its ranks before.

    Args:
        node_dir: the memory directory of the job on this node.
    """
    known = _read(node_dir)
    if known is None:
        return None
    process = agent_name(environment)
    is_requeued = environment.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    is_same = known.process == process if process else is_counted_restart(environment)
    return known if is_same or is_requeued else None


def has_last_start(node_dir: Path, environment: Mapping[str, str]) -> bool:
    """Return whether the start before this one was on this node too, and had begun to train.

    Then the memory of the nodes is what the run has left last. A node that was away in between, or that some
    other launcher has used, may have an older state of the run.
    """
    known = _read(node_dir)
    if known is None or not known.has_begun:
        return False
    (job, *before), (own_job, *now) = known.number, _number(environment)
    requeues, restarts = (new - old for new, old in zip(now, before, strict=True))
    if job != own_job or requeues:
        return job == own_job and requeues == 1
    process = agent_name(environment)
    # torchrun does not count every restart; of other launchers nobody knows whether it is still the same.
    return known.process == process and (restarts == 1 or (restarts == 0 and bool(process)))


def _read(node_dir: Path) -> Launcher | None:
    with suppress(OSError, ValueError):
        return _LAUNCHER.decode(read_private(node_dir / _NAME))
    return None


def note_launcher(
    node_dir: Path,
    environment: Mapping[str, str],
    known: Iterable[str],
    *,
    has_begun: bool = False,
) -> None:
    """Note the launcher that starts a node's ranks. Called by one rank of a node, in each start.

    Args:
        node_dir: the memory directory of the job on this node.
        known: names of the starts that had left something when it first did so.
        has_begun: see `Launcher`.
    """
    launcher = Launcher(
        process=agent_name(environment),
        known=tuple(sorted(known)),
        number=_number(environment),
        has_begun=has_begun,
    )
    with suppress(OSError):  # at worst a flag that names where to begin holds for one more start
        write_atomically(node_dir / _NAME, msgspec.json.encode(launcher))
