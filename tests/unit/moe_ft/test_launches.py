"""Starts of a launcher: which are restarts, and which follow each other on a node."""

import os
import subprocess
import sys

import msgspec
import pytest

from moe_ft.launches import Launch, launch_of

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
KEPT = {**TORCHRUN, "MOE_FT_KEEP_TOKEN": "secret"}
SLURM = {"SLURM_JOB_ID": "7"}
ONCE, TWICE = {"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RESTART_COUNT": "2"}
REQUEUED = {"SLURM_RESTART_COUNT": "1"}
OTHER = {"parent": "another"}


def launch(variables: dict[str, str]) -> Launch:
    """Return the launch of this process, or one whose parent is another process."""
    found = launch_of(variables)
    return msgspec.structs.replace(found, agent="another") if "parent" in variables else found


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        (TORCHRUN | TWICE, True),
        (REQUEUED, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0"} | REQUEUED, True),
        ({"SLURM_RESTART_COUNT": ""}, False),
        ({"SLURM_RESTART_COUNT": "-1"}, False),
    ],
)
def test_restart_is_what_torchrun_slurm_or_a_script_have_counted(
    environment: dict[str, str], expected: bool
) -> None:
    assert launch_of(environment).is_counted == expected


@pytest.mark.parametrize(
    ("before", "now", "repeats", "follows"),
    [
        # An agent that lives on starts ranks again also without counting it.
        (TORCHRUN, TORCHRUN, True, True),
        (TORCHRUN, TORCHRUN | ONCE, True, True),
        (TORCHRUN, TORCHRUN | TWICE, True, False),
        (TORCHRUN | OTHER, TORCHRUN, False, False),
        (TORCHRUN | OTHER, TORCHRUN | ONCE, False, False),
        # SLURM gives the job a new agent.
        (TORCHRUN | SLURM | OTHER, TORCHRUN | SLURM | REQUEUED, True, True),
        (TORCHRUN | SLURM, TORCHRUN | {"SLURM_JOB_ID": "8"}, True, False),
        # Without an agent counts alone tell it.
        (SLURM, SLURM, False, False),
        (SLURM, SLURM | ONCE, True, True),
        (SLURM, SLURM | TWICE, True, False),
        # A script starts `keep` again, whose own starts are counted from 0 then.
        (KEPT | OTHER, KEPT | ONCE, True, False),
        (KEPT | OTHER, KEPT, False, False),
        (KEPT, KEPT, True, True),
    ],
)
def test_launcher_is_known_again_and_whether_a_start_was_in_between(
    before: dict[str, str], now: dict[str, str], repeats: bool, follows: bool
) -> None:
    known, own = launch(before), launch(now)
    assert (own.repeats(known), own.follows(known)) == (repeats, follows)


def test_agent_has_a_name_of_its_own_that_its_ranks_share() -> None:
    code = "import os; from moe_ft.launches import launch_of; print(launch_of(os.environ).agent)"
    command, variables = [sys.executable, "-c", code], {**os.environ, **TORCHRUN}
    names = {subprocess.check_output(command, env=variables, text=True).strip() for _ in range(2)}
    assert len(names - {"", launch_of(TORCHRUN).agent}) == 1
    assert launch_of({}).agent == ""
