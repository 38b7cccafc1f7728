"""What state of a job exists, in the memory of a node and on storage. Reads; changes nothing."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moe_ft.engine.regions import index_paths, job_directory
from moe_ft.engine.storage import Storage
from moe_ft.errors import CorruptStateError
from moe_ft.formats import Identity, IndexHead, decode
from moe_ft.planning.recovery import Version


@dataclass(kw_only=True, slots=True)
class Inventory:
    """What one look has found.

    Attributes:
        versions: usable as far as the look went; their data has not been read yet.
        problems: what was found and cannot be used, and why.
        is_unreadable: whether a place could not be looked at, so that nobody knows what is there.
        identities: one for each (lineage, fingerprint) that was found, and where.
    """

    versions: list[Version] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    identities: list[tuple[str, Identity]] = field(default_factory=list)
    is_unreadable: bool = False

    def add_identity(self, where: str, identity: Identity) -> None:
        """Remember a run that was seen."""
        known = [_settings(each) for _, each in self.identities]
        if _settings(identity) not in known:
            self.identities.append((where, identity))

    def merge(self, other: "Inventory") -> None:
        """Add what another look has found."""
        self.versions += other.versions
        self.problems += other.problems
        self.is_unreadable |= other.is_unreadable
        for where, identity in other.identities:
            self.add_identity(where, identity)


def _settings(identity: Identity) -> tuple[object, ...]:
    return (
        identity.lineage,
        identity.fingerprint,
        identity.world_size,
        identity.strategy,
        identity.division,
    )


def look_at_memory(node_dir: Path, node: str, job_id: str) -> Inventory:
    """Return what lies in a node's memory directory, for whichever ranks.

    Args:
        node_dir: the directory of this job on this node.
        node: its node id.
        job_id: of this job; what another job left there is not used.
    """
    inventory = Inventory()
    for path in index_paths(node_dir):
        where = f"memory of node {node}: {path.parent.name}/{path.name}"
        try:
            index = decode(path.read_bytes(), IndexHead, where)
            data = path.parent / index.file
            if data.stat().st_size < index.file_bytes:
                raise CorruptStateError(f"{where}: {data.name} is shorter than it says")
        except OSError as error:
            inventory.problems.append(_problem(error, where))
            continue
        if index.identity.job_id != job_id:
            inventory.problems.append(f"{where} is of another job, '{index.identity.job_id}'")
            continue
        inventory.add_identity(where, index.identity)
        if not index.is_whole:
            inventory.problems.append(
                f"{where} has {index.num_snapshots} of the {index.window} snapshots of a window that ends "
                f"behind iteration {index.iteration}"
            )
            continue
        inventory.versions.append(
            Version(
                rank=index.rank,
                iteration=index.iteration,
                lineage=index.identity.lineage,
                history=index.identity.history,
                node=node,
                path=str(path.relative_to(node_dir)),
                is_replica=path.parent.name.startswith("replica_"),
                window=index.window,
                replay_settings=_replay_settings(index.identity),
            )
        )
    return inventory


def look_at_storage(storage: Storage) -> Inventory:
    """Return the checkpoints of a persist directory, of whichever job: the user named the directory."""
    inventory = Inventory()
    try:
        iterations = storage.iterations()
    except Exception as error:  # back ends raise what they like
        inventory.problems.append(f"{storage.url} cannot be read: {type(error).__name__}: {error}")
        inventory.is_unreadable = True
        return inventory
    for iteration in iterations:
        where = f"{storage.url}/iter_{iteration:07d}"
        try:
            if not storage.has_manifest(iteration):
                inventory.problems.append(f"{where} has no manifest: it was never completed")
                continue
            manifest = storage.manifest(iteration)
        except CorruptStateError as error:
            inventory.problems.append(str(error))
            continue
        except Exception as error:
            inventory.problems.append(f"{where} cannot be read: {type(error).__name__}: {error}")
            inventory.is_unreadable = True
            continue
        inventory.add_identity(where, manifest.identity)
        inventory.versions += [
            Version(
                rank=file.rank,
                iteration=manifest.iteration,
                lineage=manifest.identity.lineage,
                history=manifest.identity.history,
                node=None,
                path=file.index,
                window=manifest.window,
                replay_settings=_replay_settings(manifest.identity),
            )
            for file in manifest.files
        ]
    return inventory


def _replay_settings(identity: Identity) -> str:
    return msgspec.json.encode(identity.replay_settings, order="sorted").decode()


def _problem(error: OSError, where: str) -> str:
    return str(error) if isinstance(error, CorruptStateError) else f"{where}: {error}"


def other_jobs(memory_dir: str, job_id: str) -> list[str]:
    """Describe other jobs' directories under --moe-ft-memory-dir: they are reported, never read."""
    root = Path(memory_dir)
    if not root.is_dir():
        return []
    own = job_directory(memory_dir, job_id)
    found = []
    for directory in sorted(root.iterdir()):
        if directory == own or not directory.is_dir():
            continue
        num_bytes, newest_s = measure(directory)
        age_s = time.time() - newest_s
        found.append(
            f"job '{directory.name}': {num_bytes / 2**20:.0f} MiB, {age_s / 60:.0f} minutes old"
        )
    return found


def measure(directory: Path) -> tuple[int, float]:
    """Return the bytes in a directory and when it last changed (seconds since 1970)."""
    num_bytes, newest_s = 0, directory.stat().st_mtime
    for path in directory.rglob("*"):
        try:
            status = path.stat()
        except OSError:
            continue
        num_bytes += status.st_blocks * 512
        newest_s = max(newest_s, status.st_mtime)
    return num_bytes, newest_s
