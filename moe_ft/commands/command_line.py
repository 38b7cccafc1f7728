"""Command lines that start training: the launcher's words, the flags of moe_ft, and the job that starts.

Nothing here imports Megatron. What builds its model lies above: it is found by name, when a job is planned.
"""

import argparse
import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import PurePath
from typing import Any, NoReturn

from moe_ft.cluster.options import GRACE_S, split_options
from moe_ft.command_lines import FLAG_PREFIX
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.flags import config_from_words
from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from moe_ft.spelling import explained
from moe_ft.strategies import registry

PLANNER = "megatron.fault_tolerance.program.plan"
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
AGENTS = ("launch", "keep")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedRanks:
    """Ranks that a launcher starts, None where its words do not say how many.

    Attributes:
        reason: why the world size is not known.
        restarts: whether torchrun may start the ranks again.
        backend: torchrun's --rdzv-backend; None for other launchers.
        grace_s: of `launch` and `keep`, from SIGTERM to SIGKILL; None for other launchers.
    """

    world_size: int | None = None
    ranks_per_node: int | None = None
    reason: str = ""
    restarts: bool = False
    backend: str | None = None
    grace_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCommand:
    """A command line that starts training.

    Attributes:
        launcher: all words before the program; none if only flags were given.
        program: the script that trains; empty if only flags were given.
        flags: of training, with their values.
        runs_script: whether a script of one's own reads them too.
    """

    launch: LaunchedRanks
    launcher: tuple[str, ...] = ()
    program: str = ""
    flags: tuple[str, ...]
    config: MoeFtConfig
    runs_script: bool = False


def read_command(words: Sequence[str]) -> TrainingCommand:
    """Read a command line that starts training, or only its flags. Megatron's are not looked at.

    Raises:
        ConfigError: if a flag of moe_ft is unknown or cannot be read.
    """
    launcher, program, flags = _split(words)
    choices = {"strategy": registry.names()}
    config, others = config_from_words(flags, registry.option_types(), choices)
    if {"-h", "--help"} & {*others}:
        raise ConfigError(
            "--help starts no training. For help, leave out the command line of training."
        )
    return TrainingCommand(
        launch=read_launch(launcher),
        launcher=tuple(launcher),
        program=program,
        flags=tuple(flags),
        config=config,
        runs_script=_runs_script(launcher),
    )


def _runs_script(launcher: Sequence[str]) -> bool:
    """Return whether `moe_ft run` runs the program of a command line, also that which `launch` adds."""
    names = [PurePath(word).name for word in launcher]
    return names[-2:] == ["moe_ft", "run"] or ("moe_ft", "launch") in pairwise(names)


def plan_job(
    command: TrainingCommand, measured: MeasuredTimes, *, world_size: int, ranks_per_node: int
) -> tuple[PlannedJob, list[str]]:
    """Return the job that a command line starts, and notes on how it is planned.

    Raises:
        ConfigError: if training would refuse the flags, or their job cannot be planned.
    """
    found: tuple[PlannedJob, list[str]] = _planner().plan_job(
        command.flags,
        command.config,
        measured,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        runs_script=command.runs_script,
    )
    return found


def planned_start(command: TrainingCommand, *, world_size: int, on_gpus: bool) -> Any:
    """Return the rules that a start of a command line checks: `PlannedStart` of the planner."""
    return _planner().PlannedStart(
        command.flags, world_size=world_size, on_gpus=on_gpus, runs_script=command.runs_script
    )


def _planner() -> Any:
    with warnings.catch_warnings(action="ignore"):  # Megatron's, of packages that are missing
        return importlib.import_module(PLANNER)


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise ConfigError instead of printing argparse's usage, which has hundreds of lines."""
    raise ConfigError(f"{explained(message, parser)} Correct it, or look at --help of the program.")


def _split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the launcher's words, the program, and the flags of training, which follow it."""
    if not words or words[0].startswith("-"):
        return [], "", list(words)
    for place, word in enumerate(words):
        if word.endswith(".py"):
            _check_launcher(words[:place])
            return list(words[:place]), word, list(words[place + 1 :])
    raise ConfigError(
        f"{words[0]} starts no .py program and is not a flag. Give the command that starts the ranks, such "
        "as torchrun ... -m moe_ft run SCRIPT.py ..., or the flags of training alone."
    )


def _check_launcher(words: Sequence[str]) -> None:
    if of_bridge := [word for word in words if word.startswith(FLAG_PREFIX)]:
        raise ConfigError(
            f"{of_bridge[0]} in front of a script means a job of Megatron-Bridge. Its settings are no flags, "
            "and are not read here: give the flags of Megatron-LM that describe the job."
        )


