"""`moe_ft inspect`, `verify`, `diff` and `rescue`: commands that read directories of checkpoints.

Others that read one turn its errors into those of its argument with `reading`.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager

from moe_ft.commands.parsers import Commands, add_command
from moe_ft.config.config import DEFAULT_MEMORY_DIR
from moe_ft.config.rules import check_holds_no_secret
from moe_ft.errors import ConfigError, MoeFtError
from moe_ft.recovery.inspect.boundary_logs import render_logs
from moe_ft.recovery.inspect.holdings import find_holdings, render_holdings
from moe_ft.recovery.inspect.rescue import rescue
from moe_ft.recovery.inspect.verification import verify
from moe_ft.saying import silence_dependencies


def add_reading_commands(commands: Commands) -> None:
    """Add the commands and their flags."""
    inspecting = add_command(
        commands,
        "inspect",
        "show what is in checkpoints",
        "For each checkpoint: its iterations, ranks, settings and sizes, and what is missing. Of a memory "
        "directory: what a restart would find.",
        "/shared/checkpoints --units",
    )
    verifying = add_command(
        commands,
        "verify",
        "read and check every byte of checkpoints",
        "Sizes, checksums and completeness; nothing is changed. Lines begin with `ok` or `WRONG`.",
        "/shared/checkpoints",
        codes="0: all is right, 1: something is wrong, 2: it cannot be read.",
    )
    for parser, run in ((inspecting, _inspect), (verifying, _verify)):
        parser.add_argument(
            "directory",
            metavar="DIR",
            help="a persist directory (or fsspec URL), one of its iter_* directories, or a memory directory",
        )
        parser.set_defaults(run=run)
    for name, what in (
        ("--units", "list every unit of the newest state"),
        ("--settings", "list the settings with Megatron's defaults, too"),
    ):
        inspecting.add_argument(name, action="store_true", help=what)
    comparing = add_command(
        commands,
        "diff",
        "show which units of two states differ",
        "A unit is an expert, or what is left of a layer. Bits are compared, whatever the layouts.",
        "/shared/run_a /shared/run_b --what all",
        codes="0: all units are equal, 1: some differ, 2: one cannot be read.",
    )
    for name, which in (("first", "A"), ("second", "B")):
        comparing.add_argument(
            name,
            metavar=which,
            help="a persist directory or fsspec URL (its newest checkpoint is taken), one of its "
            "iter_* directories, or a memory directory",
        )
    comparing.add_argument(
        "--what",
        default="weights",
        choices=("weights", "all"),
        help="all: compare masters and moments too (default weights)",
    )
    comparing.set_defaults(run=_diff)
    _add_rescue(commands)


def _add_rescue(commands: Commands) -> None:
    parser = add_command(
        commands,
        "rescue",
        "write what a dead job has left in memory to storage",
        "Run it on every node of the job. The job continues from there on other machines.",
        "my_job --to /shared/checkpoints",
        codes="0: a checkpoint is complete, 1: a part is missing, 2: nothing can be read or written.",
    )
    parser.add_argument("job_id", metavar="JOB", help="--moe-ft-job-id of the job")
    parser.add_argument(
        "--to", required=True, metavar="URL", help="a persist directory, or an fsspec URL of one"
    )
    parser.add_argument(
        "--memory-dir",
        default=DEFAULT_MEMORY_DIR,
        metavar="DIR",
        help=f"--moe-ft-memory-dir of the job (default {DEFAULT_MEMORY_DIR})",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait so long after the last file of another node, on which this runs too (default 0)",
    )
    parser.set_defaults(run=_rescue)


def _rescue(options: argparse.Namespace) -> int:
    """Print what is written; return 1 if it is no checkpoint."""
    if not (math.isfinite(options.wait) and options.wait >= 0):
        raise ConfigError(f"--wait={options.wait} must be a number of seconds of at least 0.")
    with reading(options.to, "--to", changes=True):
        return int(not rescue(options.memory_dir, options.job_id, options.to, options.wait))


def _inspect(options: argparse.Namespace) -> int:
    with reading(options.directory):
        text = render_holdings(
            find_holdings(options.directory),
            lists_units=options.units,
            lists_settings=options.settings,
        )
        logs = render_logs(options.directory)
    print("\n\n".join(filter(None, [text, logs])))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Print what is right and what is wrong; return 1 if something is."""
    with reading(options.directory):
        right, wrong = verify(options.directory)
    for line in right:
        print(f"ok     {line}")
    for line in wrong:
        print(f"WRONG  {line}")
    return 1 if wrong else 0


def _diff(options: argparse.Namespace) -> int:
    """Print the differences; return 1 if there are any."""
    silence_dependencies()
    # Here, since most commands need no torch.
    from moe_ft.convert.difference import compare, render
    from moe_ft.convert.source import open_source

    with reading(options.first):
        first = open_source(options.first)
    with reading(options.second):
        second = open_source(options.second)
    print(f"A: {first.place}, iteration {first.iteration}")
    print(f"B: {second.place}, iteration {second.iteration}")
    with reading(f"{options.first} {options.second}"):
        found = list(compare(first, second, with_optimizer=options.what == "all"))
    print(render(found))
    return int(any(not each.is_equal for each in found))


@contextmanager
def reading(directory: str, name: str = "DIR", *, changes: bool = False) -> Iterator[None]:
    """Turn an error while a directory or fsspec URL is read, or changed, into a ConfigError.

    Args:
        name: of the argument, for messages.
        changes: whether something in it is removed.
    """
    if not directory.strip().removeprefix("file://"):
        raise ConfigError(
            f"{name}='{directory}' is empty: an unset variable? Name a directory or fsspec URL; the current "
            "directory is a dot."
        )
    check_holds_no_secret(name, directory)
    # Packages that implement a protocol raise errors of their own, such as botocore's.
    kinds = (Exception,) if "://" in directory else (OSError, ValueError, ImportError)
    try:
        yield
    except MoeFtError:
        raise
    except kinds as error:
        raise ConfigError(
            f"{name}={directory} cannot be {'changed' if changes else 'read'}: "
            f"{type(error).__name__}: {error}. Name a directory that you may "
            f"{'change' if changes else 'read'}, or an fsspec URL whose package is installed."
        ) from error
