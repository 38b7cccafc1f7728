"""Makes the next version of a replica: a peer repeats the owner's optimizer step on its own copy.

The step goes from one region to another, and from one slot of the pool to another, because the version before
must stay until all ranks have the next one. The operations are those of torch's Adam on a CPU in their
order, so the bits are the owner's too. What proves it are the checksums of the owner's index, which the
caller compares (engine/links/server.py). If the owner's optimizer rounds otherwise, as fused ones do, what
is made gets checksums of its own.

Source: MoEtion, Algorithm 3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import torch
import xxhash

from moe_ft.engine.memory.region_stores import ReplicaStore
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import check_found, checksum
from moe_ft.format.entries import TensorEntry, UnitEntry
from moe_ft.format.index import Index
from moe_ft.format.packings import Packing
from moe_ft.format.updates import AdamStep, Update

# Numbers in a block: with everything that a step reads and writes it fits into a core's cache. A pass over
# whole arrays takes twice as long.
BLOCK = 1 << 17
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_KEYS = ("param", "exp_avg", "exp_avg_sq")

Receive = Callable[[memoryview], None]  # fills a buffer with the next bytes
Parts = Mapping[
    str, memoryview
]  # memory of units in slots by their names, and the region as REGION
REGION = ""
_Places = dict[str, int]  # offsets in a part, by key of the tensor


class Repetition:
    """One step that is repeated from memory that holds the state before it.

    Raises CorruptStateError, before anything is received, if the two indexes or the update do not fit.
    """

    def __init__(self, update: Update, base: Index, index: Index) -> None:
        """Take what describes the state before the step, and the state after it."""
        self._update = update
        self._received = xxhash.xxh3_64()
        self._raw = torch.empty(4 * BLOCK, dtype=torch.uint8)
        self._gradient = torch.empty(BLOCK)
        self._denominator = torch.empty(BLOCK)
        _check_layouts(base, index, update)
        units = [unit for _, unit in index.entries() if not unit.file]
        end = max((unit.offset + unit.num_bytes for unit in units), default=0)
        self._ends = {REGION: max(end, index.header_bytes)}
        tensors = {place: (REGION, at) for place, at in _tensors(units)}
        for name in update.units:
            unit = index.units[name]
            self._ends[name] = unit.num_bytes
            tensors |= {place: (name, at - unit.offset) for place, at in _tensors([unit])}
        self._places: list[tuple[str, _Places]] = []
        for each in update.slices:
            found = {
                key: tensors.pop((each.parameter, each.start, each.end, key), None) for key in _KEYS
            }
            places = {key: at for key, at in found.items() if at is not None}
            if len(places) < len(_KEYS):
                raise CorruptStateError(
                    f"the replica has no fp32 state of {each.parameter}[{each.start}:{each.end}]"
                )
            part = places[_KEYS[0]][0]
            self._places.append((part, {key: at for key, (_, at) in places.items()}))

    def run(self, source: Parts, target: Parts, receive: Receive) -> None:
        """Fill memory from other memory and the gradients, which are received in their order.

        Args:
            target: without the units of which the version to be made is there already.
        """
        covered: dict[str, list[tuple[int, int]]] = {part: [] for part in self._ends}
        for each, (part, places) in zip(self._update.slices, self._places, strict=True):
            step, count = self._update.steps[each.step], each.end - each.start
            covered[part] += [(at, at + 4 * count) for at in places.values()]
            for first in range(0, count, BLOCK):
                num = min(BLOCK, count - first)
                gradient = self._receive(step, num, receive)
                if part not in target:
                    continue
                before, after = (
                    tuple(_numbers(memory[part], places[key] + 4 * first, num) for key in _KEYS)
                    for memory in (source, target)
                )
                repeat_step(before, gradient, after, step, self._denominator[:num])
        if self._update.is_lossy:
            check_found("gradients", self._received.hexdigest(), self._update.checksum)
        # The header, gaps, and what no step changes: all of it counts in checksums.
        for part, content in target.items():
            at, end = 0, self._ends[part]
            for start, after_it in [*sorted(covered[part]), (end, end)]:
                content[at:start] = source[part][at:start]
                at = after_it

    def _receive(self, step: AdamStep, num: int, receive: Receive) -> torch.Tensor:
        """Return the next gradients as the owner's optimizer gets them."""
        dtype, gradient = _DTYPES[step.dtype], self._gradient[:num]
        raw = self._raw[: num * dtype.itemsize]
        receive(memoryview(raw.numpy()))
        if self._update.is_lossy:
            self._received.update(raw.numpy())
        gradient.copy_(raw.view(dtype))
        for factor in step.factors:
            gradient.mul_(factor)
        return gradient


