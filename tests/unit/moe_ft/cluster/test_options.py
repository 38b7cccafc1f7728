"""Options of `keep`: its command line, and variables of torchrun and SLURM."""

import os
import re
import sys
from pathlib import Path

import pytest

from moe_ft.cluster.options import TOKEN, USAGE, read_options
from moe_ft.cluster.target import BEFORE_BRIDGE, OF_BRIDGE, PRELOADED, Target
from moe_ft.errors import ConfigError

SECRET = {TOKEN: "0" * 32}
NODE = {"--nodes": "2", "--ranks-per-node": "4", "--meet": "node0:29500", "--number": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def words_of(options: dict[str, str], script: str) -> list[str]:
    return [*(word for pair in options.items() for word in pair), "--", script]


def refusal(words: list[str], environment: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        read_options(words, environment)
    return str(error.value)


def test_script_and_its_arguments_are_as_for_python(script: str) -> None:
    for words in (["--", script, "--flag", "--", "x"], [script, "--flag", "--", "x"]):
        target = read_options(words, {}).target
        assert (target.name, target.arguments) == (script, ("--flag", "--", "x"))
        assert not target.is_module
        assert target.first_path == os.path.dirname(script)
        assert target.preload == PRELOADED


def test_module_is_found_from_the_current_folder() -> None:
    words = ["--preload", "wave", "--preload=tests.unit", "-m", "package.train", "x"]
    target = read_options(words, {}).target
    assert (target.name, target.arguments, target.is_module) == ("package.train", ("x",), True)
    assert target.first_path == target.first_path_of_imports == os.getcwd()
    assert target.preload == (*PRELOADED, "wave", "tests.unit")


def test_megatron_next_to_the_script_of_run_comes_first(script: str) -> None:
    target = read_options(["-m", "moe_ft", "run", script, "x"], {}).target
    assert target.first_path == os.getcwd()
    assert target.first_path_of_imports == os.path.dirname(script)
    target = read_options(["-m", "moe_ft", "run", "-m", "mine"], {}).target
    assert target.first_path_of_imports == os.getcwd()


def test_job_of_bridge_imports_it_once_after_the_modules_of_the_user(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--preload", "wave", "--", "-m", "moe_ft", "run", "--moe-ft-keep=3", "--", script, "x"]
    assert "finds no megatron.bridge.training.pretrain. Install" in refusal(words, {})
    monkeypatch.setattr(Target, "finds", lambda self, name: True)
    target = read_options(words, {}).target
    assert target.preload == (*PRELOADED, BEFORE_BRIDGE, "wave", *OF_BRIDGE)
    assert target.first_path_of_imports == os.path.dirname(script)
    assert "--moe-ft-keep after the script" in refusal([*words, "--moe-ft-keep=3"], {})


def test_module_to_preload_may_lie_next_to_the_script(script: str) -> None:
    package = Path(script).parent / "next_to_it"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported here')")
    (package / "part.py").touch()
    found = read_options(["--preload", "next_to_it.part", script], {})
    assert found.target.preload[-1] == "next_to_it.part"


@pytest.mark.parametrize(
    "name", ["no_such", "no_such.part", "wave.part", "json.part", "", ".wave", "some-thing", "--"]
)
def test_module_to_preload_that_is_not_there_is_refused(name: str, script: str) -> None:
    path = list(sys.path)
    line = refusal(["--preload", name, "--", script], {})
    assert f"--preload={name} must name a module" in line and "Correct the name" in line
    assert sys.path == path


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "there is no script"),
        (["--"], "there is no script"),
        (["--nproc", "2"], "--nproc is no option and no script. Write"),
        (
            ["--rank-per-node", "2"],
            "is no option and no script. Did you mean --ranks-per-node? Write",
        ),
        (["-m"], "-m is no option and no script"),
        (["missing.py"], "missing.py is no file"),
    ],
)
def test_command_line_that_names_nothing_is_refused(words: list[str], problem: str) -> None:
    line = refusal(words, {})
    assert problem in line and USAGE in line


def test_one_node_needs_no_option_and_draws_its_own_token(script: str) -> None:
    found, other = read_options([script], {}), read_options([script], {})
    assert (found.num_nodes, found.ranks_per_node, found.number) == (1, 1, 0)
    assert found.is_alone and found.keeps_store and found.has_ranks
    assert found.meet == ("127.0.0.1", 0) and found.max_restarts == 0
    assert len(found.token) == 32 and found.token != other.token


