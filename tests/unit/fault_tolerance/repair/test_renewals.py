"""Buffers that libraries have made from process groups are let go of, without a wait for dead ranks.

tests/distributed/test_repair_flex.py has whole repairs with them.
"""

import gc
from argparse import Namespace
from typing import Any

import pytest
from megatron.core.transformer.moe import fused_a2a

from megatron.fault_tolerance.repair.renewals import renew


class _Buffer:
    destroyed: list["_Buffer"]

    def __del__(self) -> None:
        self.destroyed.append(self)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> type[_Buffer]:
    """Put a buffer where Megatron keeps each kind."""
    _Buffer.destroyed = []
    for name in ("_buffer", "_hybrid_ep_buffer"):
        monkeypatch.setattr(fused_a2a, name, None)  # put back at the end
        setattr(fused_a2a, name, _Buffer())
    return _Buffer


def job(backend: str, dispatcher: str = "flex") -> Namespace:
    flags: dict[str, Any] = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_flex_dispatcher_backend": backend,
        "tp_comm_overlap": False,
    }
    return Namespace(**flags)


def test_buffer_of_deepep_is_made_again_and_the_old_one_is_never_destroyed(
    buffers: type[_Buffer],
) -> None:
    renew(job("deepep"))
    gc.collect()
    assert fused_a2a._buffer is None and fused_a2a._hybrid_ep_buffer is not None
    assert buffers.destroyed == [], "its destructor waits for dead ranks"


def test_buffer_of_hybridep_is_made_again_and_gives_its_memory_back(buffers: type[_Buffer]) -> None:
    renew(job("hybridep"))
    gc.collect()
    assert fused_a2a._hybrid_ep_buffer is None and fused_a2a._buffer is not None
    assert len(buffers.destroyed) == 1


def test_job_without_the_flex_dispatcher_has_nothing_to_renew(buffers: type[_Buffer]) -> None:
    renew(job("deepep", "alltoall"))
    assert fused_a2a._buffer is not None and buffers.destroyed == []
