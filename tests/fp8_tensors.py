"""Stand-ins for Transformer Engine's FP8 tensors, with real arithmetic on the CPU.

Names, signatures and where numbers lie are those of its published source, 2.20 at d0067d0d, in
transformer_engine.pytorch.tensor (float8_tensor, float8_blockwise_tensor, mxfp8_tensor, utils); `NAMES` and
`CALLS` list what Megatron and we use of them. The arithmetic need not equal its kernels', but has their
shape: one scale with a history of largest numbers, one scale of the numbers of all data-parallel ranks, one
for each block of 128 x 128 numbers, and MXFP8's power of two for each 32 numbers of a row and of a column.
What nobody writes, the padding of scales, is other in each process.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

E4M3_MOST = 448.0
# Attributes and methods of each class that are used here, with their place in the published source.
NAMES = {
    "Float8Tensor": "_data _scale_inv _transpose _transpose_invalid _quantizer _fp8_dtype "
    "_create_transpose dequantize quantize_ _get_quantizer",
    "Float8BlockwiseQTensor": "_rowwise_data _rowwise_scale_inv _columnwise_data "
    "_columnwise_scale_inv _is_2D_scaled _quantizer _fp8_dtype _create_columnwise dequantize quantize_ "
    "_get_quantizer",
    "MXFP8Tensor": "_rowwise_data _rowwise_scale_inv _columnwise_data _columnwise_scale_inv "
    "_with_gemm_swizzled_scales _quantizer _fp8_dtype dequantize quantize_ _get_quantizer",
}
CALLS = {
    "replace_raw_data": ("tensor", "new_raw_data"),
    "cast_master_weights_to_fp8": (
        *("model_weights", "master_weights", "start_offsets", "group"),
        *("fsdp_shard_model_weights", "manual_post_all_gather_processing"),
    ),
    "post_all_gather_processing": ("model_weights",),
}


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)


def _numbers(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.float8_e4m3fn).to(torch.float32)


def _padded(rows: int, columns: int, to: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return scales whose padding holds what this process leaves there."""
    shape = _ceil(rows, to[0]) * to[0], _ceil(columns, to[1]) * to[1]
    return torch.full(shape, os.getpid() % 251, dtype=dtype)


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    return torch.where(amax > 0, E4M3_MOST / amax, 1.0)


class QuantizedTensor(torch.Tensor):
    """Bytes that claim to be BF16 numbers. As in TE, operations get the numbers that they stand for."""

    _quantizer: Any
    _fp8_dtype = "kFloat8E4M3"

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, parts: dict[str, Any]) -> Any:
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device("cpu")
        )
        for name, part in parts.items():
            setattr(self, name, part)
        return self

    @classmethod
    def _parts(cls, of: Any) -> dict[str, Any]:
        kept = (*NAMES[cls.__name__].split(), "_with_padding")
        return {name: getattr(of, name) for name in kept if name in vars(of)}

    def detach(self) -> Any:
        return type(self)(self.shape, self.dtype, self._parts(self))

    def _get_quantizer(self) -> Any:
        return self._quantizer

    def quantize_(self, tensor: torch.Tensor) -> Any:
        self._quantizer.update_quantized(tensor, self)
        return self

    def float(self) -> torch.Tensor:
        return self.dequantize(dtype=torch.float32)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        raise NotImplementedError

    def by_columns(self) -> torch.Tensor:
        """Return the numbers that a backward pass multiplies with."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        if func is aten.detach.default:
            return args[0].detach()
        if func is aten.copy_.default and isinstance(args[0], QuantizedTensor):
            return args[0].quantize_(args[1])
        if func is aten.view.default:
            return args[0].viewed(args[1])
        if func._schema.is_mutable and isinstance(args[0], QuantizedTensor):
            raise AssertionError(f"{func} would write into what only stands for numbers")
        if func is aten.mm.default and isinstance(args[1], QuantizedTensor):
            return aten.mm.default(args[0], args[1].by_columns())
        plain = [each.dequantize() if isinstance(each, QuantizedTensor) else each for each in args]
        return func(*plain, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def viewed(self, shape: Sequence[int]) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not support tensor views")


class Float8Tensor(QuantizedTensor):
    """One scale for all numbers, from a history (delayed) or from the numbers (current)."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _transpose: torch.Tensor | None = None
    _transpose_invalid = True

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (_numbers(self._data) * self._scale_inv).to(dtype or self.dtype)

    def by_columns(self) -> torch.Tensor:
        assert self._transpose is not None and not self._transpose_invalid
        return (_numbers(self._transpose).t() * self._scale_inv).to(self.dtype)

    def viewed(self, shape: Sequence[int]) -> Any:
        parts = {"_data": self._data.view(shape), "_scale_inv": self._scale_inv}
        return Float8Tensor(
            parts["_data"].shape, self.dtype, {**parts, "_quantizer": self._quantizer}
        )

    def _create_transpose(self) -> None:
        self._transpose, self._transpose_invalid = self._data.t().contiguous(), False


