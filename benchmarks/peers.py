"""Checkpoint libraries, adapted to the interface of benchmarks/candidate.py.

Each adapter follows the library's documentation for users, on CPU tensors and gloo. If a library relies on
``tensor.to("cpu")`` for its snapshot, which copies nothing here, the adapter makes the copy. The measurements
are in benchmarks/stall.py. The constructors of adapters import packages that are optional here.

torch-checkpointing, of the PyTorch team, is in a folder of its own (`--torch-checkpointing DIR`), made by

    pip install --no-deps --target DIR torch-checkpointing==0.1.1

A process of each rank writes from shared memory, into which a thread copies the state. Files are renamed into
their place when all ranks have theirs. It never calls fsync: the candidate "+ fsync" does, in the callbacks
that the library has before and after its rename. It has no checksums, and reads nothing back. Its defaults
for staging need CUDA; those here are the ones that its documentation gives for a CPU. Its default of O_DIRECT
fails (EINVAL at the end of a file that is no whole pages), so files go through the page cache.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

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


class TorchSave(Candidate):
    """One file per rank, written by torch.save."""

    def save(self, iteration: int) -> None:
        """Write and sync the file."""
        with self.file(iteration).open("wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        self.complete()

    def load(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Read the file."""
        tensors: State = torch.load(self.file(iteration), weights_only=True)
        return tensors


