"""CPU in the place of a GPU, so that stock Megatron runs on CPU and gloo.

Megatron asks for CUDA by name: ``device="cuda"``, ``tensor.cuda()``, streams, events, RNG states.
`install` answers these calls with the CPU. It replaces functions for the whole process, not for one
thread, and costs nothing on operations that name no device. Nothing here is used where there is a GPU.

Collectives that Megatron needs and gloo lacks are built from the ones that gloo has. gloo accepts split sizes
only as Python integers, and refuses gathers and reduce-scatters of pieces of unequal size, which the token
dispatcher needs with expert tensor parallelism. Here, unequal pieces are padded to the largest, exchanged,
and cut. gloo's point-to-point operations keep the first timeout of their group; here they follow
--distributed-timeout-seconds-after-init, as its collectives do.
"""

import argparse
import contextlib
import logging
import os
import resource
from collections.abc import Callable, Sequence
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnBackend
from torch.utils._device import _device_constructors

# Features that need a GPU.
CPU_DEFAULTS = {
    "distributed_backend": "gloo",
    "attention_backend": AttnBackend.unfused,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "num_workers": 0,  # they would take the cores that train
}
# Features that need the kernels of Transformer Engine or Apex; fused rope, those of the former.
UNFUSED_DEFAULTS = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
}
_CPU = torch.device("cpu")
_installed = False


def is_active() -> bool:
    """Return whether CUDA calls of this process are answered by the CPU."""
    return _installed


def install() -> None:
    """Answer the CUDA calls of this process with the CPU, permanently.

    Call it before Megatron's initialization; a second call does nothing. torch.compile looks for a GPU
    driver, so it is switched off in this process (on every thread) and its children.
    """
    global _installed
    if _installed:
        return
    _installed = True
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # for processes started from here
    torch.compiler.set_stance("force_eager")  # for functions that Megatron has already compiled
    _answer_device_names()
    _answer_cuda_module()
    _answer_rng()
    # Megatron looks these functions up in their modules at each call.
    _install_collectives()


def set_cpu_defaults(parser: argparse.ArgumentParser) -> None:
    """Turn off in Megatron's parser all that a CPU cannot do; flags can still turn it on."""
    parser.set_defaults(**UNFUSED_DEFAULTS, **CPU_DEFAULTS)


def memory_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _names_cuda(device: Any) -> bool:
    """Return whether a ``device`` argument means a GPU, as an index alone does."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _replace(owner: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)


def _with_cpu_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function: ``device=`` that names a GPU becomes the CPU, and nothing is pinned."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _answer_device_names() -> None:
    for constructor in _device_constructors():  # torch.empty, torch.zeros, ...
        if constructor == getattr(torch, constructor.__name__, None):
            _replace(torch, **{constructor.__name__: _with_cpu_device(constructor)})
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        _replace(torch.Tensor, **{name: _with_cpu_device(getattr(torch.Tensor, name))})
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original_to(tensor, *args, **kwargs)

    def tensor_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original_type(tensor, *args, **kwargs)
        # Optimizers compare the type's name with "torch.cuda.FloatTensor".
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    def same(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    _replace(torch.Tensor, to=to, type=tensor_type, cuda=same, pin_memory=same)
    _replace(torch.Tensor, record_stream=lambda tensor, stream: None)


class _Stream:
    """A stream whose work is always done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> "_Event":
        return _Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None: ...


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        return 0.0


class _DeviceProperties:
    """Properties of the oldest GPU that Megatron's feature checks accept."""

    name, major, minor, multi_processor_count, total_memory = "cpu", 8, 0, 1, 0


def _memory_stats(*_: Any) -> dict[str, int]:
    keys = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
    return {key: memory_bytes() for key in keys} | {"allocation.all.current": 0}


