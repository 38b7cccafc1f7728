"""Pruning of a persist directory by hand: which checkpoints go, and which stay for what reason.

A checkpoint that stays has all of its files, those of older checkpoints included. What the job itself deletes
while it trains is engine/persist/retention.py.
"""

import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_ft.engine.persist.manifests import Found, manifests
from moe_ft.engine.persist.retention import remove_unneeded
from moe_ft.engine.persist.soundness import Listings, check_checkpoint, check_data, read_file
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.files.progress import PATIENCE_S
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.manifest import Manifest
from moe_ft.planning.branches import is_alive
from moe_ft.recovery.persist_directory import take_lock

_JOB = "moe_ft prune"  # in the lock; no job has such a name
_DAY_S = 86_400.0
_DAMAGED = "damaged, and left for you to look at"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules that keep checkpoints; one that no rule keeps goes.

    Attributes:
        keep: of each branch of each run this many of the newest usable ones, at least 1.
        every: those of iterations that this number divides; 0 for none.
        days: those written within so many days, by the clocks of their writers.
    """

    keep: int
    every: int = 0
    days: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint, and its fate.

    Attributes:
        path: of its manifest, in the persist directory.
        num_bytes: of its own data files.
        reason: why it stays; empty if it goes.
    """

    iteration: int
    path: str
    lineage: str
    num_bytes: int
    reason: str

    def __str__(self) -> str:
        what = f"iteration {self.iteration} of run {self.lineage}" if self.lineage else self.path
        return f"{what} ({self.num_bytes / 1e9:.3f} GB){f': {self.reason}' if self.reason else ''}"


def prune(url: str, rules: Rules, *, removes: bool) -> list[Checkpoint]:
    """Decide which checkpoints of a persist directory go, and remove them if that is wanted.

    What stays as one of the newest is read and verified if others go for it. Manifests go first, newest last,
    and then the files that no manifest names any more; so whatever stops this leaves only whole
    checkpoints, and once more does the rest. While it removes it has the lock of the directory, as a job
    would.

    Returns:
        All checkpoints, newest first.

    Raises:
        ConfigError: if there is none, or a running job writes there.
        OSError: if storage fails.
    """
    storage, data = Storage(url, PATIENCE_S), _Data()
    # Before it has the lock, since reading may take long.
    before = _checkpoints(storage, _find(storage), rules, data)
    if not removes:
        return before
    lock = _take_lock(storage, [each.path for each in reversed(before) if not each.reason])
    try:
        found = _find(storage)
        decided = _checkpoints(storage, found, rules, data)
        gone = {each.path for each in decided if not each.reason}
        for path in sorted(gone):
            lock.check()
            storage.remove(path)
        left = [each for each in found if each[1] not in gone]
        remove_unneeded(storage, left, decided[0].iteration, lock.check)
    finally:
        lock.release()
    there = {each.path for each in decided}
    made_room = [each for each in before if not each.reason and each.path not in there]
    return sorted(decided + made_room, key=lambda each: -each.iteration)


def _take_lock(storage: Storage, gone: list[str]) -> StorageLock:
    """Take the lock of a persist directory; make room for it where a disk is full.

    Args:
        gone: paths of manifests that go anyway, oldest first. One that goes before the lock is taken harms
            nobody: no job has the lock, and none can take it on a full disk.
    """
    while True:
        try:
            return take_lock(_JOB, storage)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not gone:
                raise
            storage.remove(gone.pop(0))


def _find(storage: Storage) -> list[Found]:
    if found := list(manifests(storage)):
        return found
    raise ConfigError(
        f"{storage.url} holds no checkpoint: no iter_*/manifest*.json. Give a persist directory, which "
        "--moe-ft-persist-dir named."
    )


def _checkpoints(
    storage: Storage, found: Sequence[Found], rules: Rules, data: "_Data"
) -> list[Checkpoint]:
    usable, damage = _sound(storage, found)
    kept = _kept(usable, rules)
    while bad := _first_damaged(storage, usable, kept, rules, data):
        path, damage[path] = bad
        del usable[path]
        kept = _kept(usable, rules)
    return [
        _checkpoint(iteration, path, manifest, damage.get(path) or kept.get(path, ""))
        for iteration, path, manifest in found
    ]