class Safetensors(Candidate):
    """One file per rank, written by safetensors."""

    requires = ("safetensors",)

    def __init__(self, state: State, site: Site) -> None:
        super().__init__(state, site)
        import safetensors.torch

        self._library = safetensors.torch

    def save(self, iteration: int) -> None:
        """Write and sync the file."""
        self._library.save_file(self.state, self.file(iteration))
        with self.file(iteration).open("rb") as file:
            os.fsync(file.fileno())
        self.complete()

    def load(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Read the file."""
        tensors: State = self._library.load_file(self.file(iteration))
        return tensors


class DcpSync(Candidate):
    """torch.distributed.checkpoint, blocking."""

    def start(self) -> None:
        """Create a group of its own: asynchronous saves use it while training uses the default one."""
        self._group = dist.new_group(backend="gloo")

    def save(self, iteration: int) -> None:
        """Save and wait."""
        writer = dcp.FileSystemWriter(self.folder(iteration))
        dcp.save(self._named(self.state), storage_writer=writer, process_group=self._group)
        self.complete()

    def load(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Load into new tensors."""
        tensors = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        reader = dcp.FileSystemReader(self.folder(iteration))
        dcp.load(self._named(tensors), storage_reader=reader, process_group=self._group)
        return tensors

    def _named(self, tensors: State) -> State:
        # DCP would write a tensor that has the same name on both ranks only once.
        return {f"rank_{self.site.rank}.{name}": tensor for name, tensor in tensors.items()}


class DcpThread(DcpSync):
    """dcp.async_save as it comes: a new staging copy each time, then a thread writes it."""

    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD
    staging: ClassVar[StagingOptions | None] = None  # None: no stager is passed

    def start(self) -> None:
        """Create the group and the stager."""
        super().start()
        self._stager = DefaultStager(self.staging) if self.staging else None
        self._staged: Future[None] | None = None
        self._written: Future[Any] | None = None

    def save(self, iteration: int) -> None:
        """Stage the state, or begin to, and let the background write it."""
        response = dcp.async_save(
            self._named(self.state),
            storage_writer=dcp.FileSystemWriter(self.folder(iteration)),
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self._staged, self._written = response.staging_completion, response.upload_completion
        else:
            self._written = response
        self._written.add_done_callback(lambda _: self.complete())

    def poll(self) -> None:
        """Raise what failed in the background."""
        if self._written is not None and self._written.done():
            self._written.result()

    def before_step(self) -> None:
        """Wait for the staging copy."""
        if self._staged is not None:
            self._staged.result()

    def close(self) -> None:
        """Close the stager. The writer process ends with this one."""
        if self._stager is not None:
            self._stager.close()


def _staging(*, shared: bool, background: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=shared,
        use_async_staging=background,
        use_non_blocking_copy=False,
    )


class DcpThreadBackground(DcpThread):
    """The copy is made by a thread too, into memory that is kept."""

    staging = _staging(shared=False, background=True)


class DcpProcess(DcpThread):
    """A process writes; the copy reaches it through a pipe."""

    kind = AsyncCheckpointerType.PROCESS


class DcpProcessShared(DcpProcess):
    """A process writes from shared memory, which is kept."""

    staging = _staging(shared=True, background=False)


class DcpProcessSharedBackground(DcpProcess):
    """As `DcpProcessShared`, with the copy made by a thread."""

    staging = _staging(shared=True, background=True)


def _answer_cuda_calls() -> None:
    """Answer the calls that Megatron and NVRx make to torch.cuda by name, for the whole process."""
    answers: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda *device: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def prepare_for_megatron() -> None:
    """Let Megatron be imported and run on a CPU, also alongside an NVRx that it does not support."""
    _answer_cuda_calls()
    # With an NVRx older than 0.6 importable, megatron.core.dist_checkpointing does not import.
    sys.modules["nvidia_resiliency_ext"] = None  # type: ignore[assignment]


def copy_buckets(buckets: Sequence[Any]) -> list[Any]:
    """Do what Megatron's ``preload_tensors`` does, with a copy of tensors that are on the CPU."""
    return [
        (path, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (objects, tensors) in buckets
    ]


def run_megatron_worker(*args: Any) -> None:
    """Run Megatron's persistent writer in its process, which has no GPU either."""
    prepare_for_megatron()
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    torch.set_num_threads(1)
    PersistentAsyncCaller.async_loop(*args)


class MegatronSync(Candidate):
    """megatron.core.dist_checkpointing, blocking. The ranks' tensors are shards of global ones."""

    requires = ("megatron.core",)

    def __init__(self, state: State, site: Site) -> None:
        super().__init__(state, site)
        prepare_for_megatron()
        from megatron.core import dist_checkpointing

        self._library = dist_checkpointing

    def save(self, iteration: int) -> None:
        """Save and wait."""
        self._library.save(self._sharded(self.state), str(self.folder(iteration)))
        self.complete()

    def load(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Load into new tensors."""
        tensors = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        loaded: State = self._library.load(self._sharded(tensors), str(self.folder(iteration)))
        return loaded

    def _sharded(self, tensors: State) -> dict[str, Any]:
        part = (0, self.site.rank, self.site.num_ranks)
        make = self._library.ShardedTensor.from_rank_offsets
        return {name: make(name, tensor, part) for name, tensor in tensors.items()}


class MegatronFork(MegatronSync):
    """A forked process writes what it sees of the state: copy-on-write instead of a copy."""

    copies: ClassVar[bool] = False
    persistent: ClassVar[bool] = False

    def start(self) -> None:
        """Create the queue of saves."""
        from megatron.core.dist_checkpointing.strategies import async_utils

        self._queue = async_utils.AsyncCallsQueue(persistent=self.persistent)
        if self.persistent:
            loop = staticmethod(run_megatron_worker)
            async_utils.PersistentAsyncCaller.async_loop = loop
            self._queue.warmup_persistent_caller(self.site.rank, "forkserver")  # as Megatron does

    def save(self, iteration: int) -> None:
        """Plan the save and hand it to the writer."""
        request = self._library.save(
            self._sharded(self.state),
            str(self.folder(iteration)),
            async_sharded_save=True,
            async_strategy="mcore",  # the other one, "nvrx", needs NVRx 0.6
        )
        if self.copies:
            buckets = request.async_fn_args[1]
            request = request._replace(preload_fn=partial(copy_buckets, buckets))
        self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Finish the save if both writers are done."""
        if self._queue.maybe_finalize_async_calls(blocking=False):
            self.complete()

    def close(self) -> None:
        """Stop the writer."""
        self._queue.close()


class MegatronForkCopy(MegatronFork):
    """The trainer makes a staging copy, as it must on a GPU; a forked process writes it."""

    copies = True


class MegatronPersistent(MegatronFork):
    """A process that stays makes the staging copy, while the trainer waits, and writes it."""

    copies = True
    persistent = True


PEERS: dict[str, type[Candidate]] = {
    "torch.save + fsync": TorchSave,
    "safetensors + fsync": Safetensors,
    "DCP sync": DcpSync,
    "DCP async, thread": DcpThread,
    "DCP async, thread, background staging": DcpThreadBackground,
    "DCP async, process": DcpProcess,
    "DCP async, process, shared memory": DcpProcessShared,
    "DCP async, process, shared memory, background staging": DcpProcessSharedBackground,
    "megatron-core sync": MegatronSync,
    "megatron-core async, fork, no staging copy": MegatronFork,
    "megatron-core async, fork, staging copy": MegatronForkCopy,
    "megatron-core async, persistent worker": MegatronPersistent,
}
