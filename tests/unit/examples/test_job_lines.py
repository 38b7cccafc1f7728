"""Of what a job prints, a reader of an example sees the lines that matter, and no failure is left out."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from examples.job_lines import essential_lines

SHOW = Path(__file__).parents[3] / "examples" / "show.sh"
OWN = "2026-01-02 03:04:05 rank 1 WARNING moe_ft: it is in:"
OUTPUT = f"""using world size: 2
------------------------ arguments ------------------------
  error_injection_rate ............................ 0
2026-01-02 03:04:05 rank 0 moe_ft: on: --moe-ft-strategy is dense
  save_retain_interval ............................ None
-------------------- end of arguments ---------------------
INFO:megatron.core.optimizer:Setting up with config OptimizerConfig(error=None)
Params for bucket 1 (84096 elements):
\tmodule.decoder.layers.3.mlp.fail.weight (param.main_grad.dtype=torch.float32)
 [2026-01-02 03:04:05.6] iteration       10/      40 | consumed samples:    160 | lm loss: 4.860123E+00 |
 [2026-01-02 03:04:05.6] iteration       20/      40 | consumed samples:    320 | grad norm: 1.2 |
 validation loss at iteration 20 | lm loss value: 2.3E+00 |
  no line of a stack
{OWN}
  File "a.py", line 3, in f
done with setup ...
[rank0]: Traceback (most recent call last):
[rank0]:   File "b.py", line 4, in <module>
[rank0]:     f()
[rank0]: ValueError: x
train.py: error: --lr must be positive
{{"level": "INFO", "logger": "moe_ft", "message": "a fact"}}
"""


def test_reader_sees_lines_of_moe_ft_iterations_and_failures() -> None:
    assert list(essential_lines(OUTPUT.splitlines(keepends=True))) == [
        "2026-01-02 03:04:05 rank 0 moe_ft: on: --moe-ft-strategy is dense",
        "iteration 10 of 40, loss 4.860",
        "iteration 20 of 40",
        " validation loss at iteration 20 | lm loss value: 2.3E+00 |",
        *(OWN, '  File "a.py", line 3, in f'),
        "Traceback (most recent call last):",
        *('  File "b.py", line 4, in <module>', "    f()", "ValueError: x"),
        "train.py: error: --lr must be positive",
        '{"level": "INFO", "logger": "moe_ft", "message": "a fact"}',
    ]


@pytest.mark.parametrize(
    ("variable", "arguments", "sees_all"),
    [("", "--log all", False), ("all", "--log", True), ("", "--help", True)],
)
def test_lines_are_shown_after_ctrl_c_too_and_the_exit_code_is_that_of_the_job(
    variable: str, arguments: str, sees_all: bool
) -> None:
    job = "trap '' INT; echo ' moe_ft: begins'; cat; echo usage; echo error; exit 3"
    shown = f"set -euo pipefail; . {SHOW}; trap : INT; ({job}) | show {arguments}"
    with subprocess.Popen(
        ["bash", "-c", shown],
        env={**os.environ, "SHOW": variable},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as terminal:
        assert terminal.stdout is not None
        assert terminal.stdout.readline() == " moe_ft: begins\n"
        os.killpg(terminal.pid, signal.SIGINT)
        rest, _ = terminal.communicate()
    assert (terminal.returncode, rest.split()) == (3, ["usage", "error"][not sees_all :])
