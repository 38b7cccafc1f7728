"""Copies of sent tensors; those from a GPU are in tests/gpu."""

import pytest
import torch

from moe_ft.engine.boundary.log import SendCopier


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_bytes_of_a_tensor_are_copied_whatever_its_type_and_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype).t()
    target = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    copier = SendCopier()
    copier.copy(tensor, target)
    assert target.view(dtype).reshape(tensor.shape).equal(tensor)
    assert copier.mark() is None
