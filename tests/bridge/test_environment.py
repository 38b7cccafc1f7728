"""Packages for GPUs that Bridge gets on CPUs, only while it is imported: see lent.py."""

import importlib.util
import sys
from pathlib import Path

from tests.harness import run_ranks

LENT = ("transformer_engine", "nvidia_resiliency_ext", "megatron.energon", "webdataset")


def check_nothing_is_left() -> None:
    assert "megatron.bridge.training.pretrain" in sys.modules
    assert not [name for name in sys.modules if name.startswith(LENT)]
    assert not [name for name in LENT if importlib.util.find_spec(name)]


def test_lent_packages_are_gone_when_bridge_is_imported(tmp_path: Path) -> None:
    run_ranks(check_nothing_is_left, 1, log_dir=tmp_path).check()
