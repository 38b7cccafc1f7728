"""Checkpoint libraries, adapted to the interface of benchmarks/candidate.py.

Each adapter follows the library's documentation for users, on CPU tensors and gloo. If a library relies on
``tensor.to("cpu")`` for its snapshot, which copies nothing here, the adapter makes the copy. The measurements
are in benchmarks/stall.py. The constructors of adapters import packages that are optional here.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.candidate import Candidate, Site, State


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


def _let_nvrx_accept_cpu_tensors(*, copies: bool) -> None:
    """Replace what insists on CUDA in NVRx's state dict, whose instances are sent to other ranks."""
    from nvidia_resiliency_ext.checkpointing.local import basic_state_dict as module

    def construct(self: Any, tensors: State) -> None:
        self.state_dict, self._is_hollow = tensors, False

    def copy_tensors_to_cpu(self: Any, non_blocking: bool = False) -> None:
        if copies:
            self.state_dict = {name: tensor.clone() for name, tensor in self.state_dict.items()}

    def stay(self: Any, non_blocking: bool = True) -> None:
        """Leave the tensors on the CPU."""

    methods = {
        "__init__": construct,
        "copy_tensors_to_cpu": copy_tensors_to_cpu,
        "restore_tensor_device": stay,
    }
    for name, method in methods.items():
        setattr(module.BasicTensorAwareStateDict, name, method)


class NvrxSync(Candidate):
    """NVRx local checkpoints on tmpfs, blocking."""

    requires = ("nvidia_resiliency_ext",)
    complete_means = "RAM"
    is_async: ClassVar[bool] = False
    replicates: ClassVar[bool] = False

    def __init__(self, state: State, site: Site) -> None:
        super().__init__(state, site)
        _answer_cuda_calls()
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core
        from nvidia_resiliency_ext.checkpointing.local import basic_state_dict
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager
        from nvidia_resiliency_ext.checkpointing.local.replication import strategies

        self._core, self._wrap = core, basic_state_dict.BasicTensorAwareStateDict
        self._local_manager, self._strategies = local_manager, strategies

    def start(self) -> None:
        """Create the manager and the queue of saves."""
        _let_nvrx_accept_cpu_tensors(copies=self.is_async)
        strategy = None
        if self.replicates:
            strategy = self._strategies.CliqueReplicationStrategy.from_replication_params(
                replication_jump=1, replication_factor=self.site.num_ranks
            )
        self._manager = self._local_manager.LocalCheckpointManager(
            self.site.tmpfs, repl_strategy=strategy
        )
        self._queue = self._core.AsyncCallsQueue(persistent=False)

    def save(self, iteration: int) -> None:
        """Save, or stage the state and fork a writer."""
        request = self._manager.save(self._wrap(dict(self.state)), iteration, self.is_async)
        if request is None:
            self.complete()
        else:
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Finish the save if both writers are done."""
        if self._queue.maybe_finalize_async_calls(blocking=False):
            self.complete()

    def load(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Load what the manager finds to be the latest."""
        if (found := self._manager.find_latest()) != iteration:
            raise LookupError(f"NVRx found iteration {found}, not {iteration}")
        loaded: State = self._manager.load()[0].state_dict
        return loaded

    def close(self) -> None:
        """Wait for the writer."""
        self._queue.close()


class NvrxAsync(NvrxSync):
    """The trainer makes a staging copy; a forked process writes it."""

    is_async = True


class NvrxAsyncReplicated(NvrxAsync):
    """As `NvrxAsync`; each rank also keeps the other's state."""

    complete_means = "RAM x 2"
    replicates = True


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
    "NVRx local, sync": NvrxSync,
    "NVRx local, async": NvrxAsync,
    "NVRx local, async, replicated": NvrxAsyncReplicated,
}
