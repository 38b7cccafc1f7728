"""Starts that do not know of each other, flags that apply once, and state that cannot be used."""

from pathlib import Path

import pytest

from tests.harness import run_training
from tests.jobs import NUM_RANKS, CheckpointJob, flip_byte, refusal

Digests = list[tuple[str, str]]


@pytest.mark.rest
def test_iteration_that_the_flag_names_holds_for_the_first_start_only(
    job: CheckpointJob, expected: Digests
) -> None:
    job.run("--exit-interval", "5", "--moe-ft-keep", "9", storage=True).check()
    wanted = job.stored()[0]
    assert wanted < 4
    flags = ("--moe-ft-recover-from", f"iter_{wanted}")
    job.run_with_faults("kill:1@4:before-step", flags=flags, storage=True)
    for rank in range(NUM_RANKS):
        first, second = job.events("recovery", rank)
        assert second["writer"] == first["start"]
    (restored, _), (restored_again, _) = job.recovered()
    assert restored == wanted < restored_again <= 4
    assert job.digests() == expected


@pytest.mark.rest
def test_state_that_exists_and_is_damaged_is_refused_until_the_user_says_so(
    job: CheckpointJob, expected: Digests
) -> None:
    job.run("--exit-interval", "3", storage=True).check()
    for path in job.storage.glob("iter_*/rank_*.safetensors"):
        flip_byte(path, -100)
    damaged = {path: path.read_bytes() for path in job.storage.rglob("iter_*/*")}
    line = refusal(job.run(storage=True))
    assert "none of it can be used: " in line
    assert "has no intact" in line
    assert "add --moe-ft-recover-from load" in line
    job.run("--moe-ft-recover-from", "load", storage=True).check()
    assert job.events("start")[-1]["iteration"] == 0
    # The checkpoints of the old run stay, and those of the new run stand next to them.
    assert {path: path.read_bytes() for path in damaged} == damaged
    assert job.stored()[-1] == 6
    assert job.digests() == expected


def megatron_flags(flag: str, folder: Path) -> list[str]:
    """Return flags that use a checkpoint of Megatron itself and save none before training ends."""
    directory = str(folder / "megatron")
    return [flag, directory, "--ckpt-format", "torch_dist", "--save-interval", "9"]


@pytest.mark.rest
def test_newer_load_is_used_as_a_new_run_and_older_state_stays(
    job: CheckpointJob, tmp_path: Path
) -> None:
    job.run("--exit-interval", "2", storage=True).check()
    saved = megatron_flags("--save", tmp_path)
    without = [*job.base, *saved, "--exit-interval", "4"]
    run_training(without, 2, log_dir=tmp_path / "stock").check()
    load = megatron_flags("--load", tmp_path)
    result = job.run(*load, storage=True).check()
    assert "continuing from --load at iteration 4, as a new run: newer than moe_ft's" in (
        result.output(0)
    )
    assert job.events("start")[-1]["iteration"] == 4
    assert job.stored()[0] == 2
