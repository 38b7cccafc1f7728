"""Sources of conversions: the state of one iteration, of all ranks, on storage or in memory.

Decides what can be converted and refuses the rest. tensors.py names and reads tensors.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_ft.engine.persist.soundness import check_references, check_region, read_file
from moe_ft.engine.persist.storage_lock import LOCK_RENEWAL_S, StorageLock, find_live, own_origin
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.files.storage import Storage
from moe_ft.format.identity import Identity
from moe_ft.format.index import check_header
from moe_ft.format.manifest import Manifest
from moe_ft.launches import launch_of
from moe_ft.recovery.inspect.holdings import (
    Holding,
    find_holdings,
    newest_holding,
    states_in_memory,
)
from moe_ft.recovery.job_memory import is_alive
from moe_ft.recovery.readers import MemoryReader, StateReader, StorageReader

_WATCH_S = LOCK_RENEWAL_S + 2.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunState:
    """The state of one iteration.

    Attributes:
        place: where it is, for messages.
        ranks: ``[rank]`` state of each rank of the job that wrote it.
    """

    place: str
    iteration: int
    identity: Identity
    ranks: Sequence[StateReader]


def open_source(directory: str, iteration: int | None = None) -> RunState:
    """Return the state of an iteration, or the newest one, checked as far as its indexes go.

    Args:
        directory: a persist directory or fsspec URL, one of its checkpoints, or a memory directory.
    """
    holdings = _sound(directory, find_holdings(directory, with_indexes=False), iteration)
    chosen = newest_holding(holdings)
    if chosen.manifest is not None and chosen.storage is not None:
        check_is_quiet(directory, chosen.storage)
        try:
            source = _stored(chosen.place, chosen.storage, chosen.manifest)
        except (CorruptStateError, FileNotFoundError) as error:
            raise CorruptStateError(
                f"{error}. `verify` says what else is damaged; --iteration names another checkpoint."
            ) from error
    else:
        source = _in_memory(directory, chosen, holdings)
    _check_is_one_state(
        source, max((each.iteration for each in holdings if each.window == 1), default=None)
    )
    return source


def _sound(directory: str, holdings: list[Holding], iteration: int | None) -> list[Holding]:
    """Return the holdings to choose from: complete, and newer than all that is damaged."""
    complete = [each for each in holdings if not each.problem.startswith("incomplete")]
    if iteration is not None:
        complete = [each for each in complete if each.iteration == iteration]
    sound = [each for each in complete if not each.problem]
    broken = [each for each in complete if each.problem]
    newest = max((each.iteration for each in sound), default=-1)
    if later := [each for each in broken if each.iteration >= newest or not each.iteration]:
        raise CorruptStateError(
            f"{later[0].place}: {later[0].problem}. `verify` says what else is damaged; --iteration names "
            "another checkpoint."
        )
    if not sound:
        found = sorted({each.iteration for each in holdings if not each.problem})
        given = "" if iteration is None else f"--iteration={iteration}: "
        if not found:
            first = holdings[0]
            raise ConfigError(
                f"{given}{directory} holds no complete state: {first.place} is {first.problem}. The "
                "job ended before it was complete. Start it again, or convert the memory that it has left."
            )
        raise ConfigError(
            f"{given}{directory} holds no complete state{'' if iteration is None else ' of it'}. It has "
            f"iterations {found}: name one of them, or another directory."
        )
    return sound


def check_is_quiet(directory: str, storage: Storage) -> None:
    """Raise ConfigError if a job writes to a persist directory: it may delete what is read."""
    own = own_origin(launch_of(os.environ))
    if (holder := find_live(StorageLock(storage), _WATCH_S, own)) is not None:
        raise ConfigError(
            f"{directory} must not be written to while it is converted, and {holder} writes there: "
            "it deletes old checkpoints. Wait for its end, or copy the checkpoint first."
        )


def _stored(place: str, storage: Storage, manifest: Manifest) -> RunState:
    indexes = {
        file.data: read_file(storage, manifest, file) for file in (*manifest.files, *manifest.older)
    }
    check_references(manifest, indexes)
    return RunState(
        place=place,
        iteration=manifest.iteration,
        identity=manifest.identity,
        ranks=[
            _checked(StorageReader(storage, indexes[file.data], file.data, where=file.index))
            for file in manifest.files
        ],
    )


def _in_memory(directory: str, chosen: Holding, holdings: Iterable[Holding]) -> RunState:
    """Return the newest state of the chosen run that all ranks have in memory on this machine."""
    identity = chosen.identity
    assert identity is not None
    states = [each for each in states_in_memory(holdings) if each.identity == identity]
    whole = [each for each in states if not each.missing]
    if not whole:
        at_chosen = [each for each in states if each.iteration == chosen.iteration]
        missing = sorted(at_chosen[0].missing)
        raise ConfigError(
            f"{directory} must hold the state of all {identity.world_size} ranks at one iteration, but lacks "
            f"the state of ranks {missing[:8]} at iteration {chosen.iteration}. Copy the memory of the other "
            "nodes next to it, or convert a checkpoint on storage."
        )
    newest = whole[0]
    paths = [Path(newest.copies[rank][0].place) for rank in range(identity.world_size)]
    for job in {path.parents[2] for path in paths if len(path.parents) > 2}:
        if is_alive(job):
            raise ConfigError(
                f"{directory} must not be written to while it is converted, and a process of job {job.name} "
                "runs. Wait for its end, or convert a checkpoint on storage."
            )
    ranks = []
    for path in paths:
        reader = MemoryReader(path, where=str(path))
        check_region(reader.index, path)
        ranks.append(_checked(reader))
    return RunState(place=directory, iteration=newest.iteration, identity=identity, ranks=ranks)


def _checked(reader: StateReader) -> StateReader:
    check_header(reader.index, reader.read_header(), reader.where)
    return reader


def _check_is_one_state(source: RunState, whole: int | None) -> None:
    """Refuse a window, whose units are of different iterations; name the newest whole state instead."""
    window = source.ranks[0].index.window
    if window > 1:
        first = source.iteration - window + 1
        raise ConfigError(
            f"{source.place} must be the state of one iteration, and is a window of {window} snapshots: its "
            f"units are of iterations {first} to {source.iteration}, and only a recovery makes one state of "
            f"them, by running {window - 1} iterations again. Give --densify -- COMMAND LINE OF THE JOB, "
            "which starts the job for that"
            + (f", or --iteration {whole}, which is one state." if whole is not None else ".")
        )
