"""Under the real torchrun, a dead rank is named and nothing is left running."""

import os
import subprocess
import sys
from pathlib import Path

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events, free_port
from tests.processes import wait_until_group_is_gone

ROOT = Path(__file__).resolve().parent.parent.parent


def test_torchrun_ends_soon_after_a_kill_and_the_survivors_name_the_dead_rank(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    flags = [*model_flags(), *layout_flags({"ep": 2}), *dataset_flags, *event_flags(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "pretrain_gpt_moe.py", *flags]
    command += ["--moe-ft-inject-fault", "kill:1@2:backward"]
    with (tmp_path / "output.log").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        assert process.wait(timeout=120) != 0
    text = (tmp_path / "output.log").read_text()
    assert "heard nothing from rank 1 (last in iteration 2, backward), which probably died" in text
    assert events(tmp_path, 0)[-1]["event"] == "stopped"
    wait_until_group_is_gone(process.pid)
