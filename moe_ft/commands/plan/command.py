"""Entry of ``python -m moe_ft plan``: the strategies that can be planned.

A further strategy is one file beside this one and one line in `STRATEGIES`.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moe_ft.commands.plan.dense import render_dense
from moe_ft.commands.plan.flags import add_flags
from moe_ft.commands.plan.partial import add_partial_flags, render_partial
from moe_ft.commands.plan.sparse import render_sparse
from moe_ft.commands.plan.sparse_flags import add_sparse_flags


class PlannedStrategy(NamedTuple):
    """What a strategy adds to the command."""

    add_flags: Callable[[argparse.ArgumentParser], None]
    render: Callable[[argparse.Namespace], str]  # raises ConfigError for flags that do not fit


STRATEGIES: Mapping[str, PlannedStrategy] = {
    "dense": PlannedStrategy(lambda parser: None, render_dense),
    "partial": PlannedStrategy(add_partial_flags, render_partial),
    "sparse": PlannedStrategy(add_sparse_flags, render_sparse),
}


def add_plan_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its flags to those of ``python -m moe_ft``."""
    parser = commands.add_parser(
        "plan", help="say beforehand what a strategy will write and what a fault will lose"
    )
    parser.add_argument("--strategy", required=True, choices=tuple(STRATEGIES))
    add_flags(parser)
    for strategy in STRATEGIES.values():
        strategy.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan of the strategy that was named.

    Raises:
        ConfigError: if the flags do not fit together.
    """
    print(STRATEGIES[options.strategy].render(options))
    return 0
