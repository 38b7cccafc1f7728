"""Stand-ins for what parks optimizer state on the host between steps, on Megatron's dev branch.

Names, signatures and moments of copies are those of Megatron-LM's source: the classes of these names in its
optimizers' folder of offloading, the first on dev before 9050d4c5fb, the second at d48bd6be0a. Here host and
device are the same memory, so what holds no state for a while is overwritten: numbers that are read there end
up in the digests. Transfers are complete at once; orders of streams are in tests/device.
"""

import functools
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import training

import pretrain_gpt_moe

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Stream:
    """A stream that counts who waited for it on the host."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1

    def wait_stream(self, other: Any) -> None: ...


class OptimizerStateOffloader:
    """Copies state to buffers when an iteration begins, frees it, and copies it back before the step."""

    def __init__(self, distrib_optimizer: Any) -> None:
        self.dist_optimizer = distrib_optimizer
        self.adam_optimizer = distrib_optimizer.optimizer
        self._d2h_stream, self._h2d_stream = Stream(), Stream()
        self._opt_state_cpu_buffers: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._shard_fp32_from_float16_cpu_buffers: list[list[torch.Tensor]] = []
        self._offloaded = False
        self._offloaded_state_keys: tuple[str, ...] = ()
        self._offloaded_mcore_master_weights = False
        self._optimizer_states_initialized = False
        self.num_copied = 0

    def mark_optimizer_states_initialized(self) -> None:
        self._optimizer_states_initialized = True

    def offload(
        self, offload_optimizer_states: bool = True, offload_master_weights: bool = True
    ) -> None:
        keys = _MOMENTS if self._optimizer_states_initialized else ()
        self._offloaded_state_keys = keys
        for parameter, state in self.adam_optimizer.state.items():
            for key in set(keys) & set(state):
                buffers = self._opt_state_cpu_buffers.setdefault(parameter, {})
                self._copy(buffers.setdefault(key, torch.empty_like(state[key])), state[key])
        groups = self.dist_optimizer.shard_fp32_from_float16_groups
        if not self._shard_fp32_from_float16_cpu_buffers:
            self._shard_fp32_from_float16_cpu_buffers = [
                [torch.empty_like(each) for each in group] for group in groups
            ]
        for master, buffer in self._masters():
            self._copy(buffer, master)
        self._offloaded_mcore_master_weights = self._offloaded = True

    def _copy(self, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
        assert tensor.untyped_storage().size(), "what is freed cannot be copied"
        buffer.copy_(tensor.detach())
        self.num_copied += 1

    def _masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        groups = self.dist_optimizer.shard_fp32_from_float16_groups
        pairs = zip(groups, self._shard_fp32_from_float16_cpu_buffers, strict=False)
        return [each for one, other in pairs for each in zip(one, other, strict=True)]

    def _parked(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        states = self.adam_optimizer.state
        return [
            *(self._masters() if self._offloaded_mcore_master_weights else ()),
            *(
                (states[parameter][key], buffer)
                for parameter, buffers in self._opt_state_cpu_buffers.items()
                for key, buffer in buffers.items()
                if key in self._offloaded_state_keys and parameter in states
            ),
        ]

    def release_gpu_memory(self) -> None:
        for tensor, _ in self._parked() if self._offloaded else ():
            tensor.untyped_storage().resize_(0)

    def reload(self) -> None:
        if not self._offloaded:
            return
        for tensor, buffer in self._parked():
            tensor.untyped_storage().resize_(buffer.untyped_storage().size())
            tensor.data.copy_(buffer)
        self._offloaded_state_keys = ()
        self._offloaded_mcore_master_weights = self._offloaded = False

    def sync_before_step(self) -> None: ...


class ChunkedOptimizerStateOffloader:
    """Lets the optimizer refer to tensors on the host between steps."""

    def __init__(self, optimizer: Any, master_params: list[torch.Tensor]) -> None:
        self.optimizer, self._master_params = optimizer, master_params
        self._cpu_state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._on_host: set[int] = set()  # addresses
        self._streams = Stream(), Stream()

    @property
    def transfer_streams(self) -> tuple[Stream, Stream]:
        return self._streams

    def offload_for_forward(self, offload_master: bool = True) -> None:
        for parameter, state in self.optimizer.state.items():
            for key in _MOMENTS:
                if key in state and not self._is_on_host(state[key]):
                    known = self._cpu_state.setdefault(parameter, {})
                    state[key] = known[key] = self._moved(state[key])
        for master in self._master_params if offload_master else ():
            if not self._is_on_host(master):
                master.data = self._moved(master.data)

    def prefetch_for_step(self) -> None:
        for master in self._master_params:
            if self._is_on_host(master):
                self._on_host.remove(master.data_ptr())
                master.data = _emptied(master.data)
        for parameter, known in self._cpu_state.items():
            state = self.optimizer.state.get(parameter, {})
            for key in known:
                if key in state and self._is_on_host(state[key]):
                    assert state[key] is known[key], "it was replaced"
                    self._on_host.remove(state[key].data_ptr())
                    state[key] = _emptied(state[key])

    def step(self) -> None:
        self.prefetch_for_step()
        for state in self.optimizer.state.values():
            assert not any(self._is_on_host(state[key]) for key in _MOMENTS)
        self.optimizer.step()
        self.offload_for_forward(offload_master=False)

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._on_host

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        found = _emptied(tensor)
        self._on_host.add(found.data_ptr())
        return found


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, and overwrite what was copied."""
    found = tensor.detach().clone()
    tensor.detach().fill_(float("nan"))
    return found


