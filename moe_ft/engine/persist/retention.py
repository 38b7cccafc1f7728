"""Deleting from a persist directory what no recovery needs any more.

What counts is what a recovery would use: checkpoints of the run as it was continued, whose files are there.
Runs in the writer of rank 0, the only one that deletes.
"""

import re
from collections.abc import Callable, Sequence

from moe_ft.engine.persist.manifests import Found, manifests
from moe_ft.engine.persist.soundness import Listings, check_checkpoint, check_sizes
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, iteration_directory
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.manifest import Manifest
from moe_ft.planning.branches import has_superseded, is_alive

_OUR_FILE = re.compile(
    r"rank_\d{5,}_[0-9a-f]{8}\.(safetensors|json)((\.[0-9a-f]{8})?\.part)?"
    r"|manifest(_[A-Za-z0-9_-]+)?\.json(\.[0-9a-f]{8})?\.part"
)


class Retention:
    """Keeps the newest usable checkpoints of a run. Owned by one thread of the writer."""

    def __init__(
        self,
        storage: Storage,
        keep: int,
        check: Callable[[], None] = lambda: None,
        *,
        keeps_whole: bool = False,
    ) -> None:
        """Take the rules of what is kept.

        Args:
            check: raises if nothing may be deleted any more; called before each manifest is removed and
                each directory cleared, because this process may have been suspended in between.
            keeps_whole: whether the newest state of one iteration stays besides.
        """
        self._storage = storage
        self._keep = keep
        self._check = check
        self._keeps_whole = keeps_whole
        # Checksums of manifests whose indexes were read and are right.
        self._sound: set[str] = set()

    def retain(self, newest: Manifest) -> list[int]:
        """Delete what the newest checkpoints of a run do not need; return the iterations of those deleted.

        Nothing is deleted before there are as many usable checkpoints as are to be kept. Then older ones go,
        and those of starts that the newest one's start knew of and did not continue, or whose files are
        damaged, once the run has passed their iteration. Checkpoints of other runs stay, as do those of
        starts that this one knows nothing of, and whatever is not named like a file of moe_ft. A checkpoint
        is unmade by removing its manifest first.

        Args:
            newest: the checkpoint that was just written: its indexes were read for that, and each rank's
                writer has read its data back before it wrote the index.
        """
        self._sound.add(checksum(encode(newest)))
        usable: list[tuple[int, str]] = []
        whole: list[tuple[int, str]] = []
        unusable: list[tuple[int, str]] = []
        listings = Listings(self._storage)
        found = list(manifests(self._storage))
        for iteration, path, manifest in found:
            if isinstance(manifest, CorruptStateError) or iteration > newest.iteration:
                continue  # evidence; newer ones stay until the run passes them
            if manifest.identity.lineage != newest.identity.lineage:
                continue
            is_of_run = self._is_of_run(manifest, newest)
            if is_of_run and self._is_sound(manifest, listings):
                usable.append((iteration, path))
                whole += usable[-1:] if _is_whole(manifest, newest) else []
            elif is_of_run or has_superseded(newest.identity, manifest.identity):
                unusable.append((iteration, path))
        has_enough = len(usable) >= self._keep
        kept = usable[: self._keep] + whole[: self._keeps_whole]
        gone = [each for each in usable if each not in kept] + unusable if has_enough else []
        for _, path in gone:
            self._check()
            self._storage.remove(path)
        left = [each for each in found if each[:2] not in gone]
        left.append((newest.iteration, "", newest))  # which a store may not list yet
        # Ranks may be writing another checkpoint of the same iteration.
        remove_unneeded(self._storage, left, newest.iteration - 1, self._check)
        return [iteration for iteration, _ in gone]

    def _is_of_run(self, manifest: Manifest, newest: Manifest) -> bool:
        return is_alive(manifest.iteration, manifest.identity.history, newest.identity.history)

    def _is_sound(self, manifest: Manifest, listings: Listings) -> bool:
        """Return whether a recovery could use a checkpoint, as far as that shows without reading its data."""
        name = checksum(encode(manifest))
        try:
            if name in self._sound:
                check_sizes(listings, manifest)
            else:
                check_checkpoint(self._storage, manifest, listings)
        except (CorruptStateError, FileNotFoundError):
            return False
        self._sound.add(name)
        return True

    def remove_incomplete(self, before: int) -> None:
        """Remove files of older iterations that never became a checkpoint.

        Call it when no older checkpoint can become complete any more; it makes room on a full disk.
        """
        found = list(manifests(self._storage))
        remove_unneeded(self._storage, found, before - 1, self._check, with_manifest=False)


def _is_whole(manifest: Manifest, newest: Manifest) -> bool:
    """Return whether a checkpoint has all units of its run, each of its own iteration."""
    ages = {unit.iteration for unit in manifest.units.values()}
    has_all = manifest.units.keys() >= newest.units.keys()
    return manifest.window == 1 and ages == {manifest.iteration} and has_all


def remove_unneeded(
    storage: Storage,
    found: Sequence[Found],
    newest: int,
    check: Callable[[], None],
    *,
    with_manifest: bool = True,
) -> None:
    """Remove files of iterations up to one that no manifest names; raises OSError if storage fails.

    A manifest that cannot be read may name anything up to its own iteration: all that stays.
    """
    needed: set[str] = set()
    have_manifest: set[int] = set()
    unknown = -1
    for iteration, _, manifest in found:
        have_manifest.add(iteration)
        if isinstance(manifest, CorruptStateError):
            unknown = max(unknown, iteration)
            continue
        for file in (*manifest.files, *manifest.older):
            needed |= {file.index, file.data}
    for iteration in storage.iterations():
        is_looked_through = with_manifest or iteration not in have_manifest
        if unknown < iteration <= newest and is_looked_through:
            check()
            _clear(storage, iteration, needed)


def _clear(storage: Storage, iteration: int, needed: set[str]) -> None:
    directory = iteration_directory(iteration)
    for name in storage.names_in(directory):
        if _OUR_FILE.fullmatch(name) and f"{directory}/{name}" not in needed:
            storage.remove(f"{directory}/{name}")
    storage.remove_directory(directory)
