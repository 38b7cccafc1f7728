"""`moe_ft clean` and `prune`: show or remove memory of dead jobs, and old checkpoints on storage."""

import argparse
import math

from moe_ft.commands.directory import reading
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.config.config import DEFAULT_MEMORY_DIR
from moe_ft.errors import ConfigError
from moe_ft.recovery.inspect.cleaning import clean
from moe_ft.recovery.inspect.pruning import Rules, prune

_REMOVES_NOTHING = "nothing was removed: add --remove to do that"


def add_removing_commands(commands: Commands) -> None:
    """Add both commands and their flags."""
    _add_clean(
        add_command(
            commands,
            "clean",
            "show the host memory of your dead jobs on this machine; --remove removes it",
            "Memory of a job that is alive stays. Save what is worth it first: `moe_ft rescue`.",
            "--job-id my_job --remove",
            codes="0: done, 1: the job that was to be removed is still there, 2: it cannot be read.",
        )
    )
    _add_prune(
        add_command(
            commands,
            "prune",
            "show the old checkpoints of a persist directory; --remove removes them",
            "The newest N of each run stay, and what other options name.",
            "/shared/checkpoints --keep 3 --every 1000 --remove",
        )
    )


def _add_clean(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-dir",
        default=DEFAULT_MEMORY_DIR,
        metavar="DIR",
        help=f"--moe-ft-memory-dir of the jobs (default {DEFAULT_MEMORY_DIR})",
    )
    parser.add_argument("--job-id", metavar="NAME", help="only this job's, whatever its age")
    parser.add_argument(
        "--older-than",
        type=float,
        default=60.0,
        metavar="MINUTES",
        help="without --job-id: leave what changed more recently (default 60)",
    )
    parser.add_argument(
        "--remove", action="store_true", help="remove it; without, only say what would be removed"
    )
    parser.set_defaults(run=_clean)


def _clean(options: argparse.Namespace) -> int:
    """Print what is removed and left; return 1 if the job that was to be removed is still there."""
    removed, left = clean(
        options.memory_dir, options.job_id, options.older_than * 60, removes=options.remove
    )
    for line in removed:
        print(f"{'removed' if options.remove else 'would remove'} {line}")
    for line in left:
        print(f"left {line}")
    if not removed and not left:
        print(f"no memory of jobs under {options.memory_dir}")
    if removed and not options.remove:
        print(_REMOVES_NOTHING)
    return 1 if options.remove and options.job_id is not None and left else 0


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="a persist directory, or an fsspec URL of one"
    )
    parser.add_argument(
        "--keep",
        type=int,
        required=True,
        metavar="N",
        help="keep the newest N of each run, and of each of its branches",
    )
    parser.add_argument(
        "--every", type=int, default=0, metavar="N", help="also keep iterations that N divides"
    )
    parser.add_argument(
        "--days",
        type=float,
        default=0.0,
        metavar="D",
        help="also keep what was written in the last D days",
    )
    parser.add_argument(
        "--remove", action="store_true", help="remove the others; without, only say what would go"
    )
    parser.set_defaults(run=_prune)


def _prune(options: argparse.Namespace) -> int:
    """Print what goes and what stays."""
    rules = Rules(keep=options.keep, every=options.every, days=options.days)
    _check(rules)
    with reading(options.directory, changes=options.remove):
        found = prune(options.directory, rules, removes=options.remove)
    for each in found:
        goes = "removed" if options.remove else "would remove"
        print(f"{'kept' if each.reason else goes} {each}")
    gone = [each for each in found if not each.reason]
    if gone and not options.remove:
        print(_REMOVES_NOTHING)
    if not gone:
        print("no checkpoint has to go")
    return 0


def _check(rules: Rules) -> None:
    if rules.keep < 1:
        raise ConfigError(
            f"--keep={rules.keep} must be at least 1: the newest checkpoint always stays. To remove "
            "everything, remove the directory."
        )
    if rules.every < 0:
        raise ConfigError(f"--every={rules.every} must be at least 0. Leave it out to keep none.")
    if not (math.isfinite(rules.days) and rules.days >= 0):
        raise ConfigError(f"--days={rules.days} must be a number of days of at least 0.")
