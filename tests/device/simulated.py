"""Simulated jobs whose ranks have their state on late devices.

Each simulated process has a device of its own, which a kill ends with everything that is queued. What the
model computes on the host appears on the device when a kernel has run, and is poison before. Of the product's
GPU code everything in moe_ft runs, with the torch reference in the place of kernels. Ranks leave as on a CPU:
nothing is aborted.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, override
from unittest import mock

import numpy as np
import torch

from moe_ft.engine.snapshots.staging import Staging
from moe_ft.format import encoding
from moe_ft.kernels.pack_table import PackTable
from moe_ft.kernels.packing import Segment, pack_by_reference, unpack_by_reference
from moe_ft.loop.leaving import BreakpointWriter
from tests.device.queues import Device, Event, Stream, poison, span_of
from tests.device.tensors import CUDA, LateTensor, content_of, new, on_device
from tests.simulation import collectives, training
from tests.simulation.active import Patches, World
from tests.simulation.model import Model
from tests.simulation.training import RouterLoad, SimulatedLoop

_WAITS_S = (
    0.005,
    0.2,
)  # longest ones, virtual, of a host thread for its device; an iteration takes 0.05
_COLLECTIVES = ("broadcast", "all_reduce")
_CHUNK_BYTES = 256  # so that a small model is packed in many chunks


@dataclass
class Devices:
    """The devices of a simulation, in the order of their first use.

    Attributes:
        has_buffers: whether anything but weights and moments is on a device. Where nothing is, taking a
            record waits for no copy.
        refuses_pins: whether no memory of the host can be registered.
    """

    seed: int
    refuses_pins: bool = False
    all: list[Device] = field(default_factory=list)

    @property
    def has_buffers(self) -> bool:
        return self.seed % 2 == 1

    @property
    def conflicts(self) -> list[str]:
        return [each for device in self.all for each in device.conflicts]

    def of(self, world: World) -> Device:
        """Return the device of the process that runs."""
        kernel, local = world.kernel, world.process.local

        def pause() -> None:
            kernel.event("wait for the device")
            kernel.sleep(kernel.random.uniform(0.0, kernel.random.choice(_WAITS_S)))

        if "device" not in local:
            seed = f"{self.seed} {len(self.all)}"
            local["device"] = Device(seed, lambda: kernel.running, pause)
            self.all.append(local["device"])
        found: Device = local["device"]
        return found


class DeviceModel(Model):
    """The simulated model with its state on a device. Its arithmetic is that of kernels."""

    def __init__(self, device: Device, *args: Any, has_buffers: bool) -> None:
        self._device, self._is_running = device, False
        super().__init__(*args)
        memory = {**self._flat, "weights": self.weights}
        if has_buffers:
            memory["bias"] = self.bias
        self._on_device = {key: on_device(device, each) for key, each in memory.items()}
        self._moments = [
            {key: self._late_view(key, each) for key in ("exp_avg", "exp_avg_sq")}
            for each in self.parts
        ]
        self.group["params"] = [self._late_view("param", each) for each in self.parts]
        weights = self._on_device["weights"]
        self._live = [
            torch.nn.Parameter(
                weights[each.at : each.at + each.size].view(each.extent), requires_grad=False
            )
            for each in self.parts
        ]
        if has_buffers:
            for number in range(len(self.bias)):
                self.chunk._buffers[f"expert_bias_{number}"] = self._on_device["bias"][number]

    def _late_view(self, key: str, part: Any) -> torch.Tensor:
        return self._on_device[key][part.own_at : part.own_at + part.end - part.start]

    @contextmanager
    def _running(self, *writes: str) -> Iterator[None]:
        """Do at once what kernels do later: what they write appears when another one has run."""
        if self._is_running:
            yield
            return
        self._device.run(self._device.default.last)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
        if writes:
            found = [self._on_device.get(key) for key in writes]
            self._postpone([each.content for each in found if each is not None])

    def _postpone(self, memory: Sequence[torch.Tensor]) -> None:
        results = [each.clone() for each in memory]
        spans = [span_of(each) for each in memory]
        self._device.note_write("training", spans)

        def appear() -> None:
            for target, result in zip(memory, results, strict=True):
                target.copy_(result)

        for each in memory:
            poison(each)
        self._device.queue("training", appear, writes=spans, stream=self._device.default)

    @override
    def refresh(self) -> None:
        with self._running("weights"):
            super().refresh()

    @override
    def sync(self) -> None:
        with self._running("weights"):
            super().sync()

    @override
    def begin_pass(self) -> None:
        with self._running():
            super().begin_pass()

    @override
    def norm_share(self) -> bytes:
        with self._running():
            return super().norm_share()

    @override
    def reduce(self, shares: Sequence[bytes]) -> int:
        with self._running("bias"):
            return super().reduce(shares)

    @override
    def step(self, signal: int, grad_norm: float, frozen: Any = ()) -> None:
        with self._running("param", "exp_avg", "exp_avg_sq"):
            super().step(signal, grad_norm, frozen)

    @override
    def _adopt(self, frozen: Any = (), *, creates: bool = False) -> None:
        super()._adopt(frozen, creates=creates)
        self._device.run(self._device.default.last)

    @override
    def digest(self, *, leaves_out_experts: bool = False) -> str:
        with self._running():
            return super().digest(leaves_out_experts=leaves_out_experts)


class ReferenceTable:
    """The torch reference as a kernel, in the place of moe_ft/kernels/triton_packing.py."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = [
            replace(
                each,
                tensor=content_of(each.tensor),
                weights=None if each.weights is None else content_of(each.weights),
            )
            for each in segments
        ]
        self._tensors = [span_of(each.tensor) for each in self._segments]
        self._weights = [span_of(e.weights) for e in self._segments if e.weights is not None]

    def pack(self, buffer: LateTensor) -> torch.Tensor:
        """Queue the kernel that packs."""
        device, target = buffer.memory.device, buffer.content
        counts = on_device(device, torch.full((len(self._segments),), -1, dtype=torch.int64))
        found = counts.content

        def pack() -> None:
            found.copy_(pack_by_reference(self._segments, target))

        device.queue(
            "pack",
            pack,
            reads=[*self._tensors, *self._weights],
            writes=[span_of(target), span_of(found)],
        )
        return counts

    def unpack(self, buffer: LateTensor) -> None:
        """Queue the kernel that unpacks."""
        source = buffer.content
        buffer.memory.device.queue(
            "unpack",
            lambda: unpack_by_reference(self._segments, source),
            reads=[span_of(source), *self._weights],
            writes=self._tensors,
        )