def test_several_nodes_meet_and_make_the_token_of_their_secret(script: str) -> None:
    found = read_options(words_of(NODE, script), SECRET)
    assert (found.num_nodes, found.ranks_per_node, found.number) == (2, 4, 2)
    assert (found.meet, found.is_alone, found.keeps_store) == (("node0", 29500), False, False)
    again = read_options(words_of({**NODE, "--meet": "[fd00::1]:29500"}, script), SECRET)
    assert (again.meet, again.token) == (("fd00::1", 29500), found.token)
    restarted = {**SECRET, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert read_options(words_of(NODE, script), restarted).token != found.token


def test_torchrun_gives_number_nodes_place_and_restarts(script: str) -> None:
    found = read_options(["--ranks-per-node=8", script], TORCHRUN | SECRET)
    assert (found.num_nodes, found.ranks_per_node, found.number) == (2, 8, 1)
    assert (found.meet, found.is_alone) == (("node0", 29400), False)
    assert (found.run, found.restart, found.max_restarts) == ("run", 1, 2)
    given = read_options(["--nodes", "1", "--meet", "a:1", script], TORCHRUN | SECRET)
    assert (given.num_nodes, given.number, given.meet) == (1, 1, ("a", 1)), "it is a spare"
    alone = {**TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    alone["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert read_options([script], alone).is_alone


def test_torchrun_with_several_processes_a_node_is_told_the_line_to_write(script: str) -> None:
    line = refusal([script], {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"})
    assert f"--nproc-per-node 1 ... -m moe_ft launch --ranks-per-node 8 {script}" in line
    others = {**TORCHRUN, "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    with pytest.raises(SystemExit):  # it is said once
        read_options([script], others)


@pytest.mark.parametrize(
    ("nodes", "flags", "problem"),
    [
        ("2:3", ["--moe-ft-elastic"], ""),
        ("2:3", [], r"--nodes 2:3 needs ranks with --moe-ft-elastic.*Add the flag"),
        ("4:3", ["--moe-ft-elastic"], r"--nodes 4:3 must be MIN:N with MIN at most N. Correct it"),
        (":3", ["--moe-ft-elastic"], r"--nodes  must be a whole number, at least 1"),
        ("9" * 4400, [], r"--nodes 9+ must be a whole number, at least 1 and below 10\^9"),
    ],
)
def test_nodes_of_an_elastic_job_are_a_range(
    nodes: str,
    flags: list[str],
    problem: str,
    script: str,
) -> None:
    words = [*words_of({**NODE, "--nodes": nodes}, script), *flags]
    if not problem:
        found = read_options(words, SECRET)
        assert (found.fewest, found.num_nodes) == (2, 3)
        return
    assert re.search(problem, refusal(words, SECRET))


@pytest.mark.parametrize(
    ("changes", "environment", "reason"),
    [
        (
            {"--meet": ""},
            SECRET,
            r"--meet  must be HOST:PORT of the node that keeps the job's store",
        ),
        ({"--meet": "node0"}, SECRET, r"--meet node0 must be HOST:PORT"),
        ({"--meet": "node0:999999"}, SECRET, r"--meet node0:999999 must be HOST:PORT"),
        ({"--nodes": "0"}, SECRET, r"--nodes 0 must be a whole number, at least 1"),
        ({"--number": "-1"}, SECRET, r"--number -1 must be a whole number"),
        ({"--grace": "9"}, SECRET, r"--grace 9 must be a whole number, at least 10"),
        ({"--store": "1"}, SECRET, r"--store 1 is the number of a node that trains"),
        ({"--kernel-silence": "0.5"}, SECRET, r"--kernel-silence 0.5 must be a whole number, at"),
        ({"--lost-after": "2"}, SECRET, r"--lost-after 2 must be a whole number, at least 3"),
        ({}, {TOKEN: "short"}, rf"{TOKEN} must be the same on all nodes, secret"),
    ],
)
def test_node_that_cannot_join_a_job_is_refused(
    changes: dict[str, str],
    environment: dict[str, str],
    reason: str,
    script: str,
) -> None:
    words = words_of({**NODE, **changes}, script)
    assert re.search(reason, refusal(words, environment))


@pytest.mark.parametrize(
    ("options", "environment", "reason"),
    [
        ({"--nodes": "2", "--number": "0"}, SECRET, r"--meet is missing.*Give HOST:PORT of node 0"),
        ({"--number": "1"}, {}, r"--number 1 needs --nodes and --meet"),
        (
            {"--nodes": "2", "--meet": "a:1"},
            SECRET,
            r"--number is missing, and SLURM_PROCID not set",
        ),
        (
            {},
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            r"--meet is missing.*set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
        ({}, TORCHRUN, rf"{TOKEN} must be the same on all nodes, secret"),
    ],
)
def test_node_that_is_not_alone_needs_to_know_the_others(
    options: dict[str, str],
    environment: dict[str, str],
    reason: str,
    script: str,
) -> None:
    assert re.search(reason, refusal(words_of(options, script), environment))
