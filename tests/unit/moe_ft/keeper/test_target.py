"""The command line after `keep`."""

import os
from pathlib import Path

import pytest

from moe_ft.keeper.target import PRELOADED, USAGE, read_target


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
    target = read_target(["--preload", "more", "--preload", "mine", "-m", "package.train", "x"])
    assert (target.name, target.arguments, target.is_module) == ("package.train", ("x",), True)
    assert target.first_path == target.first_path_of_imports == os.getcwd()
    assert target.preload == (*PRELOADED, "more", "mine")


def test_megatron_next_to_the_script_of_run_comes_first(script: str) -> None:
    target = read_target(["-m", "moe_ft", "run", script, "x"])
    assert target.first_path == os.getcwd()
    assert target.first_path_of_imports == os.path.dirname(script)
    assert read_target(["-m", "moe_ft", "run", "-m", "mine"]).first_path_of_imports == os.getcwd()


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
