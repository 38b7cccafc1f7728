"""`python -m moe_ft plan`: say in advance what a job will save, and what a failure will cost it."""

import argparse
import math
from collections.abc import Sequence
from itertools import takewhile

from moe_ft.commands.command_line import TrainingCommand, plan_job, read_command
from moe_ft.config.fields import parse_size
from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import Measured
from moe_ft.planning.report import boundary_line
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts

_USAGE = "python -m moe_ft plan [OPTIONS] -- COMMAND LINE OF TRAINING"
_EXAMPLE = (
    "python -m moe_ft plan --bandwidth 25GB --iteration-s 2 -- torchrun --nproc-per-node 8 "
    "pretrain_gpt_moe.py --num-layers 24 ... --moe-ft-strategy NAME"
)
_DEFAULT_RANKS_PER_NODE = 8


def add_plan_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and the options that no flag of training gives."""
    parser = commands.add_parser(
        "plan",
        help="say in advance what a strategy will save and what a failure will lose",
        usage=_USAGE,
        epilog=f"Flags of training, from launcher to --moe-ft-*, come after the --. Example: {_EXAMPLE}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks, where the launcher does not say it"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks of a full node, where the launcher does not say it (default 8)",
    )
    parser.add_argument("--iteration-s", type=float, metavar="S", help="seconds of an iteration")
    parser.add_argument(
        "--update-s",
        type=float,
        default=0.0,
        metavar="S",
        help="of it the optimizer step, which hides no snapshot (default 0)",
    )
    for name, link in (
        ("bandwidth", "device to host"),
        ("network-bandwidth", "to other nodes"),
        ("storage-bandwidth", "host to storage"),
    ):
        parser.add_argument(
            f"--{name}", metavar="BYTES", help=f"{link}, per second and rank, such as 25GB"
        )
    parser.add_argument("--mtbf-s", type=float, metavar="S", help="mean time between failures")
    parser.add_argument(
        "--restart-s",
        type=float,
        default=0.0,
        metavar="S",
        help="from a failure until processes run again (default 0)",
    )
    parser.set_defaults(run=run)


def split_command_line(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of moe_ft itself, and the command line of training that follows the first ``--``.

    Raises:
        ConfigError: if `plan` is given flags of training without a ``--`` before them.
    """
    own = list(takewhile(lambda word: word != "--", words))
    if own[:1] not in (["plan"], ["doctor"], ["convert"]) or {"-h", "--help"} & {*own}:
        return list(words), []
    if own[0] == "plan" and len(own) == len(words):
        raise ConfigError(
            f"plan {' '.join(own[1:])}: plan reads the command line of training, which must follow a --. "
            f"Write it like {_USAGE}; for example {_EXAMPLE}"
        )
    return own, list(words[len(own) + 1 :])


def run(options: argparse.Namespace) -> int:
    """Print the plan of the job that a command line starts."""
    command = read_command(options.of_training)
    world_size, ranks_per_node = _ranks(options, command)
    command.config.validate(world_size)
    measured = Measured(
        iteration_s=options.iteration_s,
        update_s=options.update_s,
        bandwidth=_bandwidth(options, "bandwidth"),
        network_bandwidth=_bandwidth(options, "network_bandwidth"),
        storage_bandwidth=_bandwidth(options, "storage_bandwidth"),
        mtbf_s=options.mtbf_s,
        restart_s=options.restart_s,
    )
    kind = registry.kind_of(command.config.strategy.strategy)
    if kind is None:
        offered = ", ".join(each.name for each in registry.kinds())
        raise ConfigError(
            "--moe-ft-strategy=none checkpoints nothing, so there is nothing to plan. Add one of the "
            f"strategies {offered} to the flags of training."
        )
    job, notes = plan_job(command, measured, world_size=world_size, ranks_per_node=ranks_per_node)
    registry.check(
        job.config,
        ModelFacts(num_experts=job.model.num_experts, num_iterations=job.train_iterations),
    )
    log = boundary_line(job, kind.longest_window(job.config))
    notes += command.config.warnings(job.train_iterations)
    lines = "\n".join(f"note: {line}" for line in notes)
    print("\n\n".join(filter(None, [kind.report(job), *log, lines])))
    return 0


def _ranks(options: argparse.Namespace, command: TrainingCommand) -> tuple[int, int]:
    """Return the ranks of the job and of a node: as given, else as the launcher starts them."""
    for name in ("world_size", "ranks_per_node"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(options, name)} must be a whole number, at least 1. "
                "Give a larger one."
            )
    world_size = options.world_size or command.launch.world_size
    if world_size is None:
        raise ConfigError(
            f"the number of ranks is not known: {command.launch.reason}. Give --world-size N before the --."
        )
    per_node = options.ranks_per_node or command.launch.ranks_per_node or _DEFAULT_RANKS_PER_NODE
    return world_size, min(per_node, world_size)


def _bandwidth(options: argparse.Namespace, name: str) -> float | None:
    """Return the bytes per second that were given, None if none were."""
    text = getattr(options, name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(parse_size(name, text))
        except ConfigError:
            value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(
            f"--{name.replace('_', '-')}={text} must be bytes per second, more than 0. Write it like 25GB or "
            "25e9."
        )
    return value
