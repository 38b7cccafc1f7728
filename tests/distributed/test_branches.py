"""Starts that do not know of each other, flags that apply once, and state that cannot be used."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pretrain_gpt_moe
from moe_ft.recovery import put_back as written
from moe_ft.recovery import replay
from tests.checkpoint_job import NUM_RANKS, CheckpointJob, flip_byte, refusal
from tests.harness import run_training

Digests = list[tuple[str, str]]
Reference = Callable[[list[str], int], Digests]


def kill_all(iteration: int) -> list[str]:
    faults = [f"kill:{rank}@{iteration}:before-step" for rank in (0, 1)]
    return [word for fault in faults for word in ("--moe-ft-inject-fault", fault)]


def test_nodes_that_come_back_with_an_older_branch_do_not_beat_the_run(
    job: CheckpointJob, expected: Digests
) -> None:
    memory = job.memory_dir / "test"
    away = job.folder / "away"
    away.mkdir()
    job.run(*kill_all(2), storage=True, nodes=("a", "b"))
    job.run(*kill_all(3), storage=True, nodes=("a", "b"))
    for node in ("a", "b"):  # their rack is cut off but keeps its power
        shutil.move(memory / node, away / node)
    job.run(*kill_all(5), storage=True, nodes=("c", "d"))
    shutil.move(away / "a", memory / "a")
    shutil.move(memory / "c", away / "c")
    result = job.run(storage=True, nodes=("a", "d")).check()
    assert job.recovered()[-1] in [(4, 4), (5, 5)]
    assert "start 1 is of another branch, which got less far" in result.output(0)
    assert job.digests() == expected


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


def test_iteration_that_is_not_there_is_refused_and_nothing_is_touched(job: CheckpointJob) -> None:
    job.run("--exit-interval", "3", storage=True).check()
    before = {path: path.read_bytes() for path in job.storage.rglob("*") if path.is_file()}
    line = refusal(job.run("--moe-ft-recover-from", "iter_99999", storage=True))
    assert "--moe-ft-recover-from=iter_99999 cannot be used" in line
    assert f": {', '.join(map(str, job.stored()))}. " in line
    after = {path: path.read_bytes() for path in job.storage.rglob("*") if path.is_file()}
    assert {path: after.get(path) for path in before} == before


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


def fail_to_put_back(iteration: int, flags: list[str]) -> None:
    """Train on a machine that cannot restore the state of one iteration."""
    original = written.put_back

    def put_back(units: object, catalog: object, at: int, hook: object) -> None:
        if at == iteration:
            raise ValueError("this cannot be put back")
        original(units, catalog, at, hook)  # type: ignore[arg-type]

    replay.put_back = put_back  # type: ignore[assignment]
    pretrain_gpt_moe.main(flags)


def test_state_that_failed_twice_in_the_same_way_is_passed_over(
    job: CheckpointJob, expected: Digests
) -> None:
    job.run("--exit-interval", "5", "--moe-ft-keep", "9", storage=True).check()
    older = job.stored()[-2]
    job.train = partial(fail_to_put_back, 5)
    results = job.run_with_faults(storage=True, is_intact=False)
    assert [any(result.exit_codes) for result in results] == [True, True, False]
    assert "two starts failed from there in the same way (recovery: ValueError: this cannot be" in (
        results[-1].output(0)
    )
    assert job.recovered() == [(older, older)]
    assert job.digests() == expected


def megatron_flags(flag: str, folder: Path) -> list[str]:
    """Return flags that use a checkpoint of Megatron itself and save none before training ends."""
    directory = str(folder / "megatron")
    return [flag, directory, "--ckpt-format", "torch_dist", "--save-interval", "9"]


def test_flag_that_begins_a_run_is_refused_where_there_is_another_run(
    job: CheckpointJob, tmp_path: Path
) -> None:
    saved = megatron_flags("--save", tmp_path)
    job.run(*saved, "--exit-interval", "2", storage=True).check()
    load = megatron_flags("--load", tmp_path)
    line = refusal(job.run(*load, "--finetune", storage=True))
    assert f"--finetune --load {tmp_path / 'megatron'} begins a run" in line
    assert "that began without it, at iteration 2" in line


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


def test_run_that_began_next_to_another_models_is_restarted(
    job: CheckpointJob, reference: Reference
) -> None:
    job.run("--exit-interval", "3", storage=True).check()
    flags = ("--seed", "5", "--moe-ft-recover-from", "load")
    job.run_with_faults("kill:1@4:before-step", flags=flags, storage=True)
    ((restored, _),) = job.recovered()
    assert restored in (3, 4)
    assert job.digests() == reference([*job.base, "--seed", "5"], NUM_RANKS)


def test_experts_of_a_chosen_iteration_are_those_of_the_newest_after_a_restart(
    job: CheckpointJob, expected: Digests
) -> None:
    all_experts = ("--moe-ft-k-snapshot", "4", "--moe-ft-k-persist", "4", "--moe-ft-keep", "9")
    flags = ("--moe-ft-strategy", "partial", *all_experts)
    job.run(*flags, "--exit-interval", "5", storage=True).check()
    wanted = ("--moe-ft-recover-from", f"iter_{job.stored()[0]}")
    job.run_with_faults("kill:1@4:before-step", flags=(*flags, *wanted), storage=True)
    first, second = job.events("recovery")
    assert second["writer"] == first["start"]
    assert (first["lost_tokens"], second["lost_tokens"]) == (0, 0)
    assert job.digests() == expected
