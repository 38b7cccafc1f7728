"""The command line after `keep`."""

import os
import re
import sys
from pathlib import Path

import pytest

from moe_ft.cluster.target import PRELOADED, TOKEN, USAGE, read_target


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def test_script_and_its_arguments_are_as_for_python(script: str) -> None:
    for words in (["--", script, "--flag", "--", "x"], [script, "--flag", "--", "x"]):
        target = read_target(words)
        assert (target.name, target.arguments) == (script, ("--flag", "--", "x"))
        assert not target.is_module
        assert target.first_path == os.path.dirname(script)
        assert target.preload == PRELOADED


def test_module_is_found_from_the_current_folder() -> None:
    target = read_target(
        ["--preload", "wave", "--preload", "tests.unit", "-m", "package.train", "x"]
    )
    assert (target.name, target.arguments, target.is_module) == ("package.train", ("x",), True)
    assert target.first_path == target.first_path_of_imports == os.getcwd()
    assert target.preload == (*PRELOADED, "wave", "tests.unit")


def test_megatron_next_to_the_script_of_run_comes_first(script: str) -> None:
    target = read_target(["-m", "moe_ft", "run", script, "x"])
    assert target.first_path == os.getcwd()
    assert target.first_path_of_imports == os.path.dirname(script)
    assert read_target(["-m", "moe_ft", "run", "-m", "mine"]).first_path_of_imports == os.getcwd()


def test_module_to_preload_may_lie_next_to_the_script(script: str) -> None:
    package = Path(script).parent / "next_to_it"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported here')")
    (package / "part.py").touch()
    assert read_target(["--preload", "next_to_it.part", script]).preload[-1] == "next_to_it.part"


@pytest.mark.parametrize(
    "name", ["no_such", "no_such.part", "wave.part", "json.part", "", ".wave", "some-thing", "--"]
)
def test_module_to_preload_that_is_not_there_is_refused(
    name: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list(sys.path)
    with pytest.raises(SystemExit) as end:
        read_target(["--preload", name, "--", script])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert f"--preload={name} must name a module" in line and "Correct the name" in line
    assert sys.path == path


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "there is no script"),
        (["--"], "there is no script"),
        (["--nproc", "2"], "--nproc is no script"),
        (["-m"], "-m is no script"),
        (["missing.py"], "missing.py is no file"),
    ],
)
def test_command_line_that_names_nothing_is_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read_target(words)
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert problem in line and USAGE in line


def test_node_whose_ranks_do_not_repair_is_refused(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN, "0" * 32)
    with pytest.raises(SystemExit) as end:
        read_target([*words_of(NODE, script), "--moe-ft-repair", "off"])
    assert end.value.code == 2
    assert re.search(
        r"--nodes 2 needs ranks with --moe-ft-repair auto.*Add the flag", capsys.readouterr().err
    )


NODE = {"--nodes": "2", "--ranks-per-node": "4", "--meet": "node0:29500", "--number": "2"}


def words_of(options: dict[str, str], script: str) -> list[str]:
    words = [word for pair in options.items() for word in pair]
    return [*words, "--", script, "--moe-ft-repair", "auto"]


def test_node_has_the_variables_of_its_ranks(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "0" * 32)
    found = read_target(words_of(NODE, script)).of_node
    expected = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "2"}
    assert expected.items() <= found.items()
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node0", "29500")
    assert not read_target([script]).of_node
    found = read_target(words_of({**NODE, "--meet": "[fd00::1]:29500"}, script)).of_node
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("fd00::1", "29500")


@pytest.mark.parametrize(
    ("nodes", "flags", "problem"),
    [
        ("2:3", ["--moe-ft-elastic"], ""),
        ("2:3", [], r"--nodes 2:3 needs ranks with --moe-ft-elastic.*Add the flag"),
        ("4:3", ["--moe-ft-elastic"], r"--nodes 4:3 must be MIN:N with MIN at most N. Correct it"),
        (":3", ["--moe-ft-elastic"], r"--nodes  must be a whole number, at least 1"),
        (
            "9" * 4400,
            [],
            r"--nodes 9+ must be a whole number, at least 1 and below 10\^9. Correct it",
        ),
    ],
)
def test_nodes_of_an_elastic_job_are_a_range(
    nodes: str,
    flags: list[str],
    problem: str,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(TOKEN, "0" * 32)
    words = [*words_of({**NODE, "--nodes": nodes}, script), *flags]
    if not problem:
        found = read_target(words).of_node
        assert (found["MOE_FT_KEEP_FEWEST"], found["WORLD_SIZE"]) == ("2", "12")
        return
    with pytest.raises(SystemExit) as end:
        read_target(words)
    assert end.value.code == 2
    assert re.search(problem, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("changes", "token", "reason"),
    [
        (
            {"--meet": ""},
            "0" * 32,
            r"--meet  must be HOST:PORT of the node that keeps the job's store",
        ),
        ({"--meet": "node0"}, "0" * 32, r"--meet node0 must be HOST:PORT"),
        ({"--meet": "node0:999999"}, "0" * 32, r"--meet node0:999999 must be HOST:PORT"),
        ({"--nodes": "0"}, "0" * 32, r"--nodes 0 must be a whole number, at least 1"),
        ({"--number": "-1"}, "0" * 32, r"--number -1 must be a whole number"),
        ({"--grace": "9"}, "0" * 32, r"--grace 9 must be a whole number, at least 10"),
        ({"--store": "1"}, "0" * 32, r"--store 1 is the number of a node that trains"),
        ({"--lost-after": "2"}, "0" * 32, r"--lost-after 2 must be a whole number, at least 3"),
        ({}, "short", rf"{TOKEN} must be the same on all nodes, secret"),
    ],
)
def test_node_that_cannot_join_a_job_is_refused(
    changes: dict[str, str],
    token: str,
    reason: str,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(SystemExit) as end:
        read_target(words_of({**NODE, **changes}, script))
    assert end.value.code == 2
    assert re.search(reason, capsys.readouterr().err)