def _answer_cuda_module() -> None:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def rss_bytes(*args: Any, **kwargs: Any) -> int:
        return memory_bytes()

    stream = _Stream()
    _replace(
        torch.cuda,
        is_available=lambda: True,  # megatron.training.initialize insists on it
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=nothing,
        get_device_capability=lambda *args: (8, 0),
        get_device_properties=lambda *args: _DeviceProperties(),
        get_device_name=lambda *args: "cpu",
        Stream=_Stream,
        Event=_Event,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        set_stream=nothing,
        synchronize=nothing,
        is_current_stream_capturing=lambda: False,
        memory_allocated=rss_bytes,
        max_memory_allocated=rss_bytes,
        memory_reserved=rss_bytes,
        max_memory_reserved=rss_bytes,
        memory_stats=_memory_stats,
        empty_cache=nothing,
        reset_peak_memory_stats=nothing,
    )
    _replace(torch.cuda.nvtx, range_push=nothing, range_pop=nothing)
    # torch's optimizers check whether a CUDA graph is being captured.
    _replace(torch.optim.Optimizer, _accelerator_graph_capture_health_check=nothing)


def _answer_data_loaders() -> None:
    """Keep a DataLoader from pinning memory, and from advancing the generator, which is also the device's.

    A loader draws a seed when it is iterated. On a GPU, dropout would not notice. Here training would not
    continue with the RNG state of a checkpoint, which is loaded before the loaders are built.
    """
    original = torch.utils.data.DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        loader.pin_memory = False  # its thread asks the driver for a device
        state = torch.get_rng_state()
        iterator = original(loader)
        torch.set_rng_state(state)
        return iterator

    _replace(torch.utils.data.DataLoader, __iter__=iterate)


def _answer_rng() -> None:
    """Use one generator for CPU and CUDA; Megatron's tracker switches its state."""

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    # torch would note each seed, with the stack, for a device that is found later.
    for module in (torch.cuda, torch.xpu, torch.mtia):
        _replace(module, manual_seed_all=lambda seed: None)
    for module in (torch.cuda, torch.cuda.random):
        _replace(module, get_rng_state=get_state, set_rng_state=set_state, manual_seed=manual_seed)
    _replace(megatron_random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)
    _answer_data_loaders()
    # The tracker would warn at each use that the CPU's generator moves while it switches the device's.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: not record.getMessage().startswith("CPU RNG state changed")
    )


def _install_collectives() -> None:
    dist.all_to_all_single = _integer_splits(dist.all_to_all_single)
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)
    for name in ("isend", "irecv"):
        timed = _with_group_timeout(getattr(dist, name))
        # P2POp compares an operation with the one in the module that defines both.
        setattr(dist, name, timed)
        setattr(dist.distributed_c10d, name, timed)


def _integer_splits(all_to_all_single: Any) -> Any:
    def as_integers(sizes: Sequence[Any] | torch.Tensor | None) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    def call(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - the name is torch's
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        splits = as_integers(output_split_sizes), as_integers(input_split_sizes)
        return all_to_all_single(output, input, *splits, group=group, async_op=async_op)

    return call


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    padded = tensor.new_zeros((length, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded


def _uneven_all_gather(all_gather: Any) -> Any:
    def call(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({piece.shape for piece in tensor_list}) <= 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "Megatron waits for gathers of unequal pieces"
        longest = max(piece.shape[0] for piece in tensor_list)
        received = [_padded(piece, longest) for piece in tensor_list]
        all_gather(received, _padded(tensor, longest), group=group)
        for piece, padded in zip(tensor_list, received, strict=True):
            piece.copy_(padded[: piece.shape[0]])
        return None

    return call


def _uneven_reduce_scatter(reduce_scatter: Any) -> Any:
    def call(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({piece.shape for piece in input_list}) <= 1:
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        assert not async_op, "Megatron waits for reduce-scatters of unequal pieces"
        longest = max(piece.shape[0] for piece in input_list)
        received = _padded(output, longest)
        reduce_scatter(
            received, [_padded(piece, longest) for piece in input_list], op=op, group=group
        )
        output.copy_(received[: output.shape[0]])
        return None

    return call


class _TimedWork:
    """A running point-to-point operation whose `wait` gives up after the timeout of its group."""

    def __init__(self, work: Any, group: Any) -> None:
        self._work = work
        self._group = group

    def wait(self) -> Any:
        return self._work.wait(self._group._get_backend(torch.device("cpu")).options._timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _with_group_timeout(operation: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:  # the group always comes as a keyword
        work = operation(*args, **kwargs)
        return None if work is None else _TimedWork(work, kwargs.get("group") or dist.group.WORLD)

    return call
