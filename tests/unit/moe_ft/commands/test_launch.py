"""`moe_ft launch` adds what protects a job where it is not given, and never passes over a run in memory."""

import os
from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.cluster.options import TOKEN, KeepOptions, read_options
from moe_ft.cluster.target import BRIDGE, Target
from moe_ft.commands import launch
from moe_ft.commands.launch import complete, num_gpus
from moe_ft.commands.launch_checks import made_name, name_run
from moe_ft.engine.memory.job_directory import entered_job, own_directory
from moe_ft.errors import ConfigError

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
GIVEN = ["--moe-ft-strategy=sparse", "--moe-ft-repair", "off", "--moe-ft-job-id", "mine"]
NODES = ["--nodes", "2", "--ranks-per-node", "4", "--number", "1"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "train.py"
    path.touch()
    monkeypatch.chdir(tmp_path)
    return str(path)


def options(words: list[str], environment: dict[str, str]) -> KeepOptions:
    """Return what the agent reads."""
    return read_options(complete(words, environment)[0], environment)


def test_what_is_not_given_is_added_and_known_to_the_user(script: str, memory_dir: Path) -> None:
    own = ["--moe-ft-memory-dir", str(memory_dir)]
    found = options([script, "--lr", "1", *own], NO_GPUS)
    assert found.words[:4] == ("-m", "moe_ft", "run", script) and found.repairs
    assert (found.ranks_per_node, found.max_restarts) == (1, 3)
    flags = ["--moe-ft-strategy=dense", "--moe-ft-repair=try"]
    flags.append(f"--moe-ft-job-id={made_name([script, '--lr', '1', *own])[1]}")
    assert found.words[4:] == ("--lr", "1", *own, *flags)
    _, added = complete([script, "--lr", "1", *own], NO_GPUS)
    assert added == ["--ranks-per-node=1", "--max-restarts=3", *flags]


def test_what_is_given_stays(script: str) -> None:
    words = ["--ranks-per-node=2", "--max-restarts", "0", "--preload", "wave", "--", script, *GIVEN]
    found = options(words, NO_GPUS)
    assert found.words == ("-m", "moe_ft", "run", script, *GIVEN)
    assert (found.ranks_per_node, found.max_restarts, found.repairs) == (2, 0, False)
    assert found.target.preload[-1] == "wave"
    again = options(["-m", "moe_ft", "run", script, *GIVEN], NO_GPUS)
    assert again.words == found.words, "it may be put in front of `run`"
    of_module = options(["-m", "wave", *GIVEN], NO_GPUS)
    assert of_module.words == ("-m", "moe_ft", "run", "-m", "wave", *GIVEN)


def test_what_is_added_to_a_job_of_bridge_is_in_front_of_the_script(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "finds", lambda self, name: name == BRIDGE)
    words = ["--moe-ft-window", "3", "--moe-ft-strategy", "sparse", "--", script, "a.b=1"]
    found = options(["--ranks-per-node", "2", *words], NO_GPUS)
    name = f"--moe-ft-job-id={made_name([script, 'a.b=1'])[1]}"
    front = ("--moe-ft-window", "3", "--moe-ft-strategy", "sparse", "--moe-ft-repair=try", name)
    assert found.words == ("-m", "moe_ft", "run", *front, "--", script, "a.b=1")
    assert found.repairs and found.flag("--moe-ft-strategy") == "sparse"
    assert (
        options(["--ranks-per-node=2", "-m", "moe_ft", "run", *words], NO_GPUS).words == found.words
    )
    none = ["--moe-ft-strategy", "none", "--", script]
    assert options(none, NO_GPUS).words[3:] == tuple(none)


def test_nothing_is_added_to_a_job_without_a_strategy(script: str) -> None:
    for words in ([script, "--moe-ft-strategy", "none"], [script, "--help"]):
        assert options(words, NO_GPUS).words[3:] == tuple(words)


def test_ranks_of_a_node_are_its_gpus(script: str) -> None:
    assert [num_gpus({"CUDA_VISIBLE_DEVICES": each}) for each in ("", "-1", "0,3")] == [0, 0, 2]
    assert options([script, *GIVEN], {"CUDA_VISIBLE_DEVICES": "1,2,3"}).ranks_per_node == 3


def test_slurm_and_torchrun_name_the_job_and_the_place(script: str) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", TOKEN: "0" * 32}
    place = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    found = options([*NODES, script], {**slurm, **place})
    assert found.meet == ("node0", 29500)
    assert not found.flag("--moe-ft-job-id")
    given = options([*NODES, "--meet", "other:1", script], {**slurm, **place})
    assert given.meet == ("other", 1)
    torchrun = {"TORCHELASTIC_RUN_ID": "run", "GROUP_RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "5"}
    found = options([script], {**NO_GPUS, **torchrun, **place})
    assert (found.max_restarts, found.flag("--moe-ft-job-id")) == (5, "")


def test_several_nodes_need_a_name(script: str) -> None:
    with pytest.raises(
        ConfigError, match="--moe-ft-job-id is missing: nodes of a job need one name"
    ):
        complete([*NODES, "--meet", "node0:29500", script], {TOKEN: "0" * 32})


def test_same_command_has_the_same_name_whatever_the_flags_of_moe_ft(script: str) -> None:
    name = made_name([script, "--lr", "1"])
    assert name[1].startswith(name[0]) and name[0].startswith("train-")
    own = ["--moe-ft-window", "3", "--moe-ft-breakpoints", "--lr", "1", "--moe-ft-streams=2"]
    assert made_name(["train.py", *own]) == name
    assert made_name([script, "--lr", "2"])[0] == name[0] != made_name([script, "--lr", "2"])[1]
    os.mkdir("else")
    os.chdir("else")
    assert made_name([script, "--lr", "1"])[1] != name[1], "relative paths are others here"
    assert made_name(["-m", "pack.train"])[1].startswith("pack_train-")


def make_job(directory: Path) -> None:
    with entered_job(directory, timeout_s=1.0):
        pass


def leave_state(memory_dir: Path, job: str) -> None:
    make_job(memory_dir / job)
    directory = own_directory(memory_dir / job / "node", 0)
    directory.mkdir(parents=True)
    (directory / "region_0.json").write_text("{")


def test_run_of_the_script_with_other_flags_is_not_passed_over(
    script: str, memory_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--moe-ft-memory-dir", str(memory_dir)]
    one, other = (name_run([script, "--lr", lr], str(memory_dir)) for lr in "12")
    leave_state(memory_dir, one)
    assert name_run([script, "--lr", "1"], str(memory_dir)) == one, "it continues"
    with pytest.raises(SystemExit) as end:
        main(["launch", script, "--lr", "2", *own])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"job '{one}'" in said and f"add --moe-ft-job-id {one};" in said
    named = complete([script, "--lr", "2", *own, "--moe-ft-job-id", one], NO_GPUS)[0]
    assert list(named)[-2:] == ["--moe-ft-strategy=dense", "--moe-ft-repair=try"]
    leave_state(memory_dir, other)
    assert name_run([script, "--lr", "2"], str(memory_dir)) == other


def test_live_run_and_one_without_state_are_no_reason(
    script: str, memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = name_run([script, "--lr", "1"], str(memory_dir))
    make_job(memory_dir / one)
    assert name_run([script], str(memory_dir))
    leave_state(memory_dir, one)
    monkeypatch.setattr("moe_ft.commands.launch_checks.is_alive", lambda directory: True)
    assert name_run([script], str(memory_dir))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "there is no script. Write [OPTIONS] "),
        (["--rank-per-node", "2", "train.py"], "no script. Did you mean --ranks-per-node?"),
        (["missing.py"], "missing.py is no file"),
        (["--ranks-per-node", "0", "train.py"], "--ranks-per-node 0 must be a whole number"),
        (["train.py", "--moe-ft-stategy", "sparse"], "Did you mean --moe-ft-strategy?"),
        (["train.py", "--moe-ft-keep", "3"], "--moe-ft-keep=3 changes nothing without"),
        (
            ["--moe-ft-keep", "3", "--nodes", "2", "--", "train.py"],
            "--nodes 2 in front of a script",
        ),
        (["--moe-ft-keep", "3", "train.py"], "is in front of the script, and no `--` ends"),
    ],
)
def test_wrong_command_line_is_refused_in_one_line(
    words: list[str], problem: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        launch.launch([*words, *(GIVEN if words else [])])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moe_ft launch: error: ") and problem in line
