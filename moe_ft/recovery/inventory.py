"""State of a job that exists, in the memory of a node and on storage. Reads; changes nothing.

What the nodes have found travels to rank 0 in tables, without what many versions have in common.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moe_ft.engine.memory.job_directory import find_indexes, tier_of
from moe_ft.engine.persist.manifests import checkpoints
from moe_ft.engine.persist.soundness import check_region
from moe_ft.errors import CorruptStateError
from moe_ft.files.private_files import open_private
from moe_ft.files.storage import Storage, iteration_directory
from moe_ft.format.boundary import BoundaryIndex, Direction
from moe_ft.format.identity import History, Identity, Start
from moe_ft.format.index import IndexHead
from moe_ft.format.manifest import Manifest
from moe_ft.format.records import JobNumbers
from moe_ft.planning.recovery import Version
from moe_ft.planning.remains import FoundLog
from moe_ft.planning.shares import Packer, Table, Unpacker
from moe_ft.planning.tiers import STORAGE

_MOST_PROBLEMS = 64  # that ranks know which do not plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that was found and cannot be used.

    Attributes:
        is_state: whether all ranks may once have had this state, so that something is lost with it.
        iteration: iteration of the state; None if that is not known.
        is_unread: whether it could not be read, so that it may be in order.
    """

    text: str
    is_state: bool
    iteration: int | None = None
    is_unread: bool = False


@dataclass(kw_only=True, slots=True)
class Inventory:
    """Findings of one look.

    Attributes:
        versions: versions that look usable; their data has not been read yet.
        logs: boundary logs that look usable, likewise.
        lineages: runs of which all ranks had a state once, according to something that was found.
        identities: one for each (lineage, fingerprint) that was found, with its place.
        starts: all starts in the histories that were found.
        superseded: names of further starts, which these knew of.
    """

    versions: list[Version] = field(default_factory=list)
    logs: list[FoundLog] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    identities: list[tuple[str, Identity]] = field(default_factory=list)
    lineages: set[str] = field(default_factory=set)
    starts: set[Start] = field(default_factory=set)
    superseded: dict[str, None] = field(default_factory=dict)

    def add_identity(self, where: str, identity: Identity) -> Identity:
        """Remember an identity; return the first one that is equal, so that it is kept once."""
        self.starts.update(identity.history)
        self.superseded.update(dict.fromkeys(identity.superseded))
        for _, known in self.identities:
            if known == identity:
                return known
        self.identities.append((where, identity))
        return identity

    def merge(self, other: "Inventory") -> None:
        """Add the findings of another look."""
        self.versions += other.versions
        self.logs += other.logs
        self.problems += other.problems
        self.lineages |= other.lineages
        self.superseded.update(other.superseded)
        for where, identity in other.identities:
            self.add_identity(where, identity)

    def summary(self) -> "Inventory":
        """Return what ranks know that do not plan: starts, and the problems that matter most."""
        problems = sorted(self.problems, key=lambda each: (not each.is_unread, not each.is_state))
        return replace(
            self,
            versions=[],
            logs=[],
            identities=[],
            problems=problems[:_MOST_PROBLEMS],
        )

    @property
    def is_unreadable(self) -> bool:
        """True if a place could not be looked at, so that nobody knows what is there."""
        return any(problem.is_unread for problem in self.problems)

    @property
    def newest_iteration(self) -> int | None:
        """The iteration of the newest thing that was found, usable or not; None if that is not known."""
        found = [problem.iteration for problem in self.problems if problem.is_state]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        return max([*known, *(version.iteration for version in self.versions)], default=0)

    @property
    def has_state(self) -> bool:
        """True if there is, or may be, a state that all ranks had once."""
        return bool(self.lineages) or any(problem.is_state for problem in self.problems)

    @property
    def names(self) -> list[str]:
        """Names of all starts that have left something, the later ones last."""
        own = [start.name for start in sorted(self.starts)]
        return list(dict.fromkeys([*self.superseded, *own]))


class _LogWriter(NamedTuple):
    """Fields of a log that many have in common."""

    history: History
    replay_settings: str
    record_settings: str


class _LogRow(msgspec.Struct, frozen=True, array_like=True):
    writer: int
    rank: int
    iteration: int
    node: str
    path: str
    receivers: tuple[tuple[int, Direction], ...]
    numbers: JobNumbers | None


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """An inventory as it travels. Starts and names that are superseded follow from the identities."""

    versions: Table
    log_writers: list[_LogWriter]
    logs: list[_LogRow]
    problems: list[Problem]
    identities: list[tuple[str, Identity]]
    lineages: list[str]


_PACKED = msgspec.msgpack.Decoder(_Packed)


def pack(inventory: Inventory) -> bytes:
    """Return an inventory as it travels to rank 0."""
    writers: dict[_LogWriter, int] = {}
    logs = []
    for each in inventory.logs:
        writer = _LogWriter(each.history, each.replay_settings, each.record_settings)
        number = writers.setdefault(writer, len(writers))
        logs.append(
            _LogRow(
                number,
                each.rank,
                each.iteration,
                each.node,
                each.path,
                each.receivers,
                each.numbers,
            )
        )
    return msgspec.msgpack.encode(
        _Packed(
            Packer().table(inventory.versions),
            [*writers],
            logs,
            inventory.problems,
            inventory.identities,
            [*inventory.lineages],
        )
    )


