"""Triton kernels that pack and unpack as kernels/packing.py defines, all segments in one launch.

One program handles one tile: 8 KiB of the buffer, however many numbers that is. One table maps tiles to
segments, another describes the segments.

Rounding and scaling are done in integers, to the bits of kernels/number_formats.py. Integers give the same
bits on every GPU; hardware casts need not. A format is given as five numbers at run time, so that one launch
can pack in several formats: exponent bits, mantissa bits, largest code, and the codes of infinity and NaN.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from moe_ft.kernels.number_formats import FORMAT_OF, FP32, NumberFormat
from moe_ft.kernels.packing import Segment, Way

TILE_BYTES = 8192  # in the buffer
NUM_WARPS = 8
MOST_REGISTERS = 128  # per thread: two programs at a time on a multiprocessor, and hardly a spill
_HALVES = tl.constexpr(TILE_BYTES // 4)  # int32 of a tile in the buffer
_AS_IT_IS = tl.constexpr(int(Way.AS_IT_IS))
_FP32_SCALES = tl.constexpr(int(Way.FP32_SCALES))
_POWER_OF_TWO_SCALES = tl.constexpr(int(Way.POWER_OF_TWO_SCALES))
_SPLIT = tl.constexpr(int(Way.SPLIT))
_FP32_MANTISSA = tl.constexpr(FP32.mantissa_bits)
_SMALLEST_SCALE = tl.constexpr(2.0**-108)
_INFINITY = tl.constexpr(0x7F800000)
_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)

# Fields of a segment's row.
_ADDRESS = tl.constexpr(0)
_COUNT = tl.constexpr(1)
_OFFSET = tl.constexpr(2)
_SIDE_OFFSET = tl.constexpr(3)
_WEIGHTS = tl.constexpr(4)
_TENSOR_BYTES = tl.constexpr(5)  # of a number
_PACKED_BYTES = tl.constexpr(6)
_WAY = tl.constexpr(7)
_TENSOR_FORMAT = tl.constexpr(8)  # five numbers each
_PACKED_FORMAT = tl.constexpr(13)
_LARGEST = tl.constexpr(18)  # of the packed format, as bits of fp32
_FIRST_TILE = tl.constexpr(19)
_FIELDS = tl.constexpr(20)


@triton.jit
def _round_off(numbers, shift):
    half = 1 << (shift - 1)
    return (numbers + half - 1 + ((numbers >> shift) & 1)) >> shift


@triton.jit
def round_bits(bits, exponent_bits, mantissa_bits, max_code, infinity_code, nan_code):
    """Return int32 codes of a format from the int32 bits of fp32 numbers; see `number_formats.round_to`."""
    shift = 23 - mantissa_bits
    rebias = 128 - (1 << (exponent_bits - 1))
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    normal = _round_off(magnitude, shift) - (rebias << mantissa_bits)
    mantissa = (magnitude & 0x7FFFFF) | ((exponent > 0).to(tl.int32) << 23)
    lost = shift + rebias + 1 - tl.maximum(exponent, 1)
    lost = tl.minimum(tl.maximum(lost, 1), 25)
    subnormal = _round_off(mantissa, lost)
    codes = tl.minimum(tl.where(exponent > rebias, normal, subnormal), max_code)
    codes = tl.where(magnitude == _INFINITY, infinity_code, codes)
    codes = tl.where(magnitude > _INFINITY, nan_code, codes)
    return codes | ((bits < 0).to(tl.int32) << (exponent_bits + mantissa_bits))


@triton.jit
def widen_codes(codes, exponent_bits, mantissa_bits, max_code, infinity_code, nan_code):
    """Return the int32 bits of fp32 numbers from int32 codes of a format; see `number_formats.widen`."""
    magnitude_bits = exponent_bits + mantissa_bits
    magnitude = codes & ((1 << magnitude_bits) - 1)
    rebias = 128 - (1 << (exponent_bits - 1))
    normal = (magnitude << (23 - mantissa_bits)) + (rebias << 23)
    # Exponent of the smallest step. BF16 does not use it; its step is no normal fp32 number.
    step = tl.maximum(rebias + 1 - mantissa_bits, 1) << 23
    subnormal = magnitude.to(tl.float32) * step.to(tl.float32, bitcast=True)
    is_normal = ((magnitude >> mantissa_bits) > 0) | (rebias == 0)
    bits = tl.where(is_normal, normal, subnormal.to(tl.int32, bitcast=True))
    bits = tl.where(magnitude > max_code, 0x7FC00000, bits)
    is_infinite = (magnitude == infinity_code) & (infinity_code != nan_code)
    bits = tl.where(is_infinite, _INFINITY, bits)
    return bits | (((codes >> magnitude_bits) & 1) << 31)


@triton.jit
def scales_of(bits, largest, is_power_of_two):
    """Return ``[block]`` fp32 scales of ``[block, 128]`` int32 bits of fp32 numbers."""
    magnitudes = bits & 0x7FFFFFFF
    most = tl.max(tl.where(magnitudes < _INFINITY, magnitudes, 0), axis=1)
    scales = tl.div_rn(
        most.to(tl.float32, bitcast=True), tl.zeros_like(most).to(tl.float32) + largest
    )
    if is_power_of_two:
        scale_bits = scales.to(tl.int32, bitcast=True)
        scales = ((scale_bits + 0x7FFFFF) & _INFINITY).to(tl.float32, bitcast=True)
    return tl.where(most > 0, tl.maximum(scales, _SMALLEST_SCALE), 1.0)


@triton.jit
def divide_blocks(bits, scales):
    """Return the bits of ``[block, 128]`` fp32 numbers over their scales; NaN and infinities stay."""
    reciprocals = tl.div_rn(tl.zeros_like(scales) + 1.0, scales)
    scaled = bits.to(tl.float32, bitcast=True) * reciprocals[:, None]
    is_finite = (bits & 0x7FFFFFFF) < _INFINITY
    return tl.where(is_finite, scaled.to(tl.int32, bitcast=True), bits)


@triton.jit
def multiply_blocks(bits, scales):
    """Return the bits of ``[block, 128]`` fp32 numbers times their scales; see `widen_blocks`."""
    wide = bits.to(tl.float32, bitcast=True) * scales[:, None]
    wide = tl.minimum(tl.maximum(wide, -_LARGEST_FP32), _LARGEST_FP32)
    is_finite = (bits & 0x7FFFFFFF) < _INFINITY
    return tl.where(is_finite, wide.to(tl.int32, bitcast=True), bits)


@triton.jit
def _load_as(address, first, count, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Return ``[TILE]`` numbers from one on, zeros after the last."""
    places = first + tl.arange(0, TILE)
    if (address % 16 == 0) & (first + TILE <= count):  # several at a time
        start = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        numbers = tl.load(start + places)
    else:
        start = address.to(tl.pointer_type(DTYPE))
        numbers = tl.load(start + places, mask=places < count, other=0)
    return numbers


