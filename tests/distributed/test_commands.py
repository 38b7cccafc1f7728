"""inspect, verify and clean say what is true of real checkpoints."""

import os
from pathlib import Path

import pytest

from moe_ft.cli import main
from tests.checkpoint_job import TWO_NODES, CheckpointJob, flip_byte

DAMAGED, REFUSED = 1, 2


@pytest.fixture
def left_by_a_kill(job: CheckpointJob) -> CheckpointJob:
    """Return a job that was killed after iteration 5 and left memory, replicas and storage."""
    job.run("--moe-ft-inject-fault", "kill:1@5:backward", storage=True, nodes=TWO_NODES)
    return job


def test_commands_on_what_a_killed_job_has_left(
    left_by_a_kill: CheckpointJob, capsys: pytest.CaptureFixture[str]
) -> None:
    # One job for many claims: making it takes seconds.
    storage, memory = str(left_by_a_kill.storage), str(left_by_a_kill.memory_dir / "test")
    assert main(["inspect", storage]) == 0
    text = capsys.readouterr().out
    assert "iteration 4, storage: job test, strategy dense, 2 ranks" in text
    assert "expert" in text
    assert "--moe-ffn-hidden-size" in text
    assert main(["inspect", memory, "--units"]) == 0
    text = capsys.readouterr().out
    assert "replica" in text
    assert "layer.0.expert.0" in text
    assert main(["verify", storage]) == 0
    assert main(["verify", str(left_by_a_kill.storage / "iter_0000004")]) == 0
    assert main(["verify", memory]) == 0
    capsys.readouterr()
    data = next((left_by_a_kill.storage / "iter_0000004").glob("rank_00000_*.safetensors"))
    for position in (30, 4000, data.stat().st_size // 2, -1):
        flip_byte(data, position)
        assert main(["verify", storage]) == DAMAGED
        assert "does not match its checksum" in capsys.readouterr().out
        flip_byte(data, position)
    os.truncate(data, data.stat().st_size - 1)
    assert main(["verify", storage]) == DAMAGED
    (left_by_a_kill.storage / "iter_0000004" / "manifest.json").unlink()
    capsys.readouterr()
    main(["verify", storage])
    assert "it has no manifest; not a checkpoint, never used" in capsys.readouterr().out
    index = next(Path(memory).rglob("rank_00001/region_*.json"))
    flip_byte(index.with_suffix(".safetensors"), -1)
    assert main(["verify", memory]) == DAMAGED


def test_clean_removes_memory_of_dead_jobs_only(
    left_by_a_kill: CheckpointJob, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(left_by_a_kill.memory_dir)
    assert main(["clean", "--memory-dir", root, "--remove"]) == 0
    assert "younger than 60 minutes; name it to remove it" in capsys.readouterr().out
    assert main(["clean", "--memory-dir", root, "--job-id", "test"]) == 0
    assert "would remove job 'test'" in capsys.readouterr().out
    assert (left_by_a_kill.memory_dir / "test").exists()
    assert main(["clean", "--memory-dir", root, "--job-id", "test", "--remove"]) == 0
    assert "removed job 'test'" in capsys.readouterr().out
    assert not (left_by_a_kill.memory_dir / "test").exists()
    assert main(["clean", "--memory-dir", root, "--job-id", "test", "--remove"]) == REFUSED
    assert "--job-id=test has no memory" in capsys.readouterr().err


def test_commands_refuse_a_directory_without_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("inspect", "verify"):
        assert main([command, str(tmp_path)]) == REFUSED
        assert "holds no state of moe_ft" in capsys.readouterr().err
