"""Pruning of a persist directory by hand: which checkpoints go, and which stay for what reason.

A checkpoint that stays has all of its files, those of older checkpoints included. What the job itself deletes
while it trains is engine/persist/retention.py.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_ft.engine.persist.manifests import Found, manifests
from moe_ft.engine.persist.patience import PATIENCE_S
from moe_ft.engine.persist.retention import remove_unneeded
from moe_ft.engine.persist.soundness import check_checkpoint
from moe_ft.engine.persist.storage import Listings, Storage
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.format.manifest import Manifest
from moe_ft.planning.branches import is_alive
from moe_ft.recovery.persist_directory import take_lock

_JOB = "moe_ft prune"  # in the lock; no job has such a name
_DAY_S = 86_400.0


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
        path: of its manifest, relative to the persist directory.
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

    Manifests go first, newest last, and then the files that no manifest names any more; so whatever stops
    this leaves only whole checkpoints, and once more does the rest. While it removes it has the lock of the
    directory, as a job would.

    Args:
        url: of the persist directory.
        removes: whether to remove anything.

    Returns:
        All checkpoints, newest first.

    Raises:
        ConfigError: if there is none, or a running job writes there.
        OSError: if storage fails.
    """
    storage = Storage(url, PATIENCE_S)
    if not removes:
        return _checkpoints(storage, list(manifests(storage)), rules)
    _refuse_nothing(storage)
    lock = take_lock(_JOB, storage)
    try:
        found = list(manifests(storage))
        decided = _checkpoints(storage, found, rules)
        gone = {each.path for each in decided if not each.reason}
        for path in sorted(gone):
            lock.check()
            storage.remove(path)
        left = [each for each in found if each[1] not in gone]
        remove_unneeded(storage, left, decided[0].iteration, lock.check)
    finally:
        lock.release()
    return decided


def _refuse_nothing(storage: Storage) -> None:
    if next(manifests(storage), None) is None:
        raise ConfigError(
            f"{storage.url} holds no checkpoint: no iter_*/manifest*.json. Give a persist directory, which "
            "--moe-ft-persist-dir named."
        )


def _checkpoints(storage: Storage, found: Sequence[Found], rules: Rules) -> list[Checkpoint]:
    if not found:
        _refuse_nothing(storage)
    usable, damage = _sound(storage, found)
    kept = _kept(usable, rules)
    return [
        _checkpoint(iteration, path, manifest, damage.get(path) or kept.get(path, ""))
        for iteration, path, manifest in found
    ]


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
            damage[path] = f"damaged, and left for you to look at: {manifest}"
            continue
        try:
            check_checkpoint(storage, manifest, listings)
            usable[path] = manifest
        except (CorruptStateError, FileNotFoundError) as error:
            damage[path] = f"damaged, and left for you to look at: {error}"
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
