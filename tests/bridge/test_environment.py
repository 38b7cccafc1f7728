"""Bridge trains on CPUs, without moe_ft, and gets packages for GPUs only while it is imported."""

import importlib.util
import sys
from pathlib import Path

from tests.bridge.jobs import EP2, NUM_RANKS, PlainRuns
from tests.harness import run_ranks

LENT = ("transformer_engine", "nvidia_resiliency_ext", "megatron.energon", "webdataset")


def check_nothing_is_left() -> None:
    assert "megatron.bridge.training.pretrain" in sys.modules
    assert not [name for name in sys.modules if name.startswith(LENT)]
    assert not [name for name in LENT if importlib.util.find_spec(name)]


def test_lent_packages_are_gone_when_bridge_is_imported(tmp_path: Path) -> None:
    run_ranks(check_nothing_is_left, 1, log_dir=tmp_path).check()


def test_same_job_ends_with_the_same_bits_twice(tmp_path: Path, plain_runs: PlainRuns) -> None:
    again = PlainRuns(tmp_path).digests(EP2, NUM_RANKS)
    assert again == plain_runs.digests(EP2, NUM_RANKS)
