"""The lines that add moe_ft to a batch script are those that the page shows, and no others.

tests/slurm/test_your_script.py submits the scripts.
"""

import re
import signal
import subprocess

import pytest

from tests.unit.examples.model_files import ROOT

SLURM = ROOT / "examples" / "slurm"
PAGE = (ROOT / "docs" / "your_sbatch.md").read_text()
SCRIPTS = ("add_to_yours.sbatch", "add_to_yours_srun.sbatch")


def parts(script: str) -> tuple[list[str], list[str], list[str]]:
    """Return the lines that stay, those that are added, and those that they replace."""
    stays, added, replaced, is_ours = list[str](), list[str](), list[str](), False
    for line in (SLURM / script).read_text().splitlines():
        if line in ("# moe_ft >>>", "# <<<"):
            is_ours = line == "# moe_ft >>>"
        elif is_ours and line.startswith("# was: "):
            replaced.append(line.removeprefix("# was: "))
        elif is_ours:
            added.append(line)
        else:
            stays.append(line)
    return stays, added, replaced


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_without_the_added_lines_is_an_ordinary_one(script: str) -> None:
    stays, added, replaced = parts(script)
    before = "\n".join([*stays, *replaced]) + "\n"
    subprocess.run(["bash", "-n"], input=before, text=True, check=True)
    code = [line for line in (*stays, *replaced) if not re.match(r"#(?!SBATCH)", line)]
    assert not re.search(r"moe.ft|restarts", "\n".join(code))
    statements = "\n".join(added).replace("\\\n", "").splitlines()
    assert len(statements) <= 8


def test_page_shows_the_lines_of_the_scripts() -> None:
    first, second = (
        [line for line in block.splitlines() if line]
        for block in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    )
    for shown, script in ((first, SCRIPTS[0]), (second, SCRIPTS[1])):
        _, added, replaced = parts(script)
        plus = [line[2:] for line in shown if line.startswith("+ ")]
        minus = [line[2:] for line in shown if line.startswith("- ")]
        assert len(plus) + len(minus) == len(shown)
        assert minus == replaced
        assert plus == (added if shown is first else added[-len(plus) :])


def test_rank_has_torchs_variables_and_the_code_of_its_program_but_for_sigterm() -> None:
    given = {
        "PATH": "/usr/bin:/bin",
        "SLURM_PROCID": "9",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    }
    words = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE; exit $0"
    for code, expected in ((0, 0), (3, 3), (128 + signal.SIGTERM, 1)):
        done = subprocess.run(
            [SLURM / "rank.sh", "bash", "-c", words, str(code)],
            env=given,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert (done.returncode, done.stdout) == (expected, "9 16 1 8\n")
