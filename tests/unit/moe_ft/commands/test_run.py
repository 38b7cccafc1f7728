"""`moe_ft run` refuses a script that cannot run before Megatron is imported, and starts it as Python does.

`moe_ft keep` passes everything after it to the agent; help comes without one.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_ft.cli import main
from moe_ft.cluster.options import HELP, KeepOptions
from moe_ft.cluster.target import RUNNER_OF_BRIDGE
from moe_ft.commands import run
from moe_ft.commands.run import is_given
from moe_ft.loop.refusing import EXIT_REFUSED

ROOT = Path(__file__).parents[4]
CODE = """
import sys
from moe_ft.commands.run import run_script
sys.modules["torch"] = None
run_script(sys.argv[1:])
"""


def test_all_words_go_to_the_script_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    words = [str(tmp_path / "train.py"), "--help", "--", "-m", "plan", "--lr=1"]
    assert start(monkeypatch, words, path=["/else"])[1] == words


def test_error_of_a_script_is_not_one_of_the_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(name: str, *, is_module: bool) -> None:
        raise BrokenPipeError("of the script")

    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(run=fail))
    monkeypatch.setattr(sys, "argv", [])  # put back afterwards
    monkeypatch.setattr(sys, "path", ["/else"])
    with pytest.raises(BrokenPipeError, match="of the script"):
        main(["run", "train.py"])


def test_help_of_run_needs_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_given("run", ["run", "--help"])
    with pytest.raises(SystemExit) as end:
        main(["run", "--help"])
    assert not end.value.code
    assert "moe_ft run [FLAGS... --] [-m] SCRIPT ARGS..." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "there is no script. Write moe_ft run [FLAGS... --] [-m] SCRIPT ARGS..., such as: torchrun",
        ),
        (["--lr", "1"], "--lr is no script. Write moe_ft run"),
        (["-m"], "there is no script. Write moe_ft run"),
        (["nowhere.py"], "nowhere.py cannot be read: No such file or directory. Give the path"),
        (["."], "'.' is no file. Give the path of the pretraining script"),
        (["-m", "no.such"], "-m no.such: there is no such module. Give one that Python finds"),
        (["-m", ".x"], "-m .x: there is no such module. Give one that Python finds"),
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
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        run.run_script(words)
    assert end.value.code == EXIT_REFUSED
    assert capsys.readouterr().err.startswith(f"moe_ft run: error: {message}")


FRONT = ("--moe-ft-strategy", "dense")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*FRONT, "x.py"), "--moe-ft-strategy is in front of the script, and no `--` ends"),
        ((*FRONT, "--"), "there is no script. Write moe_ft run [FLAGS... --]"),
        (
            ("--moe-ft-stategy", "dense", "--", "x.py"),
            "unrecognized arguments: --moe-ft-stategy. Did you mean --moe-ft-strategy?",
        ),
        ((*FRONT, "--strategy", "--", "x.py"), "--strategy in front of a script must be flags of"),
        ((*FRONT, "--moe-ft-keep", "3", "--", "x.py"), "--moe-ft-keep=3 changes nothing without"),
        ((*FRONT, "--", "x.py"), "flags of moe_ft in front of a script mean a job of Megatron-Br"),
        ((*FRONT, "--", "x.py", "--moe-ft-keep=3"), "--moe-ft-keep after the script of a Megatron"),
    ],
)
def test_wrong_flags_in_front_are_refused(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(run, "is_found", lambda name: False)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        run.run_script(words)
    assert end.value.code == EXIT_REFUSED
    assert capsys.readouterr().err.startswith(f"moe_ft run: error: {message}")


def test_script_of_bridge_does_not_see_flags_in_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    module = SimpleNamespace(run=lambda *args, **kwargs: seen.append((args, kwargs, sys.argv)))
    monkeypatch.setattr(importlib, "import_module", {RUNNER_OF_BRIDGE: module}.__getitem__)
    monkeypatch.setattr(run, "is_found", lambda name: True)
    monkeypatch.setattr(sys, "argv", ["moe_ft"])
    monkeypatch.setattr(sys, "path", ["/else"])
    script = tmp_path / "train.py"
    script.touch()
    for target in ([str(script)], ["-m", "wave"]):
        main(["run", *FRONT, "--", *target, "a.b=1", "--", "x"])
    arguments = ["a.b=1", "--", "x"]
    assert seen == [
        ((str(script), list(FRONT)), {"is_module": False}, [str(script), *arguments]),
        (("wave", list(FRONT)), {"is_module": True}, ["wave", *arguments]),
    ]


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
    assert seen == ((str(given), False), [str(given), "--lr", "1"], [str(script.parent), "/else"])


def test_module_is_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").touch()
    seen = start(monkeypatch, ["-m", "pack.train", "--lr", "1"], path=["/somewhere"])
    assert seen == (
        ("pack.train", True),
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


def test_all_words_of_keep_go_to_the_agent_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[KeepOptions] = []

    def be_agent(options: KeepOptions, memory_of: object) -> None:
        seen.append(options)
        raise SystemExit(0)

    monkeypatch.setattr("moe_ft.commands.launch.speak_for", lambda name: None)
    monkeypatch.setattr("moe_ft.cluster.agent.main", be_agent)
    words = ["-m", "moe_ft", "--help", "-m", "plan", "--lr=1"]
    with pytest.raises(SystemExit):
        main(["keep", "--", *words])
    assert [each.words for each in seen] == [tuple(words)]


def test_help_of_keep_needs_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_given("keep", ["keep", "--help"])
    with pytest.raises(SystemExit) as end:
        main(["keep", "--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    assert all(f"--{name} " in text for name in HELP)
    assert "--nodes N|MIN:N " in text


def test_agent_imports_next_to_nothing() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "moe_ft", "keep"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no script" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "moe_ft.cluster.agent" in imported
    assert not imported & {"torch", "numpy", "fsspec", "moe_ft.cli"}


def start(
    monkeypatch: pytest.MonkeyPatch, words: list[str], path: list[str]
) -> tuple[tuple[str, bool], list[str], list[str]]:
    """Return the target, the arguments and the path that a started script sees."""
    seen: list[tuple[str, bool]] = []

    def start_script(name: str, *, is_module: bool) -> None:
        seen.append((name, is_module))

    launcher = SimpleNamespace(run=start_script)
    monkeypatch.setattr(importlib, "import_module", {run.LAUNCHER: launcher}.__getitem__)
    monkeypatch.setattr(sys, "argv", ["moe_ft", "run", *words])
    monkeypatch.setattr(sys, "path", path)
    main(["run", *words])
    return seen[0], sys.argv, sys.path