def begin_repetition(
    update: Update,
    num_bytes: int,
    memory: ReplicaStore,
    target: Region,
    index: Index,
) -> Callable[[Receive], Index]:
    """Return what makes the state of an index in a region and slots, of what memory holds and receives.

    It returns the index of what it has made. That is the same one, unless the step is lossy.

    Args:
        num_bytes: that are to be received.
        target: begun for this index, whose units have their places in the pool.

    Raises:
        CorruptStateError: if the state before is not here, or does not fit.
    """
    if update.num_bytes != num_bytes:
        raise CorruptStateError(
            f"{num_bytes} bytes of gradients, and an update of {update.num_bytes}"
        )
    region, base = memory.base(update.base_iteration, target)
    repetition = Repetition(update, base, index)
    source = {REGION: region.view, **_slots(memory, base, update.units)}
    new = [name for name in update.units if memory.is_filled(index.units[name])]
    made = {REGION: target.view, **_slots(memory, index, new)}

    def make(receive: Receive) -> Index:
        repetition.run(source, made, receive)
        return _with_own_checksums(base, index, target.view) if update.is_lossy else index

    return make


def _with_own_checksums(base: Index, index: Index, region: memoryview) -> Index:
    """Return an index that says of the units in a region what they have become, and after how many steps."""
    units = dict(index.units)
    for name, unit in index.units.items():
        found = checksum(region[unit.offset : unit.offset + unit.num_bytes])
        if not unit.file and found != unit.checksum:
            count = (base.units[name].num_repeated or 0) + 1
            units[name] = msgspec.structs.replace(unit, checksum=found, num_repeated=count)
    return msgspec.structs.replace(index, units=units)


def _slots(memory: ReplicaStore, index: Index, names: Iterable[str]) -> dict[str, memoryview]:
    """Return the memory of units in slots, by name."""
    units = {name: index.units[name] for name in names}
    pool = memory.pool
    return {
        name: pool.view[unit.offset : unit.offset + unit.num_bytes]
        for name, unit in units.items()
        if pool is not None
    }


Moments = tuple[torch.Tensor, ...]  # masters, first and second moments, flat


def repeat_step(
    before: Moments, gradient: torch.Tensor, after: Moments, step: AdamStep, scratch: torch.Tensor
) -> None:
    """Step from one state to another that lies elsewhere, with the operations of torch's Adam in their order.

    All arguments have the same length and are fp32. The gradient is changed.
    """
    (param, average, square), (new_param, new_average, new_square) = before, after
    if step.weight_decay != 0 and not step.is_decoupled:
        gradient.add_(param, alpha=step.weight_decay)
    torch.lerp(average, gradient, 1 - step.beta1, out=new_average)
    torch.mul(square, step.beta2, out=new_square)
    new_square.addcmul_(gradient, gradient, value=1 - step.beta2)
    torch.sqrt(new_square, out=scratch)
    scratch.div_((1 - step.beta2**step.number) ** 0.5).add_(step.eps)
    if step.weight_decay != 0 and step.is_decoupled:
        torch.mul(param, 1 - step.lr * step.weight_decay, out=new_param)
    else:
        new_param.copy_(param)
    new_param.addcdiv_(new_average, scratch, value=-(step.lr / (1 - step.beta1**step.number)))


def _numbers(region: memoryview, offset: int, count: int) -> torch.Tensor:
    return torch.frombuffer(region, dtype=torch.float32, count=count, offset=offset)


def _tensors(units: list[UnitEntry]) -> Iterator[tuple[tuple[str, int, int, str], int]]:
    """Yield parameter, range and key of every tensor that a step may change, and where it lies."""
    for unit in units:
        for tensor in unit.tensors:
            is_exact = tensor.dtype == "F32" and tensor.packing == Packing.EXACT
            if is_exact and not tensor.is_absent:
                place = (tensor.parameter, tensor.start, tensor.end, tensor.key)
                yield place, unit.offset + tensor.offset


def _check_layouts(base: Index, index: Index, update: Update) -> None:
    """Raise CorruptStateError unless what a step makes lies like what it begins with."""
    for name in update.units:
        before, unit = base.units.get(name), index.units.get(name)
        if before is None or unit is None or not before.file or not unit.file:
            raise CorruptStateError(f"unit {name}, which an update makes, has no slot")
        if before.iteration != update.base_iteration or before.tensors != unit.tensors:
            raise CorruptStateError(
                f"unit {name}, which an update makes, is here as of iteration {before.iteration}"
            )
    if _layout(base) != _layout(index):
        raise CorruptStateError(
            f"iteration {base.iteration} does not lie in its region as iteration {index.iteration} does"
        )


def _layout(
    index: Index,
) -> tuple[str, int, Mapping[str, tuple[int, int, tuple[TensorEntry, ...]]]]:
    units = {
        name: (unit.offset, unit.num_bytes, unit.tensors)
        for name, unit in index.units.items()
        if not unit.file
    }
    return index.header_checksum, index.window, units
