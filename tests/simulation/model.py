"""A small model that trains: every bit of its state depends on every bit of the state before.

It has what Megatron's models have and recovery depends on: units on pipeline stages, experts divided over
ranks, an optimizer whose state is divided over data-parallel ranks or held by each, weights in bf16, moments
that do not exist before the first step, a buffer, random numbers, a position in the data, learning rates,
and a gradient norm that couples all units. Only the arithmetic is made up. Activations go from stage to
stage and gradients back; each depends on what came before it, on all weights of the rank and on the data.
From what the ranks of a stage have computed, every gradient of the stage follows.
"""

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from moe_ft.format.entries import ParameterEntry
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import UnitId
from tests.simulation.optimizer import Optimizer, Scheduler, step_with_adam
from tests.simulation.shape import (
    Shape,
    Weight,
    constants_of,
    indices_of,
    moves,
    own_constants,
    weights_of,
)

TOKENS_PER_SAMPLE = 8
SAMPLES_PER_ITERATION = 4
NUM_MICROBATCHES = 2
CROSSING_SHAPE = (2, 1, 2)  # of a tensor that crosses a stage boundary: 16 bytes
_SKIPS_ONE_OF = 9
_MASK = (1 << 64) - 1
_NONE: dict[str, torch.Tensor] = {}


Counters = tuple[int, int, int, float]  # scheduler, data, optimizer, learning rate


class Held(NamedTuple):
    """Masters and moments that a rank has of one parameter, and where they are in the whole parameter."""

    weight: Weight
    indices: np.ndarray
    values: tuple[np.ndarray | None, ...]


class Export(NamedTuple):
    """State of a rank, but for random numbers and weights; biases by layer of the model."""

    held: list[Held]
    biases: dict[int, np.ndarray]
    counters: Counters


class Chunk(torch.nn.Module):
    """The model chunk of a rank; its weights are elsewhere, and its buffers, by own layer, are here.

    Attributes:
        sharded: describes all of it, as Megatron's modules do.
    """

    def __init__(self, bias: torch.Tensor, sync: Callable[[], None], *, is_sharded: bool) -> None:
        super().__init__()
        for number, each in enumerate(bias):
            self.register_buffer(f"expert_bias_{number}", each)
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=is_sharded)
        self.sharded: Callable[[], dict[str, ShardedTensor]] = dict
        self._sync = sync

    def sharded_state_dict(self, *, metadata: Any) -> dict[str, ShardedTensor]:
        """Return the places of parameters and buffers in the whole model."""
        return self.sharded()

    def start_param_sync(self, *, force_sync: bool) -> None:
        """Gather the weights of all slices. Called by all ranks of a stage."""
        self._sync()


