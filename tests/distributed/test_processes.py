"""A killed rank leaves no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demo_model import event_flags, model_flags
from tests.ports import free_port
from tests.processes import wait_until_group_is_gone

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.rest
def test_checkpoint_writers_of_a_killed_rank_end_with_it(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    flags = [*model_flags(train_iters=4), *dataset_flags, *event_flags(tmp_path / "events")]
    flags += ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    flags += ["--moe-ft-inject-fault", "kill:0@2"]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (tmp_path / "output.log").open("w") as output:
        # A real process with a real main module: the spawned writers import it.
        process = subprocess.Popen(
            [sys.executable, "pretrain_gpt_moe.py", *flags],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        assert process.wait(timeout=180) == -signal.SIGKILL, (tmp_path / "output.log").read_text()
    wait_until_group_is_gone(process.pid)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"
