"""`moe_ft launch`: one line in front of a training command, and `moe_ft keep`, which adds nothing to it.

Both run the agent of a node (cluster/agent.py). `launch` runs the script by `moe_ft run`, and adds what
protects a job where its command line lacks it: a strategy, repairs, restarts, a name. One line says what.
Flags in front of the script, ended by `--`, mean a job of Megatron-Bridge: what is added joins them there.

What takes long to import is imported when it is needed: every start waits for it.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from moe_ft.cluster import agent
from moe_ft.cluster.options import (
    USAGE,
    KeepOptions,
    check_target,
    is_of_torchrun,
    read_options,
    split_options,
)
from moe_ft.cluster.own_node import NodeMemory
from moe_ft.cluster.target import RUN, split_flags
from moe_ft.command_lines import flag_value
from moe_ft.commands.run import check_script
from moe_ft.config.fields import HELP_ALL, flag_of
from moe_ft.errors import ConfigError
from moe_ft.loop.refusing import refuse
from moe_ft.saying import FORMAT_FLAG, choose_format, say, speak_for

PROGRAM = "moe_ft launch"
_MAX_RESTARTS = 3  # in a row without a finished iteration
_REPAIR = "try"
_OF_MEMORY = ("memory_dir", "job_id", "node_id")


def launch(words: Sequence[str]) -> NoReturn:
    """Run the ranks of this node, protected; the words are those of the command line after `launch`."""
    from moe_ft.commands.launch_checks import check_flags

    try:
        completed, added = complete(words, os.environ)
        options = read_options(completed, os.environ)
        if not {"-h", "--help", HELP_ALL} & {*options.words}:
            check_flags(options.words, options.num_nodes * options.ranks_per_node)
    except ConfigError as error:
        refuse(str(error), PROGRAM)
    _be_agent(options, added)


def keep(words: Sequence[str]) -> NoReturn:
    """Run the ranks of this node, from the words of the command line after `keep`."""
    try:
        options = read_options(words, os.environ)
    except ConfigError as error:
        refuse(str(error), "moe_ft keep")
    _be_agent(options)


def _be_agent(options: KeepOptions, added: Sequence[str] = ()) -> NoReturn:
    speak_for(options.name)
    choose_format(options.flag(FORMAT_FLAG))
    if added:
        say(f"launch adds {' '.join(added)}; give them to choose otherwise")
    agent.main(options, memory_of)


def memory_of(options: KeepOptions) -> NodeMemory | None:
    """Return the memory of this node for the ranks; None if nothing names their job."""
    # Only here: by then the process from which ranks are forked imports already.
    from moe_ft.config.config import MemoryConfig
    from moe_ft.engine.memory.job_directory import node_directory
    from moe_ft.recovery.job_memory import MemoryOfNode

    flags: dict[str, Any] = {name: options.flag(flag_of(name)) for name in _OF_MEMORY}
    memory = replace(MemoryConfig(), **{name: each for name, each in flags.items() if each})
    with suppress(ConfigError):
        job = memory.resolve_job_id(os.environ)
        node = memory.resolve_node_id(os.environ, options.name)
        return MemoryOfNode(node_directory(memory.memory_dir, job, node))
    return None


def complete(
    words: Sequence[str], environment: Mapping[str, str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words after `launch` as those after `keep`, and what was added for the user to know.

    Raises:
        ConfigError: if the job needs a name that nothing gives.
    """
    given, preload, rest = split_options(words)
    if tuple(rest[: len(RUN)]) == RUN:  # in front of a line that has it already
        rest = rest[len(RUN) :]
    in_front, target = split_flags(rest)
    if in_front:
        from moe_ft.commands.launch_checks import check_in_front

        check_in_front(in_front)
    check_target(target)
    check_script(target, PROGRAM, f"moe_ft launch {USAGE}")
    options = _default_options(given, environment)
    shown = [f"--{name}={value}" for name, value in options.items()]
    flags = _default_flags(target, in_front, {**options, **given}, environment)
    kept = [f"--{name}={value}" for name, value in {**options, **given}.items()]
    kept += [f"--preload={each}" for each in preload]
    ranks = [*in_front, *flags, "--", *target] if in_front else [*target, *flags]
    return [*kept, "--", *RUN, *ranks], [*shown, *flags]


def _default_options(given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return options of the agent that are not given."""
    found = {"ranks-per-node": str(num_gpus(environment) or 1)}
    if not is_of_torchrun(environment):
        found["max-restarts"] = str(_MAX_RESTARTS)
        place = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
        if all(place) and given.get("nodes", "1") != "1":
            found["meet"] = ":".join(place)
    return {name: value for name, value in found.items() if name not in given}


def num_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs of this node that its processes may use, without a call of CUDA."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def _default_flags(
    target: Sequence[str],
    in_front: Sequence[str],
    options: Mapping[str, str],
    environment: Mapping[str, str],
) -> list[str]:
    """Return flags of moe_ft that the command line of the script, and those in front of it, lack."""
    given = in_front or target
    strategy = flag_value(given, flag_of("strategy"))
    if strategy == "none" or {"-h", "--help", HELP_ALL} & {*target}:
        return []
    from moe_ft.config.config import MemoryConfig
    from moe_ft.strategies.registry import simplest

    added = {"strategy": simplest(), "repair": _REPAIR}
    found = [
        f"{flag_of(name)}={value}"
        for name, value in added.items()
        if not flag_value(given, flag_of(name))
    ]
    job_id = flag_value(given, flag_of("job_id"))
    if not MemoryConfig(job_id=job_id or None).job_names(environment):
        if "meet" in options or environment.get("GROUP_WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "--moe-ft-job-id is missing: nodes of a job need one name, by which a restarted job finds "
                "its memory, and SLURM_JOB_ID is not set. Add --moe-ft-job-id NAME on all nodes."
            )
        from moe_ft.commands.launch_checks import name_run

        found.append(
            f"{flag_of('job_id')}={name_run(target, flag_value(given, flag_of('memory_dir')))}"
        )
    return found