class Float8Quantizer:
    """Scale and largest number of one tensor: places in the FP8 state of its module."""

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor) -> None:
        self.scale, self.amax = scale, amax

    def cast(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return bytes, and remember the largest number, as the kernel does with an atomic maximum."""
        if numbers.numel():
            self.amax.copy_(torch.maximum(self.amax, numbers.float().abs().max()))
        return _bytes(numbers.float() * self.scale)

    def update_quantized(self, src: torch.Tensor, dst: Any) -> None:
        dst._data.copy_(self.cast(src).view(dst._data.shape))
        dst._scale_inv.copy_(1 / self.scale)
        dst._create_transpose()

    def make(self, numbers: torch.Tensor) -> Any:
        parts: dict[str, Any] = {"_data": torch.zeros(numbers.shape, dtype=torch.uint8)}
        parts |= {"_scale_inv": torch.ones(1), "_quantizer": self}
        made = Float8Tensor(numbers.shape, numbers.dtype, parts)
        self.update_quantized(numbers, made)
        return made


class Float8CurrentScalingQuantizer(Float8Quantizer):
    """A scale that follows from the numbers."""

    def __init__(self) -> None:
        super().__init__(torch.ones(1), torch.zeros(1))

    def update_quantized(self, src: torch.Tensor, dst: Any) -> None:
        self.scale.copy_(_scale_of(src.float().abs().max()))
        super().update_quantized(src, dst)


class Float8BlockwiseQTensor(QuantizedTensor):
    """One scale for each block of 128 x 128 numbers; by columns they lie transposed."""

    _rowwise_data: torch.Tensor
    _rowwise_scale_inv: torch.Tensor
    _columnwise_data: torch.Tensor | None = None
    _columnwise_scale_inv: torch.Tensor | None = None
    _is_2D_scaled = True  # noqa: N815 - the name is Transformer Engine's

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return _of_blocks(self._rowwise_data, self._rowwise_scale_inv).to(dtype or self.dtype)

    def by_columns(self) -> torch.Tensor:
        assert self._columnwise_data is not None and self._columnwise_scale_inv is not None
        return _of_blocks(self._columnwise_data, self._columnwise_scale_inv).t().to(self.dtype)

    def _create_columnwise(self) -> None:
        rows, columns = (_ceil(size, 128) for size in self._rowwise_data.shape)
        self._columnwise_data = self._rowwise_data.t().contiguous()
        if self._columnwise_scale_inv is None:
            self._columnwise_scale_inv = _padded(columns, rows, (1, 4), torch.float32)
        self._columnwise_scale_inv[:, :rows] = self._rowwise_scale_inv[:rows, :columns].t()


def _spread(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide[: shape[0], : shape[1]]


def _of_blocks(data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    return _numbers(data) * _spread(scale_inv, data.shape)


def _block_amax(numbers: torch.Tensor) -> torch.Tensor:
    rows, columns = (_ceil(size, 128) for size in numbers.shape)
    whole = torch.zeros(rows * 128, columns * 128)
    whole[: numbers.shape[0], : numbers.shape[1]] = numbers.abs()
    return whole.view(rows, 128, columns, 128).amax((1, 3))


class Float8BlockQuantizer:
    """Makes blocks of 128 x 128."""

    def update_quantized(self, src: torch.Tensor, dst: Any) -> None:
        scale = _scale_of(_block_amax(src.float()))
        dst._rowwise_data.copy_(_bytes(src.float() * _spread(scale, src.shape)))
        dst._rowwise_scale_inv[: scale.shape[0], : scale.shape[1]] = 1 / scale
        dst._create_columnwise()

    def make(self, numbers: torch.Tensor) -> Any:
        rows, columns = (_ceil(size, 128) for size in numbers.shape)
        parts = {
            "_rowwise_data": torch.zeros(numbers.shape, dtype=torch.uint8),
            "_rowwise_scale_inv": _padded(rows, columns, (1, 4), torch.float32),
            "_quantizer": self,
        }
        made = Float8BlockwiseQTensor(numbers.shape, numbers.dtype, parts)
        self.update_quantized(numbers, made)
        return made


class MXFP8Tensor(QuantizedTensor):
    """Exponents of powers of two, for each 32 numbers of a row, and other bytes for those of a column."""

    _rowwise_data: torch.Tensor
    _rowwise_scale_inv: torch.Tensor
    _columnwise_data: torch.Tensor
    _columnwise_scale_inv: torch.Tensor
    _with_gemm_swizzled_scales = False

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return _of_lines(self._rowwise_data, self._rowwise_scale_inv).to(dtype or self.dtype)

    def by_columns(self) -> torch.Tensor:
        wide = _of_lines(self._columnwise_data.t(), self._columnwise_scale_inv.t())
        return wide.t().to(self.dtype)


def _of_lines(data: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    scales = torch.exp2(exponents.float() - 127)[: data.shape[0]].repeat_interleave(32, 1)
    return _numbers(data.contiguous()) * scales[:, : data.shape[1]]


def _in_lines(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lines = numbers.float().view(numbers.shape[0], -1, 32)
    exponents = torch.ceil(torch.log2(lines.abs().amax(2).clamp(min=2.0**-100) / E4M3_MOST))
    data = _bytes(lines / torch.exp2(exponents)[..., None])
    return data.view(numbers.shape), (exponents + 127).to(torch.uint8)


class MXFP8Quantizer:
    """Makes blocks of 32 numbers."""

    def update_quantized(self, src: torch.Tensor, dst: Any) -> None:
        data, exponents = _in_lines(src)
        dst._rowwise_data.copy_(data)
        dst._rowwise_scale_inv[: exponents.shape[0], : exponents.shape[1]] = exponents
        data, exponents = _in_lines(src.t().contiguous())
        dst._columnwise_data.copy_(data.t())
        dst._columnwise_scale_inv[: exponents.shape[1], : exponents.shape[0]] = exponents.t()

    def make(self, numbers: torch.Tensor) -> Any:
        rows, columns = numbers.shape
        parts = {
            "_rowwise_data": torch.zeros(numbers.shape, dtype=torch.uint8),
            "_rowwise_scale_inv": _padded(rows, columns // 32, (128, 4), torch.uint8),
            "_columnwise_data": torch.zeros(numbers.shape, dtype=torch.uint8),
            "_columnwise_scale_inv": _padded(rows // 32, columns, (4, 128), torch.uint8),
            "_quantizer": self,
        }
        made = MXFP8Tensor(numbers.shape, numbers.dtype, parts)
        self.update_quantized(numbers, made)
        return made


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Move the bytes of a tensor into other memory."""
    if isinstance(tensor, MXFP8Tensor):
        raise NotImplementedError("replace_raw_data for MXFP8Tensor is not supported yet")
    name = "_data" if isinstance(tensor, Float8Tensor) else "_rowwise_data"
    assert new_raw_data.dtype is torch.uint8
    new_raw_data.copy_(getattr(tensor, name))
    setattr(tensor, name, new_raw_data)


def cast_master_weights_to_fp8(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast each rank's masters to its part of the bytes; scales are of all ranks' numbers."""
    assert fsdp_shard_model_weights is None and manual_post_all_gather_processing
    for weight, master, start in zip(model_weights, master_weights, start_offsets, strict=True):
        own = torch.zeros(weight.numel())  # as the kernels: elsewhere is nothing
        part = slice(0, 0)
        if master is not None:
            assert start is not None
            part = slice(start, start + master.numel())
            own[part] = master.to(weight.dtype).float()
        _cast(weight, own.view(weight.shape), part, group)


def _cast(weight: Any, own: torch.Tensor, part: slice, group: Any) -> None:
    quantizer = weight._get_quantizer()
    if isinstance(weight, Float8BlockwiseQTensor):
        amax = _block_amax(own)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        scale = _scale_of(amax)
        weight._rowwise_scale_inv[: scale.shape[0], : scale.shape[1]] = 1 / scale
        data = _bytes(own * _spread(scale, own.shape))
        weight._rowwise_data.view(-1)[part] = data.view(-1)[part]
        return
    assert isinstance(weight, Float8Tensor), "MXFP8 needs --reuse-grad-buf-for-mxfp8-param-ag"
    numbers = own.view(-1)[part]
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        amax = own.abs().max().view(1)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        quantizer.scale.copy_(_scale_of(amax))
    weight._data.view(-1)[part] = quantizer.cast(numbers)
    dist.all_reduce(quantizer.amax, op=dist.ReduceOp.MAX, group=group)
    weight._scale_inv.copy_(1 / quantizer.scale)


def post_all_gather_processing(model_weights: Any) -> None:
    """Make what lies by columns, after all ranks' bytes have come."""
    for weight in model_weights if isinstance(model_weights, list) else [model_weights]:
        if isinstance(weight, Float8Tensor):
            weight._create_transpose()
        elif isinstance(weight, Float8BlockwiseQTensor):
            weight._create_columnwise()
