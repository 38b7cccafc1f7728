"""One state out of a window on storage: `moe_ft convert --densify` starts the training job for that.

Only a recovery makes one state of a window, by running its iterations again, and only the job can run them.
It recovers the newest state, trains one iteration more, and ends by itself; its end leaves a whole state on
storage. recovery/restore.py has the iterations that run again.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ft.command_lines import flag_value
from moe_ft.convert.source import check_is_quiet
from moe_ft.errors import ConfigError
from moe_ft.recovery.inspect.holdings import Holding, find_holdings, newest_holding

_FLAG = "--moe-ft-persist-dir"
_END = ("--exit-interval", "1")  # of what is given twice, argparse takes the last
_KILLED = 128  # as shells have it


def densify(directory: str, iteration: int | None, command: Sequence[str]) -> int:
    """Have a job, which the command starts, make one state of the newest window of a persist directory.

    Returns:
        The exit code of the job, 0 if none is needed.
    """
    if iteration is not None:
        raise ConfigError(
            f"--iteration={iteration} cannot be given with --densify: the job recovers its newest state, and "
            "would leave it for an older one. Leave out --iteration."
        )
    newest = _newest(directory)
    if newest.window == 1:
        print(f"{newest.place} is of one iteration: no job is started", file=sys.stderr)
        return 0
    _check_command(command, directory)
    assert newest.storage is not None
    check_is_quiet(directory, newest.storage)
    print(f"{newest.place} is a window of {newest.window}: starting the job", file=sys.stderr)
    try:
        code = subprocess.run([*command, *_END], check=False).returncode
    except OSError as error:
        raise ConfigError(
            f"--densify cannot start {command[0]}: {error}. Give the command line that starts the job."
        ) from error
    if code:
        code = code if code > 0 else _KILLED - code
        print(f"error: the job of --densify ended with exit code {code}", file=sys.stderr)
    elif (found := _newest(directory)).window > 1:
        raise ConfigError(
            f"--densify needs a job that ends with its state on storage, and {found.place} is still the "
            f"newest there. The job was given {' '.join(_END)} at the end of its command line: a script must "
            "pass that on to the training program."
        )
    return code


def _newest(directory: str) -> Holding:
    """Return the newest checkpoint in a persist directory."""
    found = find_holdings(directory)
    stored = [each for each in found if each.manifest is not None and not each.problem]
    if not stored or stored[0].place == directory.rstrip("/"):
        raise ConfigError(
            f"SRC={directory} must be a persist directory with --densify: the job adds a "
            "checkpoint to it. Name the job's own."
        )
    return newest_holding(stored)


def _check_command(command: Sequence[str], url: str) -> None:
    """Raise ConfigError unless the command line names the directory that is converted."""
    if not command:
        raise ConfigError(
            "--densify needs the command line of the training job, which must follow a --. Write it like "
            "moe_ft convert SRC DST --to torch_dist --densify -- torchrun ... pretrain_gpt_moe.py ..."
        )
    named = flag_value(command, _FLAG)
    if not named or _resolved(named) != _resolved(url):
        found = f"names {named or 'no directory'}"
        raise ConfigError(
            f"--densify: the job must write to SRC={url}, and its command line {found}. Give "
            f"{_FLAG} SRC there."
        )


def _resolved(url: str) -> str:
    return url.rstrip("/") if "://" in url else str(Path(url).resolve())