class _Stepping:
    """An optimizer whose steps are made by its offloader."""

    def __init__(self, optimizer: Any, offloader: ChunkedOptimizerStateOffloader) -> None:
        self._optimizer, self.step = optimizer, offloader.step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def train_parked(flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py with state in buffers between steps."""
    _train(flags, "_state_offloader", OptimizerStateOffloader, _park_in_buffers)


def train_chunked(flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py with state on the host between steps."""

    def make(optimizer: Any) -> ChunkedOptimizerStateOffloader:
        groups = optimizer.shard_fp32_from_float16_groups
        masters = [each for group in groups for each in group]
        return ChunkedOptimizerStateOffloader(optimizer.optimizer, masters)

    _train(flags, "_optimizer_state_offloader", make, _park_in_chunks)


def _park_in_buffers(offloader: OptimizerStateOffloader) -> Any:
    offloader.offload()
    offloader.release_gpu_memory()
    return offloader.reload


def _park_in_chunks(offloader: ChunkedOptimizerStateOffloader) -> Any:
    offloader.offload_for_forward()
    return offloader.prefetch_for_step


def _train(flags: list[str], name: str, make: Any, park: Any) -> None:
    """Make an offloader with each optimizer, and use it as dev's train_step and optimizers do."""
    build, step = DistributedOptimizer.__init__, DistributedOptimizer.step_with_ready_grads
    run = training.train_step

    @functools.wraps(build)
    def with_offloader(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        build(optimizer, *args, **kwargs)
        if not optimizer.is_stub_optimizer:
            setattr(optimizer, name, make(optimizer))

    def with_ready_state(optimizer: Any) -> bool:
        offloader = getattr(optimizer, name)
        if name == "_state_offloader":
            offloader.sync_before_step()
            has_stepped = step(optimizer)
            offloader.mark_optimizer_states_initialized()
            return bool(has_stepped)
        with mock.patch.object(optimizer, "optimizer", _Stepping(optimizer.optimizer, offloader)):
            return bool(step(optimizer))

    @functools.wraps(run)
    def train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        back = [park(getattr(each, name)) for each in optimizer.chained_optimizers]
        known = config.finalize_model_grads_func or finalize_model_grads
        finalize = getattr(known, "original", known)

        def with_reload(*of_grads: Any, **others: Any) -> Any:
            for each in back:
                each()
            return finalize(*of_grads, **others)

        with_reload.original = finalize  # type: ignore[attr-defined]
        config.finalize_model_grads_func = with_reload
        arguments = (forward_step_func, data_iterator, model, optimizer, opt_param_scheduler)
        return run(*arguments, config, *args, **kwargs)

    DistributedOptimizer.__init__ = with_offloader
    DistributedOptimizer.step_with_ready_grads = with_ready_state
    training.train_step = train_step
    pretrain_gpt_moe.main(flags)
