"""Snapshots of a window that was read are put back bit for bit, and nothing else is touched."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from moe_ft.faults import Phase
from moe_ft.format.entries import UnitEntry, tensor_bytes
from moe_ft.recovery.put_back import put_back, sync_weights
from tests.unit.moe_ft.recovery.window_copies import (
    EMBEDDING,
    NUM_ELEMENTS,
    WINDOW,
    Copies,
    make_catalog,
)


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def saved(entry: UnitEntry, key: str) -> bytes:
    """Return the bytes of a tensor of a version."""
    (tensor,) = [each for each in entry.tensors if each.key == key]
    start = entry.offset + tensor.offset
    return WINDOW.content[start : start + tensor_bytes(tensor)]


def no_fault(phase: Phase, iteration: int) -> None:
    """Inflict nothing."""


@pytest.mark.parametrize("position", [0, 1, 2])
def test_masters_moments_and_weights_of_a_snapshot_are_put_back_and_nothing_else(
    copies: Copies, position: int
) -> None:
    catalog = make_catalog()
    full, compute = copies.fetch(catalog).snapshot(position)
    put_back([*full, *compute], catalog, 5 + position, no_fault)
    is_full = {str(each.unit) for each in full}
    is_compute = {str(each.unit) for each in compute}
    for local in catalog.parameters:
        name, state = str(local.unit), local.optimizer.optimizer.state
        assert local.master is not None
        if name in is_full:
            entry = WINDOW.index.units[name]
            assert bytes_of(local.master) == saved(entry, "param")
            assert bytes_of(state[local.master]["exp_avg"]) == saved(entry, "exp_avg")
        else:
            assert not local.master.any()
            assert local.master not in state
        if name in is_compute:
            entry = WINDOW.index.compute[position][name]
            assert bytes_of(local.parameter) == saved(entry, "weight")
        else:
            assert not local.parameter.any()


def test_moments_that_did_not_exist_are_removed(copies: Copies) -> None:
    catalog = make_catalog()
    unit = WINDOW.index.units[EMBEDDING]
    tensors = tuple(
        msgspec.structs.replace(each, is_absent=each.key != "param") for each in unit.tensors
    )
    units = {**WINDOW.index.units, EMBEDDING: msgspec.structs.replace(unit, tensors=tensors)}
    copies.change_index(0, units=units)
    (local,) = [each for each in catalog.parameters if str(each.unit) == EMBEDDING]
    local.optimizer.optimizer.state[local.master]["exp_avg"] = torch.ones(NUM_ELEMENTS)
    full, _ = copies.fetch(catalog).snapshot(2)
    put_back(full, catalog, 7, None)
    assert local.master not in local.optimizer.optimizer.state


@pytest.mark.parametrize("reuses_gradients", [True, False])
def test_gather_of_a_restore_counts_as_one_of_an_iteration_unless_masters_are_staged_for_that(
    reuses_gradients: bool,
) -> None:
    group = SimpleNamespace(param_gather_dispatched=False)

    def sync(*, force_sync: bool) -> None:
        group.param_gather_dispatched = force_sync

    config = SimpleNamespace(
        use_distributed_optimizer=True, reuse_grad_buf_for_mxfp8_param_ag=reuses_gradients
    )
    groups = {"bucket_groups": [], "expert_parallel_bucket_groups": [group]}
    chunk: Any = SimpleNamespace(ddp_config=config, start_param_sync=sync, **groups)
    sync_weights([chunk], None)
    assert group.param_gather_dispatched is not reuses_gradients