def merge_packed(found: Iterable[bytes]) -> Inventory:
    """Return what several looks have found, which has travelled."""
    merged, unpacker = Inventory(), Unpacker()
    writers: dict[_LogWriter, _LogWriter] = {}
    for content in found:
        packed = _PACKED.decode(content)
        merged.versions += unpacker.versions(packed.versions)
        shared = [writers.setdefault(each, each) for each in packed.log_writers]
        for row in packed.logs:
            merged.logs.append(
                FoundLog(
                    rank=row.rank,
                    iteration=row.iteration,
                    node=row.node,
                    path=row.path,
                    receivers=row.receivers,
                    numbers=row.numbers,
                    **shared[row.writer]._asdict(),
                )
            )
        merged.problems += packed.problems
        merged.lineages.update(packed.lineages)
        for where, identity in packed.identities:
            merged.add_identity(where, identity)
    return merged


def look_at_memory(node_dir: Path, node: str, job_id: str) -> Inventory:
    """Return the state of any ranks of this job in a node's memory directory; that of others is not used."""
    inventory = Inventory()
    for path, index in find_indexes(node_dir, IndexHead):
        where = f"memory of node {node}: {path.relative_to(node_dir)}"
        try:
            if isinstance(index, OSError):
                raise index
            open_private(path.parent / index.file).close()  # raises for a file that is not ours
            check_region(index, path)
        except OSError as error:
            reason = str(error).removeprefix(str(path)).lstrip(": ")
            inventory.problems.append(Problem(text=f"{where}: {reason}", is_state=True))
            continue
        if index.identity.job_id != job_id:
            reason = f"{where} is of another job, '{index.identity.job_id}'"
            inventory.problems.append(Problem(text=reason, is_state=False))
            continue
        identity = inventory.add_identity(where, index.identity)
        has_state = index.complete_iteration is not None
        if has_state:
            inventory.lineages.add(identity.lineage)
        if not index.is_whole:
            reason = (
                f"{where} has {index.num_snapshots} of the {index.window} snapshots of a window, up to "
                f"iteration {index.iteration}"
            )
            inventory.problems.append(
                Problem(text=reason, is_state=has_state, iteration=index.iteration)
            )
            continue
        version = _version(
            identity, index.rank, index.iteration, index.window, str(path.relative_to(node_dir))
        )
        tier = tier_of(path)
        inventory.versions.append(
            replace(
                version,
                node=node,
                is_replica=tier == "replica",
                is_breakpoint=tier == "breakpoint",
            )
        )
    return inventory


def look_at_logs(node_dir: Path, node: str, job_id: str) -> list[FoundLog]:
    """Return the boundary logs in a node's memory directory that look usable; the arguments are as above.

    Nothing is said of others: without its log a neighbour runs the iteration again too.
    """
    found = []
    for path, index in find_indexes(node_dir, BoundaryIndex):
        if not isinstance(index, OSError) and index.identity.job_id == job_id:
            found.append(_found_log(index, node, str(path.relative_to(node_dir))))
    return found


def _found_log(index: BoundaryIndex, node: str, path: str) -> FoundLog:
    return FoundLog(
        rank=index.rank,
        iteration=index.iteration,
        history=index.identity.history,
        node=node,
        path=path,
        receivers=tuple(sorted({(each.neighbour, each.direction) for each in index.sent})),
        numbers=index.numbers or None,
        replay_settings=_shared_json(index.identity.replay_settings),
        record_settings=_shared_json(index.record_settings),
    )


def look_at_storage(storage: Storage) -> Inventory:
    """Return the checkpoints of a persist directory, of any job: the user named the directory."""
    inventory = Inventory()
    try:
        for iteration, path, found in checkpoints(storage):
            directory = f"{storage.url}/{iteration_directory(iteration)}"
            if isinstance(found, Manifest):
                _add_checkpoint(inventory, directory, found)
            elif found is None:
                reason = f"{directory} has no manifest: it was never completed"
                inventory.problems.append(Problem(text=reason, is_state=False))
            else:
                is_unread = not isinstance(found, CorruptStateError)
                prefix = f"{storage.url}/{path} cannot be read: {type(found).__name__}: "
                text = f"{prefix * is_unread}{found}"
                inventory.problems.append(
                    Problem(text=text, is_state=True, iteration=iteration, is_unread=is_unread)
                )
    except Exception as error:  # back ends raise anything
        reason = f"{storage.url} cannot be read: {type(error).__name__}: {error}"
        inventory.problems.append(Problem(text=reason, is_state=True, is_unread=True))
    return inventory


def _add_checkpoint(inventory: Inventory, directory: str, manifest: Manifest) -> None:
    inventory.lineages.add(manifest.identity.lineage)
    identity = inventory.add_identity(directory, manifest.identity)
    first = _version(identity, 0, manifest.iteration, manifest.window, "")
    inventory.versions += [
        replace(first, rank=file.rank, path=file.index, file=file, tier=STORAGE)
        for file in manifest.files
    ]


def _version(identity: Identity, rank: int, iteration: int, window: int, path: str) -> Version:
    return Version(
        rank=rank,
        iteration=iteration,
        lineage=identity.lineage,
        history=identity.history,
        node=None,
        path=path,
        window=window,
        replay_settings=_shared_json(identity.replay_settings),
        superseded=identity.superseded,
        began_with=identity.began_with,
    )


def _shared_json(settings: Mapping[str, Any]) -> str:
    # They are long and the same for all ranks; one object is sent only once.
    return sys.intern(msgspec.json.encode(settings, order="sorted").decode())
