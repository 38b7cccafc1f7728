"""Commands start without torch, act on no terminal, and one that does not exist is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ft.cli import GROUPS, main
from moe_ft.files.storage import Storage
from moe_ft.installation import describe
from moe_ft.loop.refusing import refuse
from moe_ft.saying import say
from tests.unit.moe_ft.builders import fill_region, make_identity, persist_checkpoint
from tests.unit.moe_ft.commands.runs import write_run
from tests.unit.moe_ft.recovery.jobs import leave_job

ROOT = Path(__file__).parents[3]
# Runs commands one after the other, until one imports a module that brings tensors.
CODE = """
import json, sys
from moe_ft.cli import main
for words in json.loads(sys.argv[1]):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    # `megatron` alone is a namespace without a file: looking for megatron.core imports it.
    loaded = [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]
    heavy = {name.partition(".")[0] for name in loaded} & {"torch", "triton", "megatron"}
    assert not code, f"{words} ended with {code}"
    assert not heavy, f"{words} imported {heavy}"
print("all commands ran")
"""
COMMANDS = (
    ("--help",),
    ("inspect", "STORAGE", "--units"),
    ("inspect", "MEMORY"),
    ("verify", "STORAGE"),
    ("verify", "MEMORY"),
    ("clean", "--memory-dir", "JOBS"),
    ("clean", "--memory-dir", "JOBS", "--remove"),
    ("report", "EVENTS"),
    ("flags", "--all"),
    ("plan", "--help"),
    ("convert", "--help"),
    ("doctor", "--transfer", "1MiB", "--", "--moe-ft-memory-dir", "JOBS", "--moe-ft-job-id", "a"),
)


def test_no_command_but_plan_imports_torch(tmp_path: Path) -> None:
    places = {each: tmp_path / each for each in ("STORAGE", "MEMORY", "JOBS", "EVENTS")}
    persist_checkpoint(Storage(str(places["STORAGE"])), 10, make_identity(world_size=2))
    fill_region(places["MEMORY"] / "job/node-a/rank_00000")
    leave_job(places["JOBS"], "dead")
    write_run(places["EVENTS"], 0, [5.0, 4.0]).write("end", 2, reason="finished")
    commands = [[str(places.get(word, word)) for word in words] for words in COMMANDS]
    found = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("all commands ran\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "a command is missing. moe_ft --help lists them."),
        ("zzzz", "there is no command zzzz. moe_ft --help lists them."),
        ("reprot x", "there is no command reprot. Did you mean report?"),
        ("--verson", "unrecognized arguments: --verson. Did you mean --version?"),
        ("prune x --kep=3", "prune: error: unrecognized arguments: --kep. Did you mean --keep?"),
        ("report x --jsn", "report: error: unrecognized arguments: --jsn. Did you mean --json?"),
        (
            "diff a b --what weight",
            "diff: error: --what=weight must be one of weights, all. Did you",
        ),
    ],
)
def test_words_that_no_command_knows_are_refused_with_what_may_be_meant(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(words)
    return capsys.readouterr().out


def test_help_lists_every_command_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    listed = re.findall(r"^  (\w+) +\w", printed(capsys, "--help"), re.MULTILINE)
    assert listed == [each for names in GROUPS.values() for each in names]


@pytest.mark.parametrize("command", [each for names in GROUPS.values() for each in names])
def test_help_of_a_command_says_what_it_does_with_an_example_and_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, command, "--help")
    assert text.startswith(f"usage: moe_ft {command} ")
    assert re.search(
        rf"\n\n[A-Z][^\n]*\.[\s\S]*\nExample:\n  moe_ft {command} .*\n[\s\S]*Exit code: ", text
    )
    assert max(map(len, text.splitlines())) < 125


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/env/bin/moe_ft", "moe_ft"),
        ("/env/moe_ft/__main__.py", "python -m moe_ft"),
        ("/env/pytest/__main__.py", "moe_ft"),
    ],
)
def test_help_names_the_program_as_it_was_called(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path])
    assert printed(capsys, "--help").startswith(f"usage: {name} COMMAND ...")
    assert f"\n  {name} verify /shared" in printed(capsys, "verify", "--help")


def test_version_is_an_option_of_the_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"{describe()}\n"


ACTING = "\x1b]0;t\x07\x9b31m\u202e[red]x[/nonsense][link=http://x]y[/link]"


@pytest.mark.parametrize("command", ["report", "watch --once", "inspect", "verify"])
def test_text_of_files_does_nothing_to_a_terminal(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "\x1b]0;t\x07"
    if command in ("inspect", "verify"):
        persist_checkpoint(Storage(str(folder)), 10, make_identity())
    else:
        log = write_run(folder, 0, [5.0])
        log.write("start", 1, pid=1, host=ACTING, world_size=1)
        log.write("degraded", 1, part=ACTING, reason=ACTING)
        log.write("end", 1, reason=ACTING)
    assert main([*command.split(), str(folder)]) == 0
    assert main([*command.split(), str(tmp_path / ACTING)])
    said = capsys.readouterr()
    assert not set(said.out + said.err) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert "\\x1b]0;t\\x07" in said.out
    assert "\\x1b]0;t\\x07\\x9b31m\\u202e[red]x" in said.err


def test_refusals_and_lines_of_a_rank_do_nothing_to_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(ACTING)
    with pytest.raises(SystemExit):
        refuse(ACTING, "moe_ft run")
    assert not set(capsys.readouterr().err) & {"\x1b", "\x07", "\x9b", "\u202e"}
