"""The same entry point on a GPU: nothing is emulated, and deterministic runs are bitwise equal."""

from pathlib import Path

import pytest
import torch

from tests.demo_model import event_flags, model_flags
from tests.gpu.determinism import deterministic_environment
from tests.harness import digests, events, run_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_deterministic_runs_on_a_gpu_end_with_equal_digests(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    env = deterministic_environment()
    ends = []
    for name in ("first", "second"):
        folder = tmp_path / name
        flags = model_flags(
            attention_backend="unfused", deterministic_mode=True, hidden_dropout=0.1
        )
        flags += dataset_flags + event_flags(folder)
        result = run_training(flags, 1, log_dir=folder, env=env).check()
        assert "no GPU found" not in result.output(0)
        losses = [line["loss"] for line in events(folder, 0, "iteration")]
        assert losses[-1] < losses[0]
        ends.append(digests(folder, 1))
    assert ends[0] == ends[1]
