"""`python -m moe_ft doctor`: check what usually goes wrong before an expensive run, where it will run."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace

from moe_ft.commands.command_line import LaunchedRanks, TrainingCommand, plan_job, read_command
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.config.fields import parse_size
from moe_ft.config.stock_defects import (
    check_schedule,
    lines_on_defects,
    lines_on_load,
    read_saves,
)
from moe_ft.doctor.examination import Examination
from moe_ft.doctor.job import ExaminedJob
from moe_ft.doctor.meeting import MeetingPlace, find_place
from moe_ft.doctor.rows import CheckRow, Result, refused, warned
from moe_ft.errors import ConfigError
from moe_ft.planning.host_memory import Footprint
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts

_EXAMPLE = (
    "-- torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt_moe.py ... --moe-ft-strategy dense"
)
_LEAST_S = 5.0


def add_doctor_command(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = add_command(
        commands,
        "doctor",
        "check nodes, network and storage before a run",
        "Start it as the run is started (torchrun, srun, or alone); one process per node is enough. The "
        "command line of training, or only its --moe-ft-* flags, follows the --: its directories and sizes "
        "are checked.",
        _EXAMPLE,
        codes="0: nothing failed, 1: something did, 2: the command line cannot be used.",
        usage="%(prog)s [OPTIONS] [-- COMMAND LINE OF TRAINING]",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=180.0,
        metavar="S",
        help="it ends within this time, whoever does not answer (default 180)",
    )
    parser.add_argument(
        "--transfer",
        default="256MiB",
        metavar="SIZE",
        help="bytes to send to each peer, and to write to storage, in about a second (default 256MiB)",
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks, where the launcher does not say it"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="of training, where it does not say that"
    )
    parser.add_argument("--strict", action="store_true", help="count warnings as failures")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine; return 1 if something failed."""
    for name in ("world_size", "ranks_per_node"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(options, name)} must be at least 1. Give a larger one."
            )
    if not _LEAST_S <= options.timeout < float("inf"):
        raise ConfigError(
            f"--timeout={options.timeout:g} must be at least {_LEAST_S:g} seconds. Give a larger one."
        )
    transfer_bytes = parse_size("--transfer", options.transfer)
    if transfer_bytes < 1:
        raise ConfigError(
            f"--transfer={options.transfer} must be at least 1 byte. Give a larger one."
        )
    place = find_place(os.environ)
    return Examination(
        job=_read_job(options, options.of_training, place),
        place=place,
        timeout_s=options.timeout,
        transfer_bytes=transfer_bytes,
        is_strict=options.strict,
        is_json=options.json,
    ).run()


def _read_job(
    options: argparse.Namespace, words: Sequence[str], place: MeetingPlace
) -> ExaminedJob:
    """Return the job whose command line is given, with rows on what a start would refuse."""
    if not words:
        return ExaminedJob()
    known = read_saves(words)
    defects = [
        warned(check, "command line", *line.split(". Instead, "))
        for check, lines in (("saves", lines_on_defects(known)), ("loads", lines_on_load(known)))
        for line in lines
    ]
    try:
        check_schedule(known)
    except ConfigError as error:
        defects.append(refused("flags", "command line", error))
    command = read_command(words)
    ranks = _ranks(options, command.launch, place)
    job, footprint, rows = _plan(command, ranks)
    return ExaminedJob(
        config=command.config,
        is_given=True,
        rows=[*rows, *defects],
        restarts=command.launch.restarts,
        backend=command.launch.backend,
        grace_s=command.launch.grace_s,
        ranks=ranks,
        num_stages=1 if job is None else job.num_stages,
        footprint=footprint,
    )


def _unplanned(error: ConfigError) -> CheckRow:
    remedy = "Sizes are not compared with memory and storage; everything else is checked."
    return refused("plan", "command line", error, Result.WARN, remedy)


def _ranks(
    options: argparse.Namespace, launch: LaunchedRanks, place: MeetingPlace
) -> tuple[int, int] | None:
    """Return the ranks of the job and of a node: as given, as the launcher says, or as doctor was started."""
    world_size = options.world_size or launch.world_size
    per_node = options.ranks_per_node or launch.ranks_per_node
    if world_size is None and not place.is_alone:
        world_size, per_node = place.world_size, per_node or place.local_world_size
    if world_size is None or per_node is None:
        return None
    return world_size, min(per_node, world_size)


def _plan(
    command: TrainingCommand, ranks: tuple[int, int] | None
) -> tuple[PlannedJob | None, Footprint | None, list[CheckRow]]:
    """Return the job and the room that it needs, None if that is not known, and rows on why."""
    config = command.config
    kind = registry.kind_of(config.strategy.strategy)
    if kind is None or not any(word.startswith("--num-layers") for word in command.flags):
        return None, None, []
    if ranks is None:
        error = ConfigError(
            "the number of ranks is not known: give --world-size and --ranks-per-node"
        )
        return None, None, [_unplanned(error)]
    try:
        config.validate(ranks[0])
    except ConfigError as error:
        return None, None, [refused("flags", "command line", error)]
    try:
        job, _ = plan_job(command, MeasuredTimes(), world_size=ranks[0], ranks_per_node=ranks[1])
    except ConfigError as error:
        return None, None, [_unplanned(error)]
    try:
        registry.check(config, ModelFacts(num_experts=job.model.num_experts, num_iterations=None))
    except ConfigError as error:
        return job, None, [refused("flags", "command line", error)]
    footprint = kind.plan(job).footprint
    log_bytes = job.boundary_bytes(kind.longest_window(config))
    share = replace(footprint.share, boundary_bytes=log_bytes)
    return job, replace(footprint, share=share), []
