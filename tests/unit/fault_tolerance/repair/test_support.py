"""Jobs that cannot be repaired are refused at the start; the message says why and what to do."""

from argparse import Namespace
from typing import Any

import pytest

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.repair.support import checked_link
from moe_ft.errors import ConfigError
from moe_ft.keeper.link import Link


def args(**changes: Any) -> Namespace:
    defaults = {
        "dataloader_type": "single",
        "async_save": False,
        "ckpt_assume_constant_structure": False,
        "phase_transition_iterations": None,
        "skip_train": False,
        "hybrid_context_parallel": False,
        "world_size": 4,
    }
    return Namespace(**{**defaults, **changes})


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: True)


@pytest.mark.usefixtures("on_cpu")
def test_supported_job_gets_its_link() -> None:
    link = Link()
    assert checked_link(args(), link) is link


@pytest.mark.usefixtures("on_cpu")
def test_rank_that_nothing_would_replace_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs ranks that are forked by `python -m moe_ft keep`"):
        checked_link(args(), None)


def test_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: False)
    with pytest.raises(ConfigError, match="replaces ranks that train on CPUs"):
        checked_link(args(), Link())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataloader_type": "external"}, "--dataloader-type external: nobody knows"),
        ({"async_save": True}, "--async-save: all ranks wait"),
        ({"ckpt_assume_constant_structure": True}, "--ckpt-assume-constant-structure: a new"),
        ({"phase_transition_iterations": [3]}, "--phase-transition-iterations: the position"),
        ({"skip_train": True}, "--skip-train: nothing is trained"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel: its iterator"),
        ({"world_size": 1}, "one rank: nobody survives"),
    ],
)
def test_job_that_cannot_be_repaired_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--moe-ft-repair=auto does not work with {message}"):
        checked_link(args(**changes), Link())
