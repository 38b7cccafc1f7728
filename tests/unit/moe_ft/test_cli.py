"""Commands start without torch, act on no terminal, and one that does not exist is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.files.storage import Storage
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
    heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "triton", "megatron"}
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


@pytest.mark.parametrize("words", [(), ("frobnicate",)])
def test_command_that_does_not_exist_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "error: " in capsys.readouterr().err


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
