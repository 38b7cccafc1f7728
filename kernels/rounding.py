"""Rounding of fp32 to shorter formats and widening back: the reference for the kernels.

torch's casts do the work. They agree on all finite numbers that a format can hold. They differ on overflow,
infinities and NaN, even between the vector and the scalar code of one machine, so these are handled here as
kernels/number_formats.py says. Tests compare the results with the integer steps of the kernels.
"""

import torch

from kernels.number_formats import FORMAT_OF, FP32, NumberFormat


def convert(values: torch.Tensor, to: NumberFormat) -> torch.Tensor:
    """Return numbers of one format in another one; in their own bit for bit.

    Args:
        values: of the dtype of a format, of any shape.
    """
    of = FORMAT_OF[values.dtype]
    if of is to:
        return values
    wide = values if of is FP32 else widen(values)
    return wide if to is FP32 else round_to(wide, to)


def round_to(values: torch.Tensor, to: NumberFormat) -> torch.Tensor:
    """Round numbers as kernels/number_formats.py says.

    Args:
        values: fp32, of any shape.
        to: the format, shorter than fp32.

    Returns:
        Numbers of the format's dtype, of the same shape.
    """
    codes = values.clamp(-to.largest, to.largest).to(to.dtype).view(to.code_dtype)
    special = torch.where(values.isnan(), to.nan_code, to.infinity_code)
    special |= torch.signbit(values).int() << (8 * to.num_bytes - 1)
    return torch.where(values.isfinite(), codes, special.to(to.code_dtype)).view(to.dtype)


def widen(values: torch.Tensor) -> torch.Tensor:
    """Return numbers of a format as fp32, exactly; NaN become fp32's canonical one, of the same sign."""
    of, wide = FORMAT_OF[values.dtype], values.to(torch.float32)
    sign = (values.view(of.code_dtype).int() >> (8 * of.num_bytes - 1)) << 31
    nan = (sign | FP32.nan_code).view(torch.float32)
    return torch.where(wide.isnan(), nan, wide)
