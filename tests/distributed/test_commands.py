"""inspect, verify and clean say what is true of real checkpoints."""

import os
from pathlib import Path

import pytest

import pretrain_gpt_moe
from moe_ft.cli import main
from moe_ft.faults import Phase
from moe_ft.loop.faults import Faults
from tests.jobs import TWO_NODES, CheckpointJob, flip_byte
from tests.waiting import wait_for

DAMAGED, REFUSED = 1, 2


def train_until_stored(flags: list[str]) -> None:
    """Train; the rank that is to be killed waits for a checkpoint. Runs on every rank."""
    storage, enter = Path(flags[flags.index("--moe-ft-persist-dir") + 1]), Faults.enter_phase

    def enter_phase(faults: Faults, iteration: int, phase: Phase) -> None:
        if faults.waits_for(iteration, phase):
            wait_for(lambda: any(storage.glob("iter_*/manifest.json")), "a checkpoint")
        enter(faults, iteration, phase)

    Faults.enter_phase = enter_phase  # type: ignore[method-assign,assignment]  # this process only
    pretrain_gpt_moe.main(flags)


def test_commands_on_what_a_killed_job_has_left(
    job: CheckpointJob, capsys: pytest.CaptureFixture[str]
) -> None:
    """One job, which leaves memory, replicas and storage, for many claims: making it takes seconds."""
    job.train = train_until_stored
    fault = ("--train-iters", "12", "--moe-ft-inject-fault", "kill:1@10:backward")
    job.run(*fault, storage=True, nodes=TWO_NODES)
    check_inspect_and_verify(job, capsys)
    check_clean(job, capsys)


def check_inspect_and_verify(job: CheckpointJob, capsys: pytest.CaptureFixture[str]) -> None:
    storage, memory, iteration = str(job.storage), str(job.memory_dir / "test"), job.stored()[-1]
    checkpoint = job.storage / f"iter_{iteration:07d}"
    assert main(["inspect", storage]) == 0
    text = capsys.readouterr().out
    assert f"iteration {iteration}, storage: job test, strategy dense, 2 ranks" in text
    assert "expert" in text
    assert "--moe-ffn-hidden-size" in text
    assert main(["inspect", memory, "--units"]) == 0
    text = capsys.readouterr().out
    assert "replica" in text
    assert "layer.0.expert.0" in text
    assert main(["verify", storage]) == 0
    assert main(["verify", str(checkpoint)]) == 0
    assert main(["verify", memory]) == 0
    capsys.readouterr()
    data = next(checkpoint.glob("rank_00000_*.safetensors"))
    for position in (30, 4000, data.stat().st_size // 2, -1):
        flip_byte(data, position)
        assert main(["verify", storage]) == DAMAGED
        assert "does not match its checksum" in capsys.readouterr().out
        flip_byte(data, position)
    os.truncate(data, data.stat().st_size - 1)
    assert main(["verify", storage]) == DAMAGED
    (checkpoint / "manifest.json").unlink()
    capsys.readouterr()
    main(["verify", storage])
    assert "it has no manifest; not a checkpoint, never used" in capsys.readouterr().out
    index = next(Path(memory).rglob("rank_00001/region_*.json"))
    flip_byte(index.with_suffix(".safetensors"), -1)
    assert main(["verify", memory]) == DAMAGED


def check_clean(job: CheckpointJob, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(job.memory_dir)
    capsys.readouterr()
    assert main(["clean", "--memory-dir", root, "--remove"]) == 0
    assert "younger than 60 minutes; name it to remove it" in capsys.readouterr().out
    assert main(["clean", "--memory-dir", root, "--job-id", "test"]) == 0
    assert "would remove job 'test'" in capsys.readouterr().out
    assert (job.memory_dir / "test").exists()
    assert main(["clean", "--memory-dir", root, "--job-id", "test", "--remove"]) == 0
    assert "removed job 'test'" in capsys.readouterr().out
    assert not (job.memory_dir / "test").exists()
    assert main(["clean", "--memory-dir", root, "--job-id", "test", "--remove"]) == REFUSED
    assert "--job-id=test has no memory" in capsys.readouterr().err