@triton.jit
def _load(address, first, count, num_bytes, TILE: tl.constexpr):
    """Return ``[TILE]`` int32: numbers of 1, 2 or 4 bytes from one on, zeros after the last."""
    if num_bytes == 4:
        numbers = _load_as(address, first, count, tl.int32, TILE)
    elif num_bytes == 2:
        numbers = _load_as(address, first, count, tl.int16, TILE).to(tl.int32) & 0xFFFF
    else:
        numbers = _load_as(address, first, count, tl.uint8, TILE).to(tl.int32)
    return numbers


@triton.jit
def _store_as(address, first, count, numbers, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Write ``[TILE]`` numbers from one on, none after the last."""
    places = first + tl.arange(0, TILE)
    if (address % 16 == 0) & (first + TILE <= count):
        start = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        tl.store(start + places, numbers)
    else:
        start = address.to(tl.pointer_type(DTYPE))
        tl.store(start + places, numbers, mask=places < count)


@triton.jit
def _store(address, first, count, num_bytes, numbers, TILE: tl.constexpr):
    """Write the lowest 1, 2 or 4 bytes of ``[TILE]`` int32 from one number on, none after the last."""
    if num_bytes == 4:
        _store_as(address, first, count, numbers, tl.int32, TILE)
    elif num_bytes == 2:
        _store_as(address, first, count, numbers.to(tl.int16), tl.int16, TILE)
    else:
        _store_as(address, first, count, numbers.to(tl.uint8), tl.uint8, TILE)


@triton.jit
def _round_to(bits, fields):
    """Return codes of the format that five fields describe."""
    mantissa_bits = tl.load(fields + 1).to(tl.int32)
    if mantissa_bits == _FP32_MANTISSA:
        codes = bits
    else:
        codes = round_bits(
            bits,
            tl.load(fields).to(tl.int32),
            mantissa_bits,
            tl.load(fields + 2).to(tl.int32),
            tl.load(fields + 3).to(tl.int32),
            tl.load(fields + 4).to(tl.int32),
        )
    return codes


@triton.jit
def _widen(codes, fields):
    """Return the bits of fp32 numbers from codes of the format that five fields describe."""
    mantissa_bits = tl.load(fields + 1).to(tl.int32)
    if mantissa_bits == _FP32_MANTISSA:
        bits = codes
    else:
        bits = widen_codes(
            codes,
            tl.load(fields).to(tl.int32),
            mantissa_bits,
            tl.load(fields + 2).to(tl.int32),
            tl.load(fields + 3).to(tl.int32),
            tl.load(fields + 4).to(tl.int32),
        )
    return bits


@triton.jit
def _pack_tile(row, number, buffer, num_wrong, TILE: tl.constexpr, BYTES: tl.constexpr):
    """Pack one tile of a segment."""
    count, way = tl.load(row + _COUNT), tl.load(row + _WAY)
    first = number * TILE
    numbers = _load(
        tl.load(row + _ADDRESS), first, count, tl.load(row + _TENSOR_BYTES).to(tl.int32), TILE
    )
    side = buffer + tl.load(row + _SIDE_OFFSET)
    if way == _AS_IT_IS:
        codes = numbers
    elif (TILE == 4096) & (way == _SPLIT):
        weights = _load(tl.load(row + _WEIGHTS), first, count, 2, TILE)
        codes, carries, wrong = _split(numbers, weights)
        tl.atomic_add(num_wrong, wrong.to(tl.int64))
        if TILE == 4096:
            places = tl.arange(0, 32)[None, :]
            packed = tl.sum(tl.reshape(carries, [128, 32]) << places, axis=1)
            halves = number * 128 + tl.arange(0, 128)
            ends = tl.cdiv(count, 512) * 16
            tl.store(side.to(tl.pointer_type(tl.int32)) + halves, packed, mask=halves < ends)
    elif (TILE == 8192) & ((way == _FP32_SCALES) | (way == _POWER_OF_TWO_SCALES)):
        codes = numbers
        if TILE == 8192:
            bits = tl.reshape(_widen(numbers, row + _TENSOR_FORMAT), [64, 128])
            largest = tl.load(row + _LARGEST).to(tl.int32).to(tl.float32, bitcast=True)
            scales = scales_of(bits, largest, way == _POWER_OF_TWO_SCALES)
            codes = _round_to(tl.reshape(divide_blocks(bits, scales), [TILE]), row + _PACKED_FORMAT)
            scale_bits = scales.to(tl.int32, bitcast=True)
            blocks = number * 64 + tl.arange(0, 64)
            used = tl.cdiv(count, 128)
            scale_bits = tl.where(blocks < used, scale_bits, 0)
            target = side.to(tl.pointer_type(tl.int32)) + blocks
            tl.store(target, scale_bits, mask=blocks < tl.cdiv(used, 16) * 16)
    else:
        codes = _round_to(_widen(numbers, row + _TENSOR_FORMAT), row + _PACKED_FORMAT)
    if BYTES == 4:
        halves = codes
    elif BYTES == 2:
        shifts = (tl.arange(0, 2) * 16)[None, :]
        halves = tl.sum(tl.reshape(codes & 0xFFFF, [_HALVES, 2]) << shifts, axis=1)
    else:
        shifts = (tl.arange(0, 4) * 8)[None, :]
        halves = tl.sum(tl.reshape(codes & 0xFF, [_HALVES, 4]) << shifts, axis=1)
    target = (buffer + tl.load(row + _OFFSET)).to(tl.int64)
    ends = tl.cdiv(count * BYTES, 64) * 16  # whole lines
    _store_as(target, number * _HALVES, ends, halves, tl.int32, _HALVES)


@triton.jit
def _split(bits, weights):
    """Return ``[TILE]`` remainders, carries and the number of wrong weights; see packing.py."""
    lower, upper = bits & 0xFFFF, (bits >> 16) & 0xFFFF
    is_nan = (weights & 0x7FFF) > 0x7F80
    both_nan = is_nan & ((bits & 0x7FFFFFFF) > 0x7F800000)
    carries = (weights != upper) & (both_nan == 0)
    wrong = carries & (((weights - 1) != upper) | is_nan)
    of_nan = tl.where((upper & 0x7FFF) == 0x7F80, upper | 0x40, upper)
    remainders = tl.where(both_nan, of_nan, lower)
    return remainders, carries.to(tl.int32), tl.sum(wrong.to(tl.int32), axis=0)


@triton.jit
def _unpack_tile(row, number, buffer, TILE: tl.constexpr, BYTES: tl.constexpr):
    """Unpack one tile of a segment."""
    count, way = tl.load(row + _COUNT), tl.load(row + _WAY)
    first = number * TILE
    source = (buffer + tl.load(row + _OFFSET)).to(tl.int64)
    ends = tl.cdiv(count * BYTES, 64) * 16  # whole lines
    halves = _load_as(source, number * _HALVES, ends, tl.int32, _HALVES)
    if BYTES == 4:
        codes = halves
    elif BYTES == 2:
        shifts = (tl.arange(0, 2) * 16)[None, :]
        codes = tl.reshape((halves[:, None] >> shifts) & 0xFFFF, [TILE])
    else:
        shifts = (tl.arange(0, 4) * 8)[None, :]
        codes = tl.reshape((halves[:, None] >> shifts) & 0xFF, [TILE])
    side = (buffer + tl.load(row + _SIDE_OFFSET)).to(tl.pointer_type(tl.int32))
    if way == _AS_IT_IS:
        numbers = codes
    elif (TILE == 4096) & (way == _SPLIT):
        numbers = codes
        if TILE == 4096:
            parts = number * 128 + tl.arange(0, 128)
            packed = tl.load(side + parts, mask=parts < tl.cdiv(count, 512) * 16, other=0)
            carries = tl.reshape((packed[:, None] >> tl.arange(0, 32)[None, :]) & 1, [TILE])
            weights = _load(tl.load(row + _WEIGHTS), first, count, 2, TILE)
            is_nan = (weights & 0x7FFF) > 0x7F80
            numbers = tl.where(is_nan, codes << 16, ((weights - carries) << 16) | codes)
    elif (TILE == 8192) & ((way == _FP32_SCALES) | (way == _POWER_OF_TWO_SCALES)):
        numbers = codes
        if TILE == 8192:
            blocks = number * 64 + tl.arange(0, 64)
            used = tl.cdiv(count, 128)
            scale_bits = tl.load(side + blocks, mask=blocks < tl.cdiv(used, 16) * 16, other=0)
            bits = tl.reshape(_widen(codes, row + _PACKED_FORMAT), [64, 128])
            wide = multiply_blocks(bits, scale_bits.to(tl.float32, bitcast=True))
            numbers = _round_to(tl.reshape(wide, [TILE]), row + _TENSOR_FORMAT)
    else:
        numbers = _round_to(_widen(codes, row + _PACKED_FORMAT), row + _TENSOR_FORMAT)
    width = tl.load(row + _TENSOR_BYTES).to(tl.int32)
    _store(tl.load(row + _ADDRESS), first, count, width, numbers, TILE)


@triton.jit
def _work_on_tile(row, number, buffer, num_wrong, IS_PACKING: tl.constexpr, BYTES: tl.constexpr):
    TILE: tl.constexpr = 4 * _HALVES // BYTES
    if IS_PACKING:
        _pack_tile(row, number, buffer, num_wrong, TILE, BYTES)
    else:
        _unpack_tile(row, number, buffer, TILE, BYTES)


@triton.jit
def _work(rows, segments, buffer, num_wrong, IS_PACKING: tl.constexpr):
    """Pack or unpack one tile."""
    tile = tl.program_id(0).to(tl.int64)
    segment = tl.load(segments + tile).to(tl.int64)
    row = rows + segment * _FIELDS
    number = tile - tl.load(row + _FIRST_TILE)
    packed_bytes = tl.load(row + _PACKED_BYTES)
    if packed_bytes == 4:
        _work_on_tile(row, number, buffer, num_wrong + segment, IS_PACKING, 4)
    elif packed_bytes == 2:
        _work_on_tile(row, number, buffer, num_wrong + segment, IS_PACKING, 2)
    else:
        _work_on_tile(row, number, buffer, num_wrong + segment, IS_PACKING, 1)


class KernelTable:
    """Segments as the kernels read them.

    The tables are on the device only while the kernels run, because those of all chunks together are large.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Write the tables for segments that have been checked."""
        counts = [triton.cdiv(segment.num_bytes, TILE_BYTES) for segment in segments]
        firsts = np.cumsum([0, *counts])
        rows = [_row(each, int(first)) for each, first in zip(segments, firsts, strict=False)]
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._segments = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        if segments[0].tensor.is_cuda:  # pinned, so that the copies to the device are asynchronous
            self._rows = self._rows.pin_memory()
            self._segments = self._segments.pin_memory()

    def pack(self, buffer: torch.Tensor) -> torch.Tensor:
        """Launch the kernel that packs; see `packing.PackTable.pack`."""
        return self._launch(buffer, is_packing=True)

    def unpack(self, buffer: torch.Tensor) -> None:
        """Launch the kernel that unpacks; see `packing.PackTable.unpack`."""
        self._launch(buffer, is_packing=False)

    def _launch(self, buffer: torch.Tensor, *, is_packing: bool) -> torch.Tensor:
        device = buffer.device
        num_wrong = torch.zeros(len(self._rows), dtype=torch.int64, device=device)
        if len(self._segments):
            _work[(len(self._segments),)](
                self._rows.to(device, non_blocking=True),
                self._segments.to(device, non_blocking=True),
                buffer,
                num_wrong,
                is_packing,
                num_warps=NUM_WARPS,
                maxnreg=MOST_REGISTERS,
            )
        return num_wrong


def _row(segment: Segment, first_tile: int) -> list[int]:
    """Return the fields of a segment; an 8-byte number counts as two 4-byte numbers."""
    tensor, weights = segment.tensor, segment.weights
    width = tensor.element_size()
    in_words = 2 if width == 8 else 1
    packed = segment.to or FORMAT_OF.get(tensor.dtype, FP32)
    largest = packed.max_code
    if packed is not FP32:
        code = torch.tensor([packed.max_code], dtype=packed.code_dtype)
        largest = int(code.view(packed.dtype).float().view(torch.int32))
    return [
        tensor.data_ptr(),
        tensor.numel() * in_words,
        segment.offset,
        segment.side_offset,
        weights.data_ptr() if weights is not None else 0,
        width // in_words,
        segment.number_bytes // in_words,
        int(segment.way),
        *_fields(FORMAT_OF.get(tensor.dtype, FP32)),
        *_fields(packed),
        largest,
        first_tile,
    ]


def _fields(of: NumberFormat) -> tuple[int, ...]:
    return (of.exponent_bits, of.mantissa_bits, of.max_code, of.infinity_code, of.nan_code)
