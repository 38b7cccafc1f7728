"""Tensors of the whole model are put together from the slices of all ranks."""

from pathlib import Path

import pytest
import torch

from moe_ft.convert.assembly import read_tensor
from moe_ft.convert.source import Source, open_source
from moe_ft.convert.tensors import find_tensors
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.convert.models import BIAS, known_tensors, persist_model


def test_buffer_comes_from_the_record(source: Source) -> None:
    (bias,) = (each for each in find_tensors(source) if each.buffer)
    assert torch.equal(read_tensor(source, bias), BIAS)


def test_kind_that_a_tensor_lacks_is_refused(source: Source) -> None:
    tensor = find_tensors(source)[0]
    with pytest.raises(ConfigError, match=f"has no momentum_buffer of {tensor.name}"):
        read_tensor(source, tensor, "momentum_buffer")


def test_byte_that_was_changed_is_found_before_it_is_used(checkpoints: Path) -> None:
    (path,) = checkpoints.glob("iter_*/rank_00001_*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
    source = open_source(str(checkpoints))
    with pytest.raises(CorruptStateError, match="layer.0.expert.1 does not match its checksum"):
        for tensor in find_tensors(source):
            read_tensor(source, tensor)


def test_checkpoint_that_is_elsewhere_is_read_through_fsspec() -> None:
    url = "memory://test-of-conversions/checkpoints"
    persist_model(Storage(url))
    source = open_source(url)
    known = known_tensors()
    for tensor in find_tensors(source):
        if not tensor.buffer:
            assert torch.equal(read_tensor(source, tensor), known[tensor.name, "weight"])