class _Data:
    """Checkpoints whose data were read: what is wrong with each, empty if nothing is."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}

    def problem(self, storage: Storage, manifest: Manifest) -> str:
        """Return what is wrong with the data of a checkpoint; it is read once."""
        name = checksum(encode(manifest))
        if name not in self._problems:
            self._problems[name] = ""
            try:
                for own in manifest.files:
                    index = read_file(storage, manifest, own)
                    check_data(storage, index, own.data, with_older=True)
            except (CorruptStateError, FileNotFoundError) as error:
                self._problems[name] = f"{_DAMAGED}: {error}"
        return self._problems[name]


def _first_damaged(
    storage: Storage,
    usable: Mapping[str, Manifest],
    kept: dict[str, str],
    rules: Rules,
    data: _Data,
) -> tuple[str, str] | None:
    """Read the newest checkpoints of each branch of which others go; return one that is damaged, and how.

    Args:
        kept: the reasons; those of checkpoints that were read say so.
    """
    for branch in _branches(usable):
        if all(path in kept for path in branch):
            continue
        for path in branch[: rules.keep]:
            if problem := data.problem(storage, usable[path]):
                return path, problem
            kept[path] += ", read and verified"
    return None


def _checkpoint(
    iteration: int, path: str, manifest: Manifest | CorruptStateError, reason: str
) -> Checkpoint:
    if isinstance(manifest, CorruptStateError):
        return Checkpoint(iteration=iteration, path=path, lineage="", num_bytes=0, reason=reason)
    return Checkpoint(
        iteration=iteration,
        path=path,
        lineage=manifest.identity.lineage,
        num_bytes=sum(file.num_bytes for file in manifest.files),
        reason=reason,
    )


def _sound(storage: Storage, found: Sequence[Found]) -> tuple[dict[str, Manifest], dict[str, str]]:
    """Return the usable manifests by path, newest first, and what is wrong with the others."""
    usable: dict[str, Manifest] = {}
    damage: dict[str, str] = {}
    listings = Listings(storage)
    for _, path, manifest in found:
        if isinstance(manifest, CorruptStateError):
            damage[path] = f"{_DAMAGED}: {manifest}"
            continue
        try:
            check_checkpoint(storage, manifest, listings)
            usable[path] = manifest
        except (CorruptStateError, FileNotFoundError) as error:
            damage[path] = f"{_DAMAGED}: {error}"
    return usable, damage


def _kept(usable: Mapping[str, Manifest], rules: Rules) -> dict[str, str]:
    """Return the paths of the manifests that stay, each with the rule that keeps it."""
    kept: dict[str, str] = {}
    for branch in _branches(usable):
        for path in branch[: rules.keep]:
            kept[path] = f"among the newest {rules.keep}" if rules.keep > 1 else "the newest"
    now_s = time.time()
    for path, manifest in usable.items():
        age_days = (now_s - manifest.created_s) / _DAY_S
        if rules.every and manifest.iteration % rules.every == 0:
            kept.setdefault(path, f"every {rules.every}th iteration stays")
        elif age_days < rules.days:
            kept.setdefault(path, f"{age_days:.1f} days old")
    return kept


def _branches(usable: Mapping[str, Manifest]) -> Iterator[list[str]]:
    """Yield the paths of each branch of each run, newest first.

    A recovery may choose any branch. A checkpoint that a later one continues belongs to the branch of that.
    """
    continued: set[str] = set()
    for head, newest in usable.items():
        if head in continued:
            continue
        older = [path for path, each in usable.items() if _continues(newest, each)]
        continued.update(older)
        yield [head, *older]


def _continues(newest: Manifest, older: Manifest) -> bool:
    """Return whether a checkpoint is of the run that led to a newer one."""
    return (
        older.identity.lineage == newest.identity.lineage
        and older.iteration < newest.iteration
        and is_alive(older.iteration, older.identity.history, newest.identity.history)
    )
