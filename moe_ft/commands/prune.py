"""`python -m moe_ft prune`: show or remove old checkpoints on storage."""

import argparse
import math

from moe_ft.commands.directory import reading
from moe_ft.errors import ConfigError
from moe_ft.recovery.inspect.pruning import Rules, prune


def add_prune_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "prune",
        help="show the old checkpoints of a persist directory; --remove removes them",
    )
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
        print("nothing was removed: add --remove to do that")
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
