"""Snapshots through a side stream into pinned memory, and an exact recovery from them, on one GPU."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.demo_model import event_flags, model_flags
from tests.distributed.test_few_bits import CONFIGURATIONS, FEW_BITS
from tests.gpu.determinism import deterministic_environment
from tests.harness import digests, events, run_training, run_with_restarts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    "strategy",
    [
        ("dense",),
        ("partial", "--moe-ft-k-snapshot", "4"),
        ("sparse", "--moe-ft-window", "2"),
        # Kernels pack it in more chunks than are in flight at once.
        ("dense", "--moe-ft-staging-bytes", "1MiB"),
        ("sparse", "--moe-ft-window", "2", "--moe-ft-state-dtype", "master=split"),
    ],
    ids=["dense", "partial", "sparse", "packed-dense", "split-sparse"],
)
def test_run_that_is_killed_on_a_gpu_ends_in_the_state_of_one_that_was_not(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, strategy: tuple[str, ...]
) -> None:
    # With all four experts in each snapshot, `partial` is exact too and uses the pool.
    check_recovery(dataset_flags, tmp_path, memory_dir, strategy)


_FP8 = (
    "--fp8-format",
    "hybrid",
    "--fp8-recipe",
    "delayed",
    "--moe-router-padding-for-quantization",
)
TRANSFORMER_ENGINE = {
    **{name: (FEW_BITS, *flags) for name, (flags, _) in CONFIGURATIONS.items()},
    "fp8-delayed": _FP8,
    "fp8-fp16-fp8+fp16": (*_FP8, FEW_BITS, *CONFIGURATIONS["fp16-fp8+fp16"][0]),
    "grouped": ("--moe-grouped-gemm",),
}


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
@pytest.mark.parametrize("name", TRANSFORMER_ENGINE)
def test_state_of_transformer_engine_is_recovered_bitwise(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, name: str
) -> None:
    flags = [*dataset_flags, *TRANSFORMER_ENGINE[name]]
    check_recovery(flags, tmp_path, memory_dir, ("sparse", "--moe-ft-window", "2"))


def check_recovery(
    flags: Sequence[str], tmp_path: Path, memory_dir: Path, strategy: Sequence[str]
) -> None:
    """Train with and without a kill, and compare the ends."""
    env = deterministic_environment()
    job = [
        *model_flags(
            attention_backend="unfused", deterministic_mode=True, hidden_dropout=0.1, train_iters=6
        ),
        *flags,
    ]
    alone, disturbed = tmp_path / "alone", tmp_path / "disturbed"
    run_training([*job, *event_flags(alone)], 1, log_dir=alone, env=env).check()
    words = [
        *(*job, *event_flags(disturbed), "--moe-ft-job-id", "test"),
        *("--moe-ft-strategy", *strategy),
        *(
            "--moe-ft-memory-dir",
            str(memory_dir),
            "--moe-ft-persist-dir",
            str(tmp_path / "storage"),
        ),
        *("--moe-ft-inject-fault", "kill:0@4:backward"),
    ]
    run_with_restarts(words, 1, log_dir=disturbed, max_restarts=1, env=env)[-1].check()
    (recovery,) = events(disturbed, 0, "recovery")
    assert recovery["deterministic"] is True
    assert digests(disturbed, 1) == digests(alone, 1)