def read_launch(words: Sequence[str]) -> LaunchedRanks:
    """Return the ranks that a launcher starts: torchrun, launch, keep, srun, or Python itself.

    Raises:
        ConfigError: if torchrun would refuse its words.
    """
    names = [PurePath(word).name for word in words]
    torchrun, agent = read_torchrun(words), read_agent(words)
    by_torchrun = LaunchedRanks() if torchrun is None else _launch_of(torchrun)
    if agent is not None:
        nodes = "1" if torchrun is None else torchrun.nnodes
        kept = _read_agent(agent, nodes, "launch" if "launch" in names else "keep")
        return replace(kept, restarts=by_torchrun.restarts, backend=by_torchrun.backend)
    if torchrun is not None:
        return by_torchrun
    if "srun" in names:
        return _read_srun(dict(_options_of_srun(words[names.index("srun") + 1 :])))
    if any(name.startswith("python") or name == "moe_ft" for name in names):
        return LaunchedRanks(world_size=1, ranks_per_node=1)
    return LaunchedRanks(
        reason=f"{names[0]} is no launcher that plan knows" if names else "no launcher"
    )


def read_torchrun(words: Sequence[str]) -> argparse.Namespace | None:
    """Return torchrun's options, with its defaults, in a launcher's words; None if these have no torchrun.

    Raises:
        ConfigError: if torchrun would refuse them.
    """
    start = next((n for n, word in enumerate(words) if PurePath(word).name in TORCHRUN), None)
    if start is None:
        return None
    # Only here, since it imports torch, which other launchers do not need.
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = partial(refuse, parser)  # type: ignore[method-assign]
    if words[start] == "torch.distributed.launch":
        parser.add_argument("--use-env", "--use_env", action="store_true")
    return parser.parse_args([*words[start + 1 :], "SCRIPT"])


def read_agent(words: Sequence[str]) -> Mapping[str, str] | None:
    """Return the options of `launch` or `keep` in a launcher's words; None if these have neither."""
    for place, word in enumerate(words[1:], 1):
        if word in AGENTS and PurePath(words[place - 1]).name == "moe_ft":
            return split_options([*words[place + 1 :], "SCRIPT"])[0]
    return None


def _launch_of(torchrun: argparse.Namespace) -> LaunchedRanks:
    num_nodes, per_node = torchrun.nnodes.rpartition(":")[2], torchrun.nproc_per_node  # the most
    launch = LaunchedRanks(
        restarts=torchrun.max_restarts > 0,
        backend="c10d" if torchrun.standalone else torchrun.rdzv_backend,
    )
    if not all(map(_is_number, (num_nodes, per_node))):
        reason = f"--nnodes={num_nodes} --nproc-per-node={per_node} must be from 1 to 999,999,999"
        return replace(launch, reason=reason)
    ranks_per_node = int(per_node)
    return replace(
        launch, world_size=int(num_nodes) * ranks_per_node, ranks_per_node=ranks_per_node
    )


def _read_agent(given: Mapping[str, str], nodes: str, name: str) -> LaunchedRanks:
    """Return the ranks that agents start.

    Args:
        nodes: of torchrun.
        name: of the command; `launch` starts one rank for each GPU where nobody says how many.
    """
    num_nodes = given.get("nodes", nodes).rpartition(":")[2]
    per_node = given.get("ranks-per-node", "one for each GPU" if name == "launch" else "1")
    grace = given.get("grace", str(GRACE_S))
    if not all(map(_is_number, (num_nodes, per_node, grace))):
        reason = (
            f"{name} --nodes={num_nodes} --ranks-per-node={per_node} --grace={grace} must be numbers, at "
            "least 1"
        )
        return LaunchedRanks(reason=reason)
    return LaunchedRanks(
        world_size=int(num_nodes) * int(per_node),
        ranks_per_node=int(per_node),
        grace_s=float(grace),
    )


def _read_srun(given: dict[str, str]) -> LaunchedRanks:
    num_nodes, per_node = given.get("--nodes", ""), given.get("--ntasks-per-node", "")
    tasks = given.get("--ntasks", "")
    if _is_number(tasks):
        each = -(-int(tasks) // int(num_nodes)) if _is_number(num_nodes) else None
        return LaunchedRanks(
            world_size=int(tasks), ranks_per_node=int(per_node) if _is_number(per_node) else each
        )
    if _is_number(num_nodes) and _is_number(per_node):
        return LaunchedRanks(
            world_size=int(num_nodes) * int(per_node), ranks_per_node=int(per_node)
        )
    return LaunchedRanks(reason="srun has neither --ntasks nor --nodes with --ntasks-per-node")


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and int(text) > 0


_SHORT = {"-N": "--nodes", "-n": "--ntasks"}


def _options_of_srun(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, following in pairwise([*words, ""]):
        if word[:2] in _SHORT:
            yield _SHORT[word[:2]], word[2:] or following
        elif word.startswith("--"):
            name, is_joined, value = word.partition("=")
            yield name, value if is_joined else following
