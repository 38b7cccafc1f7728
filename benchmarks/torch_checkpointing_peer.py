"""torch-checkpointing, of the PyTorch team, as benchmarks.stall and benchmarks.storage measure it.

It is in a folder of its own (`--torch-checkpointing DIR`), made by

    pip install --no-deps --target DIR torch-checkpointing==0.1.1

A process of each rank writes from shared memory, into which a thread copies the state. Files are renamed into
their place when all ranks have theirs. It never calls fsync: the candidate "+ fsync" does, in the callbacks
that the library has before and after its rename. It has no checksums, and reads nothing back. Its defaults
for staging need CUDA; those here are the ones that its documentation gives for a CPU. Its default of O_DIRECT
fails (EINVAL at the end of a file that is no whole pages), so files go through the page cache.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.candidate import Candidate, Site, State

MODULE = "torch_checkpointing"
_ITEM = "state"
_START_S = 300  # of a busy machine; 30 s are the default
DEFAULT_FOLDER = Path("runs/torch_checkpointing")


def make_importable(folder: Path) -> None:
    """Let this process, and those that it starts, import the library from a folder if it is there."""
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)  # at the end: nothing in it hides what is installed


def sync(path: Path) -> None:
    """Bring a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_own(name: str, arguments: Any) -> None:
    """Bring the file of one rank, and its name, to the disk: before any rank goes on to the rename."""
    sync(Path(arguments.path) / name)
    sync(Path(arguments.path))


def sync_parent(arguments: Any) -> None:
    """Bring the new name of the directory to the disk."""
    sync(Path(arguments.path).parent)


def _settings(rank: int, *, syncs: bool) -> dict[str, Any]:
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = {"storage_config": LocalFileSystemStorageConfig(use_direct_io=False)}
    if not syncs:
        return storage
    return {
        **storage,
        "pre_finalize_callback": partial(sync_own, f"{_ITEM}_{rank}.pt"),
        "finalize_callback": sync_parent,
    }


@contextlib.contextmanager
def blocking_manager(*, syncs: bool) -> Iterator[Any]:
    """Yield a manager of one process that returns from `save` when everything is written."""
    import torch_checkpointing as library

    save = library.SyncCheckpointSaverConfig()
    manager = library.CheckpointManager(
        library.CheckpointManager.Config(save=save, **_settings(0, syncs=syncs))
    )
    try:
        yield manager
    finally:
        manager.close()


def save_blocking(manager: Any, folder: Path, state: State) -> None:
    """Write a state with such a manager, to a folder that is not there yet."""
    manager.save(str(folder), {_ITEM: state})


class TorchCheckpointing(Candidate):
    """Asynchronous saves; a checkpoint is complete after the rename, and may be lost with the power."""

    requires = (MODULE,)
    complete_means = "renamed"
    syncs: ClassVar[bool] = False

    def __init__(self, state: State, site: Site) -> None:
        super().__init__(state, site)
        import torch_checkpointing

        self._library = torch_checkpointing
        self._written: Future[Any] | None = None

    def start(self) -> None:
        """Start the process, and allocate what the copies go to."""
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.staging import CheckpointStagerConfig

        staging = CheckpointStagerConfig(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
        process = CheckpointProcessConfig(subprocess_init_timeout_secs=_START_S)
        save = self._library.AsyncCheckpointSaverConfig(
            staging_config=staging, process_config=process
        )
        self._manager = self._library.CheckpointManager(
            self._library.CheckpointManager.Config(
                save=save, **_settings(self.site.rank, syncs=self.syncs)
            )
        )
        self._manager.prewarm_staging({_ITEM: self.state})

    def _place(self, iteration: int) -> str:
        return str(self.site.disk / f"iteration_{iteration}")  # which the library makes itself

    def save(self, iteration: int) -> None:
        """Begin to copy the state; the process writes it then."""
        self._written = self._manager.save(self._place(iteration), {_ITEM: self.state})
        assert self._written is not None
        self._written.add_done_callback(lambda _: self.complete())

    def poll(self) -> None:
        """Raise what failed in the background."""
        if self._written is not None and self._written.done():
            self._written.result()

    def before_step(self) -> None:
        """Wait for the copy, as the library's documentation wants it around the optimizer step."""
        with self._manager.lock():
            pass

    def load(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Load into new tensors."""
        tensors = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        loaded: State = self._manager.load(self._place(iteration), into={_ITEM: tensors})[_ITEM]
        return loaded

    def close(self) -> None:
        """End the process."""
        self._manager.close()


class TorchCheckpointingSynced(TorchCheckpointing):
    """As `TorchCheckpointing`, with files and names on the disk before it counts."""

    complete_means = "fsync"
    syncs = True


TORCH_CHECKPOINTING: dict[str, type[Candidate]] = {
    "torch-checkpointing async": TorchCheckpointing,
    "torch-checkpointing async + fsync": TorchCheckpointingSynced,
}