class Model:
    """The state of one rank.

    Attributes:
        draws: state of the rank's random numbers.
        position: samples that the data iterator has read.
        ready: the inner optimizer's step, once gradients are ready.
        in_step: called in the middle of the outer one, and before weights are gathered.
        weights: all that this rank holds, bf16, flat.
    """

    def __init__(
        self, shape: Shape, rank: int, gather: Callable[[Any], list[Any]], first: str = ""
    ) -> None:
        """Begin as a fresh run does.

        Args:
            gather: exchanges values with the ranks of the stage.
            first: decides the first values.
        """
        self.shape, self.rank, self._gather = shape, rank, gather
        self.parts = weights_of(shape, rank)
        self.draws = xxhash.xxh64_intdigest(f"draws {rank} {first}".encode())
        self.position = 0
        self.ready: Callable[[], None] = lambda: None
        self.in_step: tuple[Callable[[], None], ...] = (lambda: None, lambda: None)
        num_own = sum(each.end - each.start for each in self.parts)
        self._flat = {key: torch.zeros(num_own) for key in ("param", "exp_avg", "exp_avg_sq")}
        self._arrays = {key: flat.numpy() for key, flat in self._flat.items()}
        sizes = (
            shape.stages,
            shape.dp,
            shape.tp,
            shape.ep,
        )  # Megatron's first weights depend on these
        factor = 1.0 + (xxhash.xxh32_intdigest(f"{first} {sizes}".encode()) % 1000) / 1000
        self._arrays["param"][:] = own_constants(shape, rank)[0] * np.float32(factor)
        self.weights = torch.cat(
            [torch.from_numpy(constants_of(w)[0] * np.float32(factor)) for w in self.parts]
        ).to(torch.bfloat16)
        self._weight_bytes = self.weights.view(torch.uint8).numpy()
        self.bias = torch.zeros(shape.layers, shape.experts)
        masters = [self._view("param", each) for each in self.parts]
        self._moments = [
            {key: self._view(key, each) for key in ("exp_avg", "exp_avg_sq")} for each in self.parts
        ]
        self.inner = Optimizer(masters, self.refresh, is_adam=shape.is_followed)
        self.inner.optimizer.step = lambda: self.ready()
        self.optimizer = SimpleNamespace(chained_optimizers=[self.inner])
        self.optimizer.step_with_ready_grads = self._step_with_ready_grads
        self.scheduler = Scheduler(self.inner.optimizer)
        self.chunk = Chunk(self.bias, self.sync, is_sharded=shape.is_sharded)
        self.chunk.sharded = self._sharded
        self._live = [
            torch.nn.Parameter(
                self.weights[each.at : each.at + each.size].view(each.extent), requires_grad=False
            )
            for each in self.parts
        ]
        self.grad_norm: float | None = None
        self.tokens = torch.zeros(shape.layers, shape.experts, dtype=torch.int64)

    @property
    def built(self) -> tuple[Any, Any, Any]:
        """Model, optimizer and scheduler, as Megatron's `setup_model_and_optimizer` returns them."""
        return [self.chunk], self.optimizer, self.scheduler

    @property
    def group(self) -> dict[str, Any]:
        """The optimizer's only parameter group."""
        group: dict[str, Any] = self.inner.optimizer.param_groups[0]
        return group

    def _view(self, key: str, part: Weight) -> torch.Tensor:
        return self._flat[key][part.own_at : part.own_at + part.end - part.start]

    def local_parameters(
        self, assign_slices: Callable[[Sequence[int], int], list[list[tuple[int, int]]]]
    ) -> list[LocalParameter]:
        places, slices = self.shape.places(self.rank), {}
        for is_expert, place in ((False, places.dp), (True, places.expt_dp)):
            shared = [each for each in self.parts if each.is_expert == is_expert]
            own = assign_slices([each.size for each in shared], place.size)[place.rank]
            slices.update({each.name: slice_ for each, slice_ in zip(shared, own, strict=True)})
        found = []
        for part, live, master in zip(self.parts, self._live, self.group["params"], strict=True):
            start, end = (part.start, part.end) if self.shape.is_sharded else slices[part.name]
            found.append(
                LocalParameter(
                    unit=part.unit,
                    name=part.name,
                    entry=ParameterEntry(shape=part.extent),
                    parameter=live,
                    start=start,
                    end=end,
                    optimizer=self.inner,
                    master=master,
                    is_sharded=self.shape.is_sharded,
                    is_expert=part.is_expert,
                )
            )
        return found

    def _sharded(self) -> dict[str, ShardedTensor]:
        """Return the places of this rank's parameters and buffers; experts are stacked in their layer."""
        found = {}
        for part, live in zip(self.parts, self._live, strict=True):
            key, whole, offset = part.name, part.whole, part.offset
            if part.is_expert:
                key = f"layer {part.unit.layer}, experts"
                whole, offset = (self.shape.experts, *whole), (part.unit.expert, *offset)
            found[part.name] = _placed(key, live, whole, offset)
        first = self.shape.stage_of(self.rank) * self.shape.layers
        for number, (name, buffer) in enumerate(self.chunk.named_buffers()):
            key = f"layer {first + number}, bias"
            found[name] = _placed(key, buffer, tuple(buffer.shape), (0,))
        return found

    def refresh(self) -> None:
        """Make this rank's slices of the weights from its masters."""
        sources, targets = moves(self.shape, self.rank, self.rank)
        self.weights[targets] = self._flat["param"].to(torch.bfloat16)[sources]

    def own_weights(self) -> bytes:
        sources, targets = moves(self.shape, self.rank, self.rank)
        own = torch.empty(len(self._flat["param"]), dtype=torch.bfloat16)
        own[sources] = self.weights[targets]
        return own.view(torch.uint8).numpy().tobytes()

    def sync(self) -> None:
        """Get the other slices of the weights. Called by all ranks of a stage."""
        if not self.shape.is_sharded or self.shape.width == 1:
            return
        everyone = self._gather(self.own_weights())
        for source, content in zip(
            self.shape.ranks_of(self.shape.stage_of(self.rank)), everyone, strict=True
        ):
            if source != self.rank and content:
                theirs = torch.frombuffer(bytearray(content), dtype=torch.bfloat16)
                taken, placed = moves(self.shape, source, self.rank)
                self.weights[placed] = theirs[taken]

    # One iteration

    def begin_pass(self) -> None:
        self.draws = (self.draws * 6364136223846793005 + 1442695040888963407) & _MASK
        self._read = xxhash.xxh3_128(self._weight_bytes)
        self._read.update(self.bias.numpy())
        self._read.update(struct.pack("<QQ", self.draws, self.position))
        self.position += SAMPLES_PER_ITERATION
        self._pass: list[bytes] = []

    def compute(self, received: bytes) -> bytes:
        """Return what a micro-batch makes of an activation or a gradient; the ends receive none."""
        computed = self._read.copy()
        for each in self._pass:
            computed.update(each)
        computed.update(received)
        self._pass.append(computed.digest())
        return self._pass[-1]

    def share(self) -> bytes:
        """Return this rank's share of the gradients of its stage."""
        return b"".join(self._pass[-NUM_MICROBATCHES:])

    def total_norm(self, shares: Sequence[bytes]) -> float:
        return xxhash.xxh3_64_intdigest(b"".join(shares)) % 10_000 / 10_000

    def norm_share(self) -> bytes:
        """Return this rank's share of the norm, for which units that are frozen lack what is needed."""
        self._adopt()
        share = xxhash.xxh3_64(self._arrays["exp_avg"])
        share.update(self._arrays["param"])
        return share.digest()

    def reduce(self, shares: Sequence[bytes]) -> int:
        """Take the shares of all ranks of the stage; return the number that its gradients follow from."""
        signal = xxhash.xxh3_64_intdigest(b"".join(shares))
        generator = np.random.default_rng(signal ^ self.rank)
        shape, count = self.shape, SAMPLES_PER_ITERATION * TOKENS_PER_SAMPLE
        tokens = generator.multinomial(
            count // shape.width, [1 / shape.experts] * shape.experts, shape.layers
        )
        self.tokens = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
        # The bias follows from the tokens of the whole stage, which each rank can work out.
        bits = np.frombuffer(xxhash.xxh3_128_digest(struct.pack("<Q", signal)), dtype=np.uint8)
        pushed = torch.from_numpy(np.resize(bits, self.bias.shape).astype(np.float32))
        self.bias += (pushed - 128) / 4096
        return signal

    def is_skipped(self, shares: Sequence[bytes]) -> bool:
        return self.shape.skips and xxhash.xxh3_64_intdigest(b"".join(shares)) % _SKIPS_ONE_OF == 0

    def step(self, signal: int, grad_norm: float, frozen: Collection[UnitId] = ()) -> None:
        """Make the optimizer's step, and leave frozen units as they are."""
        self._adopt(frozen, creates=True)
        self.group["step"] += 1
        if self.shape.is_followed:
            self._step_with_adam(signal, grad_norm, frozen)
            return
        _, first, second = own_constants(self.shape, self.rank)
        factors = [((signal >> shift) & 0xFFFF) / 65536 - 0.5 for shift in (0, 16)]
        rate = np.float32(self.group["lr"] / (1 + 0.001 * self.group["step"]))
        for low, high in self._active(frozen):
            gradient = first[low:high] * np.float32(factors[0])
            gradient += second[low:high] * np.float32(factors[1])
            gradient /= np.float32(1 + grad_norm)
            average, square = self._arrays["exp_avg"], self._arrays["exp_avg_sq"]
            average[low:high] = average[low:high] * np.float32(0.9) + gradient * np.float32(0.1)
            square[low:high] = square[low:high] * np.float32(0.99) + gradient**2
            moved = average[low:high] / (np.sqrt(square[low:high]) + np.float32(1e-3))
            self._arrays["param"][low:high] -= rate * moved

    def set_gradients(self, signal: int, grad_norm: float) -> None:
        """Have the gradients where the optimizer finds them, before it steps."""
        if not self.shape.is_followed:
            return
        _, first, second = own_constants(self.shape, self.rank)
        factors = [((signal >> shift) & 0xFFFF) / 65536 - 0.5 for shift in (0, 16)]
        gradient = first * np.float32(factors[0]) + second * np.float32(factors[1])
        flat = torch.from_numpy(gradient / np.float32(1 + grad_norm))
        for part, master in zip(self.parts, self.group["params"], strict=True):
            master.grad = flat[part.own_at : part.own_at + part.end - part.start]

    def _step_with_adam(self, signal: int, grad_norm: float, frozen: Collection[UnitId]) -> None:
        self.set_gradients(signal, grad_norm)
        group, state = self.group, self.inner.optimizer.state
        own = [
            (master, state[master])
            for part, master in zip(self.parts, group["params"], strict=True)
            if part.unit not in frozen
        ]
        step_with_adam(own, group)

    def _step_with_ready_grads(self) -> None:
        """Step, and make all weights of the rank from the new masters. Called by all ranks of a stage."""
        between, before_gathering = self.in_step
        self.inner.optimizer.step()
        between()
        self.inner._copy_main_params_to_model_params()
        before_gathering()
        self.sync()

    def _active(self, frozen: Collection[UnitId]) -> list[tuple[int, int]]:
        if not frozen:
            return [(0, len(self._flat["param"]))]
        return [
            (each.own_at, each.own_at + each.end - each.start)
            for each in self.parts
            if each.unit not in frozen
        ]

    def _adopt(self, frozen: Collection[UnitId] = (), *, creates: bool = False) -> None:
        """Have the moments in one row again, where a restore may have made others."""
        state = self.inner.optimizer.state
        for part, master, views in zip(
            self.parts, self.group["params"], self._moments, strict=True
        ):
            if frozen and part.unit in frozen:
                continue
            own = state[master] if creates else state.get(master, _NONE)
            for key, view in views.items():
                found = own.get(key)
                if found is view:
                    continue
                if found is None:
                    view.zero_()
                else:
                    view.copy_(found)
                if found is not None or creates:
                    own[key] = view

    # The whole state

    def digest(self, *, leaves_out_experts: bool = False) -> str:
        """Return a checksum of everything, or of everything but the experts."""
        state = xxhash.xxh3_128(b"" if leaves_out_experts else self._weight_bytes)
        self._adopt()
        for part, master in zip(self.parts, self.group["params"], strict=True):
            if part.start == part.end or (leaves_out_experts and part.is_expert):
                continue
            own = self.inner.optimizer.state.get(master, _NONE)
            state.update(bytes(key in own for key in self._arrays))
            if leaves_out_experts:
                for array in self._arrays.values():
                    state.update(array[part.own_at : part.own_at + part.end - part.start])
        if not leaves_out_experts:
            for array in self._arrays.values():
                state.update(array)
        state.update(self.bias.numpy())
        values = (self.draws, self.position, self.scheduler.num_steps, self.group["step"])
        state.update(struct.pack("<4Qd", *values, self.group["lr"]))
        return str(state.hexdigest())

    def export(self) -> Export:
        """Return a copy of this rank's state, with its places in the whole model."""
        self._adopt()
        held = []
        for part, master in zip(self.parts, self.group["params"], strict=True):
            if part.start == part.end:
                continue
            own = {"param": master, **self.inner.optimizer.state.get(master, _NONE)}
            place = slice(part.own_at, part.own_at + part.end - part.start)
            values = tuple(
                array[place].copy() if key in own else None for key, array in self._arrays.items()
            )
            held.append(Held(part, indices_of(part)[part.start : part.end], values))
        first = self.shape.stage_of(self.rank) * self.shape.layers
        biases = {layer: each.numpy().copy() for layer, each in enumerate(self.bias, first)}
        counters = self.scheduler.num_steps, self.position, self.group["step"], self.group["lr"]
        return Export(held, biases, counters)

    def begin_with(
        self,
        values: Mapping[str, tuple[np.ndarray | None, ...]],
        biases: Mapping[int, np.ndarray],
        counters: Counters,
        draws: int,
    ) -> None:
        """Have this rank's part of a whole state; `sync` then has to get the weights of others."""
        self.scheduler.num_steps, self.position, self.group["step"], self.group["lr"] = counters
        self.draws = draws
        first = self.shape.stage_of(self.rank) * self.shape.layers
        for layer, each in enumerate(self.bias, first):
            each.copy_(torch.from_numpy(biases[layer]))
        for part, master, views in zip(
            self.parts, self.group["params"], self._moments, strict=True
        ):
            own = indices_of(part)[part.start : part.end]
            for view, whole in zip((master, *views.values()), values[part.name], strict=True):
                if whole is not None:
                    view.copy_(torch.from_numpy(whole[own]))
            if values[part.name][1] is not None:
                self.inner.optimizer.state[master] = dict(views)
        self.refresh()


def _placed(
    key: str, tensor: torch.Tensor, whole: tuple[int, ...], offset: tuple[int, ...]
) -> ShardedTensor:
    stacked = len(whole) - tensor.dim()
    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=tuple(tensor.shape),
        global_shape=whole,
        global_offset=offset,
        axis_fragmentations=None,
        prepend_axis_num=stacked,
    )
