"""A script that cannot run is refused before Megatron is imported; its folder comes first, as with Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fault_tolerance.launch import command
from megatron.fault_tolerance.launch.command import Target
from megatron.fault_tolerance.launch.refusing import EXIT_REFUSED

ROOT = Path(__file__).parents[4]
CODE = """
import sys
from megatron.fault_tolerance.launch import command
sys.modules["torch"] = None
command.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no script. Write moe_ft run [-m] SCRIPT ARGS..., such as: torchrun"),
        (["--lr", "1"], "--lr is no script. Write moe_ft run"),
        (["-m"], "there is no script. Write moe_ft run"),
        (["nowhere.py"], "nowhere.py cannot be read: No such file or directory. Give the path"),
        (["."], "'.' is no file. Give the path of the pretraining script"),
        ([""], "'' is no file. Give the path of the pretraining script"),
        (["pipe.py"], "'pipe.py' is no file. Give the path of the pretraining script"),
    ],
)
def test_command_line_without_a_script_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.py")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as end:
        command.main(words)
    assert end.value.code == EXIT_REFUSED
    assert capsys.readouterr().err.startswith(f"moe_ft run: error: {message}")


def test_script_with_a_syntax_error_ends_as_with_python(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("def train(:\n")
    plain = subprocess.run([sys.executable, script], capture_output=True, check=False)
    ours = subprocess.run(
        [sys.executable, "-c", CODE, script], cwd=ROOT, capture_output=True, check=False
    )
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr) != (0, b"")


@pytest.mark.parametrize("is_link", [False, True])
def test_folder_of_the_script_takes_the_first_place_in_the_path(
    is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text("")
    given = tmp_path / "link.py" if is_link else script
    if is_link:
        given.symlink_to(script)
    seen = start(monkeypatch, [str(given), "--lr", "1"], path=["/somewhere", "/else"])
    assert seen == (Target(str(given)), [str(given), "--lr", "1"], [str(script.parent), "/else"])


def test_module_is_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = start(monkeypatch, ["-m", "pack.train", "--lr", "1"], path=["/somewhere"])
    assert seen == (
        Target("pack.train", is_module=True),
        ["pack.train", "--lr", "1"],
        [os.path.realpath(tmp_path)],
    )


def test_checkout_that_is_not_installed_stays_in_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    _, _, path = start(monkeypatch, [str(script)], path=[str(ROOT), "/else"])
    assert path == [str(tmp_path), "/else", str(ROOT)]


def start(
    monkeypatch: pytest.MonkeyPatch, words: list[str], path: list[str]
) -> tuple[Target, list[str], list[str]]:
    """Return the target, the arguments and the path that a started script sees."""
    seen: list[Target] = []

    class Running:
        run = staticmethod(seen.append)

    monkeypatch.setattr(command.importlib, "import_module", lambda name: Running)
    monkeypatch.setattr(sys, "argv", ["moe_ft", "run", *words])
    monkeypatch.setattr(sys, "path", path)
    command.main(words)
    return seen[0], sys.argv, sys.path
