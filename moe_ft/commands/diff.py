"""`python -m moe_ft diff`: which units of two states differ, by how much, and how old each is."""

import argparse

from moe_ft.commands.directory import reading


def add_diff_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "diff", help="show which units of two states differ; exit code 1 if any does"
    )
    for name, which in (("first", "A"), ("second", "B")):
        parser.add_argument(
            name,
            metavar=which,
            help="a persist directory (or fsspec URL), of which the newest checkpoint is taken, one of its "
            "iter_* directories, or a memory directory",
        )
    parser.add_argument(
        "--what",
        default="weights",
        choices=("weights", "all"),
        help="all: compare masters and moments too (default weights)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the differences; return 1 if there are any."""
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
