"""Rescue of the memory that a job has left on its nodes after its death: `python -m moe_ft rescue`.

Each node writes to storage what it holds, as the writers of the job would have. Nodes learn of each other
from the files there alone. The first to find the files of all ranks makes them a checkpoint, and reads it.
"""

import time
from pathlib import Path

import filelock

from moe_ft.engine.memory.job_directory import job_directory, job_lock, read_marker
from moe_ft.engine.persist.manifests import manifests, write_manifest
from moe_ft.engine.persist.requests import PersistRequest
from moe_ft.engine.persist.storage_lock import LOCK_STALE_S, StorageLock, find_live
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.files.progress import PATIENCE_S
from moe_ft.files.storage import Storage, file_tag, iteration_directory, rank_path
from moe_ft.format.manifest import Manifest
from moe_ft.planning.branches import is_alive as belongs_to
from moe_ft.recovery.inspect.holdings import StateInMemory, find_holdings, states_in_memory
from moe_ft.recovery.inspect.verification import verify
from moe_ft.recovery.job_memory import is_alive

_KEPT = 1 << 30  # checkpoints: a rescue deletes none
_POLL_S = 0.2
_MOST_NAMED = 8


def _path_of(state: StateInMemory, rank: int) -> str:
    """Return where a rank's index goes on storage."""
    tag = file_tag(state.identity, is_whole=True)
    return rank_path(state.iteration, rank, tag, "json")


def _missing(state: StateInMemory, storage: Storage) -> set[int]:
    """Return the ranks that nobody has written yet."""
    names = set(storage.names_in(iteration_directory(state.iteration)))
    ranks = range(state.identity.world_size)
    return {rank for rank in ranks if _path_of(state, rank).rpartition("/")[2] not in names}


def rescue(memory_dir: str, job_id: str, url: str, wait_s: float) -> bool:
    """Write the newest state that is still complete to storage; return whether there is one now.

    Args:
        wait_s: how long to wait for other nodes, from when the last file of one has come. Only then are
            copies of other nodes' ranks written, so that two nodes seldom write the same.

    Raises:
        ConfigError: if this machine has no memory of the job, the job runs, or another one writes there.
        OSError: if storage fails.
    """
    directory = job_directory(memory_dir, job_id)
    if not directory.is_dir() or read_marker(directory) is None:
        raise ConfigError(
            f"JOB={job_id} has no memory under --memory-dir={memory_dir} on this machine. Name the job as "
            "--moe-ft-job-id did, and the directory of --moe-ft-memory-dir, on a node that it ran on."
        )
    try:
        with job_lock(directory).acquire(blocking=False):
            if is_alive(directory):
                raise filelock.Timeout(str(directory))
            storage = Storage(url, PATIENCE_S)
            storage.make_root()
            if (holder := find_live(StorageLock(storage), LOCK_STALE_S)) is not None:
                raise ConfigError(
                    f"--to={storage.url} is being written by {holder}. Name another place, or end that job."
                )
            return _rescue(directory, storage, url, wait_s)
    except filelock.Timeout:
        raise ConfigError(
            f"JOB={job_id} runs on this machine, or starts or ends: it needs no rescue. End all of its "
            "processes first."
        ) from None


def _rescue(directory: Path, storage: Storage, url: str, wait_s: float) -> bool:
    worker = PersistWorker(directory, storage, _KEPT)
    for state in _states(directory):
        if (found := _on_storage(storage, state)) is not None:
            print(
                f"{storage.url} has iteration {found} of this run already, and nothing newer is complete"
            )
            return True
        missing = _write(state, worker, storage, wait_s)
        if not missing:
            return _complete(state, storage, url)
        named = ", ".join(map(str, sorted(missing)[:_MOST_NAMED]))
        more = ", ..." if len(missing) > _MOST_NAMED else ""
        print(
            f"iteration {state.iteration} is not complete: of {state.identity.world_size} ranks, the state "
            f"of {len(missing)} is missing: {named}{more}"
        )
    print(
        "No checkpoint was written. Run the same command on the other nodes of the job, at the same time."
    )
    return False


def _states(directory: Path) -> list[StateInMemory]:
    """Return the states in memory, those of the latest start first, then the newest."""
    try:
        found = find_holdings(str(directory))
    except ConfigError:  # nothing at all
        return []
    for each in found:
        if each.problem:
            print(f"left out: {each.place}: {each.problem}")
    return states_in_memory(found)


def _on_storage(storage: Storage, state: StateInMemory) -> int | None:
    """Return the iteration of a checkpoint of this run that is as new; None if there is none."""
    history = state.identity.history
    for iteration, _, found in manifests(storage):
        if iteration < state.iteration:
            return None
        if isinstance(found, Manifest) and belongs_to(iteration, found.identity.history, history):
            return iteration
    return None


def _write(
    state: StateInMemory, worker: PersistWorker, storage: Storage, wait_s: float
) -> set[int]:
    """Write this machine's part of a state, and wait for that of others; return the ranks without one."""
    copies = {rank for rank, held in state.copies.items() if held[0].tier == "replica"}
    for rank in sorted(state.copies.keys() - copies):
        _write_rank(state, rank, worker)
    missing, changed_s = _missing(state, storage), time.monotonic()
    while missing:
        if time.monotonic() - changed_s >= wait_s:
            if not missing & copies:
                return missing
            for rank in sorted(missing & copies):
                if rank in _missing(state, storage):
                    _write_rank(state, rank, worker)
            copies, changed_s = set(), time.monotonic()
        else:
            time.sleep(min(_POLL_S, wait_s))
        before, missing = missing, _missing(state, storage)
        changed_s = changed_s if missing == before else time.monotonic()
    return set()


def _write_rank(state: StateInMemory, rank: int, worker: PersistWorker) -> None:
    """Write the first copy of a rank's state that is sound."""
    for copy in state.copies[rank]:
        (index,) = copy.indexes
        path = Path(copy.place)
        request = PersistRequest(
            rank=rank,
            iteration=state.iteration,
            index=str(path),
            data=str(path.parent / index.file),
            rotating=tuple(name for name, unit in index.units.items() if unit.file),
            previous="",
            tag=file_tag(state.identity, is_whole=True),
            writes_manifest=False,
            deadline_s=PATIENCE_S,
        )
        try:
            written, _ = worker.persist(request)
        except CorruptStateError as error:
            print(f"left out: {copy.place}: {error}")
            continue
        what = f"iteration {state.iteration} of rank {rank}: {written.file_bytes / 1e9:.3f} GB"
        print(f"{what} from {copy.tier} {copy.place}")
        return


def _complete(state: StateInMemory, storage: Storage, url: str) -> bool:
    """Make the files of all ranks a checkpoint, read all of it, and say what it is."""
    tag = file_tag(state.identity, is_whole=True)
    write_manifest(storage, state.iteration, tag, state.identity.world_size)
    name = iteration_directory(state.iteration)
    right, wrong = verify(f"{url.rstrip('/')}/{name}")  # the URL of a Storage shows no password
    place = f"{storage.url.rstrip('/')}/{name}"
    for line in wrong:
        print(f"WRONG  {line}")
    if not wrong:
        print(
            f"{place} is a checkpoint of iteration {state.iteration}, read and verified: {right[0]}"
        )
    return not wrong
