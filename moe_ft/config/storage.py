"""Settings of storage."""

from dataclasses import dataclass
from typing import ClassVar

from moe_ft.config.fields import (
    STRATEGY,
    Bounds,
    ConfigPart,
    setting,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig(ConfigPart):
    """Storage: checkpoints that outlive all nodes."""

    TITLE: ClassVar[str] = "storage"
    PAGE: ClassVar[str] = "storage.md"
    NEEDS: ClassVar[tuple[str, ...]] = ("persist_dir",)

    persist_dir: str | None = setting(
        None, "directory or fsspec URL for checkpoints on storage", metavar="URL", needs=(STRATEGY,)
    )
    persist_interval: int = setting(
        10,
        "write every N-th complete snapshot or window to storage; 0 = only the last state",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of snapshots, or 0 to write none before the end",
    )
    persist_dense_interval: int = setting(
        0,
        "also write the whole state of one iteration to storage, every so many iterations, whatever the "
        "strategy; 0 = only at the end",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations, or leave the flag out",
        page="breakpoints.md#whole-states",
    )
    keep: int = setting(
        2,
        "checkpoints to keep on storage; with --moe-ft-persist-dense-interval also the newest whole state",
        metavar="N",
        bounds=Bounds(at_least=1),
        reason="the newest checkpoint is never deleted",
        remedy="Give the number of checkpoints that storage has room for",
    )

    @property
    def persists(self) -> bool:
        """True if anything goes to storage."""
        return self.persist_dir is not None  # at least the last state

    @property
    def persists_dense(self) -> bool:
        """True if whole states go to storage while training runs."""
        return self.persist_dense_interval > 0

    @property
    def keeps_whole(self) -> bool:
        """True if the newest whole state stays on storage besides the newest checkpoints."""
        return self.persists_dense and self.persist_interval > 0