@contextmanager
def late_devices(seed: int, *, refuses_pins: bool = False) -> Iterator[Devices]:
    """Put late devices into a simulation that is installed already."""
    devices, patches = Devices(seed, refuses_pins), Patches()
    try:
        _install_cuda(devices, patches)
        _install_model(devices, patches)
        late = {name: partial(_collective, collectives._SIMULATED[name]) for name in _COLLECTIVES}
        with mock.patch.dict(collectives._SIMULATED, late):
            yield devices
    finally:
        patches.restore()


def _collective(act: Callable[..., None], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Run a collective on what is on the device: the host waits, so lateness of NCCL is not in this."""
    if not isinstance(tensor, LateTensor):
        act(tensor, *args, **kwargs)
        return
    numbers = tensor.to("cpu")
    act(numbers, *args, **kwargs)
    tensor.copy_(numbers)


def _install_cuda(devices: Devices, patches: Patches) -> None:
    of = devices.of
    patches.divert(torch.cuda, "Stream", lambda world, *_: Stream(of(world)))
    patches.divert(torch.cuda, "Event", lambda world, **_: Event(of(world)))
    patches.divert(torch.cuda, "stream", lambda world, stream: of(world).using(stream))
    patches.divert(torch.cuda, "is_initialized", lambda world: True)
    patches.divert(torch.cuda, "current_device", lambda world: 0)
    patches.divert(torch.cuda, "set_device", lambda world, _: of(world).set_current())
    patches.divert(torch.cuda, "current_stream", lambda world, *_: of(world).current)
    patches.divert(torch.cuda, "synchronize", lambda world, *_: of(world).synchronize())
    patches.divert(torch.cuda, "cudart", lambda world: _Runtime(of(world), devices.refuses_pins))
    for name in ("zeros", "tensor"):
        patches.divert(torch, name, partial(_make, devices, getattr(torch, name)))

    def to(world: World, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and args[0] == CUDA:
            return new(of(world), tensor)
        return torch._C.TensorBase.to(tensor, *args, **kwargs)

    patches.divert(torch.Tensor, "to", to)
    _watch_checksums(devices, patches)
    patches.set(PackTable, "_kernel_table", _reference_table)


def _make(
    devices: Devices,
    plain: Callable[..., torch.Tensor],
    world: World,
    *args: Any,
    device: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    made = plain(*args, **kwargs)
    return new(devices.of(world), made) if device == CUDA else made


def _watch_checksums(devices: Devices, patches: Patches) -> None:
    """Have a checksum note that it reads what a copy has not written yet."""
    checksum = encoding.checksum

    def watched(world: World, data: Any) -> str:
        if len(data):
            first = np.frombuffer(data, np.uint8).ctypes.data
            devices.of(world).note_host_read((first, first + len(data)))
        return checksum(data)

    for module in [*sys.modules.values()]:
        if getattr(module, "checksum", None) is checksum and module is not encoding:
            patches.divert(module, "checksum", watched)


def _reference_table(table: Any) -> ReferenceTable:
    table._on_device = table._on_device or ReferenceTable(table.segments)
    found: ReferenceTable = table._on_device
    return found


class _Runtime:
    """The calls of `torch.cuda.cudart()` that the product makes."""

    def __init__(self, device: Device, refuses_pins: bool) -> None:  # noqa: FBT001
        self._device = device
        self._refuses = refuses_pins

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error} of the device"

    def cudaHostRegister(self, first: int, num_bytes: int, _: int) -> int:  # noqa: N802
        if self._refuses:
            return 1
        self._device.pin(first, num_bytes)
        return 0

    def cudaHostUnregister(self, first: int) -> None:  # noqa: N802
        self._device.unpin(first)


def _install_model(devices: Devices, patches: Patches) -> None:
    def model(world: World, *args: Any) -> Model:
        device = devices.of(world)
        device.set_current()  # a thread that serves peers may have been the first to read memory
        return DeviceModel(device, *args, has_buffers=devices.has_buffers)

    patches.divert(training, "Model", model)
    counts = RouterLoad.counts

    def late_counts(world: World, load: RouterLoad) -> dict[str, Any]:
        found = counts(load)
        if not devices.has_buffers:
            return found
        return {name: new(devices.of(world), each) for name, each in found.items()}

    patches.divert(RouterLoad, "counts", late_counts)
    recording = SimulatedLoop.recording

    def record_late(world: World, loop: SimulatedLoop, record: Callable[..., None]) -> Any:
        def late(neighbour: int, direction: Any, tensor: torch.Tensor) -> None:
            # Megatron frees it as soon as it was sent.
            record(neighbour, direction, new(devices.of(world), tensor))

        return recording(loop, late)

    patches.divert(SimulatedLoop, "recording", record_late)
    use = BreakpointWriter.use

    def use_as_on_cpu(self: BreakpointWriter, *args: Any, **kwargs: Any) -> None:
        use(self, *args, **{**kwargs, "is_on_gpu": False})

    patches.set(BreakpointWriter, "use", use_as_on_cpu)
    make = Staging.__init__

    def make_small(self: Staging, *args: Any) -> None:
        make(self, *args)
        self.chunk_bytes = min(self.chunk_bytes, _CHUNK_BYTES)

    patches.set(Staging, "__init__", make_small)
