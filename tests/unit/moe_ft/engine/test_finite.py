"""Numbers that are not finite are found wherever they are, in every format that a state is kept in."""

import numpy as np
import pytest
import torch

from moe_ft.engine.persist import soundness
from moe_ft.engine.persist.soundness import check_is_finite
from moe_ft.errors import CorruptStateError
from moe_ft.format.entries import TensorEntry, UnitEntry
from moe_ft.state.slices import DTYPES

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]


def check(content: bytes, dtype: str, packing: str = "exact", count: int | None = None) -> None:
    count = len(content) // DTYPES[dtype].itemsize if count is None else count
    tensor = TensorEntry("a.weight", "param", 0, count, dtype, 0, packing=packing)
    entry = UnitEntry(
        offset=0, num_bytes=len(content), iteration=5, level="full", checksum="", tensors=(tensor,)
    )
    check_is_finite("embedding", entry, memoryview(content))


def is_refused(content: bytes, dtype: str) -> bool:
    try:
        check(content, dtype)
    except CorruptStateError:
        return True
    return False


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPES[name].itemsize <= 2])
def test_every_number_of_a_short_format_is_judged_as_torch_does(dtype: str) -> None:
    kind = {1: np.uint8, 2: np.uint16}[DTYPES[dtype].itemsize]
    every = np.arange(2 ** (8 * DTYPES[dtype].itemsize)).astype(kind)
    are_finite = torch.isfinite(torch.from_numpy(every).view(DTYPES[dtype]).float()).numpy()
    check(every[are_finite].tobytes(), dtype)
    assert all(is_refused(each.tobytes(), dtype) for each in every[~are_finite])


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_every_kind_of_number_of_a_long_format_is_judged_as_torch_does(dtype: str) -> None:
    limits = torch.finfo(DTYPES[dtype])
    kinds = [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 2]
    kinds += [float("inf"), -float("inf"), float("nan"), -float("nan")]
    numbers = torch.tensor(kinds, dtype=DTYPES[dtype])
    found = [is_refused(each.numpy().tobytes(), dtype) for each in numbers]
    assert found == (~torch.isfinite(numbers)).tolist()


@pytest.mark.parametrize("position", [0, 3, 4, 9])
def test_number_that_is_not_finite_is_found_in_every_block(
    monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr(soundness, "_BLOCK_BYTES", 16)
    numbers = np.ones(10, np.float32)
    check(numbers.tobytes(), "F32")
    numbers[position] = np.nan
    with pytest.raises(CorruptStateError, match=r"param of a\.weight in unit embedding holds NaN"):
        check(numbers.tobytes(), "F32")


def test_scale_that_is_not_finite_is_found_after_its_packed_numbers() -> None:
    content = bytearray(128 + 4)
    check(bytes(content), "F32", "fp8-e4m3-block", 128)
    content[128:] = np.float32(np.inf).tobytes()
    with pytest.raises(CorruptStateError, match="holds NaN or infinity"):
        check(bytes(content), "F32", "fp8-e4m3-block", 128)


def test_integers_and_tensors_without_numbers_are_finite() -> None:
    check(b"\xff" * 64, "I64")
    check(b"\xff" * 64, "U8")
    check(b"", "F32")
