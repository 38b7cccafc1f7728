"""`python -m moe_ft clean`: show or remove the host memory of dead jobs."""

import argparse

from moe_ft.config.config import DEFAULT_MEMORY_DIR
from moe_ft.recovery.inspect.cleaning import clean


def add_clean_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "clean",
        help="show the host memory of your dead jobs on this machine; --remove removes it",
    )
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
        print("nothing was removed: add --remove to do that")
    return 1 if options.remove and options.job_id is not None and left else 0
