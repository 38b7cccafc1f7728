"""`python -m moe_ft plan`: say in advance what fault tolerance costs a job, and which flags to use."""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from moe_ft.command_lines import as_flag
from moe_ft.commands.command_line import (
    TrainingCommand,
    plan_job,
    planned_start,
    read_command,
    refuse,
)
from moe_ft.commands.model_config import ModelFlags
from moe_ft.commands.pages import check_page, write_page
from moe_ft.commands.parsers import CommandParser, Commands, add_command, program
from moe_ft.commands.plan_advice import SPEEDS, Advice, Advisor, Proposal, check_room, word
from moe_ft.commands.plan_command import StartCommand, start_command
from moe_ft.commands.plan_inputs import (
    SAVE_MINUTES,
    SECONDS,
    Cluster,
    Values,
    cluster_names,
    model_names,
    read_cluster,
    read_model,
)
from moe_ft.errors import ConfigError
from moe_ft.failure_domains import SLURM, read_domains
from moe_ft.planning.lost_ranks import lost_node_lines
from moe_ft.planning.placement import Survival
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from moe_ft.planning.report import boundary_line, slot_lines
from moe_ft.planning.spares import live_replica_lines, spare_lines
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts, StrategyKind

_USAGE = "plan [OPTIONS] -- COMMAND LINE OF TRAINING"
_EXAMPLE = "--bandwidth 25GB --iteration-s 2 -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24"
_DEFAULT_RANKS_PER_NODE = 8
# The stages are built for it. All strategies have the same units: a pretraining freezes none.
_ANY_STRATEGY = (f"--moe-ft-strategy={registry.kinds()[0].name}",)
# Options that a file may have too, with _ for -: `python -m moe_ft simulate`.
OPTIONS = (
    *("model", "cluster", "from_run", "world_size", "ranks_per_node", "save_minutes"),
    *(*SPEEDS, *SECONDS),
)


def add_plan_command(commands: Commands) -> None:
    """Add the command and the options that no flag of training gives."""
    parser = add_command(
        commands,
        "plan",
        "say in advance what fault tolerance costs, and which flags to use",
        "The command line of training, from launcher to --moe-ft-*, comes after the --; or --model and "
        "--cluster name a known job.",
        f"--model deepseek-v3 --cluster dgx-h100\n  %(prog)s {_EXAMPLE}",
        usage="%(prog)s [OPTIONS] -- COMMAND LINE OF TRAINING",
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
    for name, link in (
        ("bandwidth", "device to host"),
        ("network-bandwidth", "to other nodes"),
        ("storage-bandwidth", "host to storage"),
    ):
        parser.add_argument(
            f"--{name}", metavar="BYTES", help=f"{link}, per second and rank, such as 25GB"
        )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(model_names())}, or the config.json of a decoder with experts, of Hugging Face",
    )
    parser.add_argument(
        "--cluster", metavar="NAME", help=f"{', '.join(cluster_names())}, or a .toml file"
    )
    parser.add_argument(
        "--from-run",
        type=Path,
        metavar="DIR",
        help="event log of a run (--moe-ft-event-log), which has times and bandwidths",
    )
    parser.add_argument(
        "--save-minutes",
        type=float,
        metavar="M",
        help="what to compare with: Megatron's --save every so many minutes, which a failure loses "
        f"(default: --save-interval of training, else {SAVE_MINUTES:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the advice as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write it as a page")
    for name, meaning in SECONDS.items():
        parser.add_argument(as_flag(name), type=float, metavar="S", help=meaning)
    parser.set_defaults(run=run)


def split_command_line(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of moe_ft itself, and the command line of training that follows the first ``--``.

    Raises:
        ConfigError: if `plan` is given flags of training without a ``--`` before them.
    """
    own = list(takewhile(lambda word: word != "--", words))
    if own[:1] not in (["plan"], ["doctor"], ["convert"]) or {"-h", "--help"} & {*own}:
        return list(words), []
    names = {word.partition("=")[0] for word in own}
    if own[0] == "plan" and len(own) == len(words) and "--model" not in names:
        raise ConfigError(
            f"{' '.join(own)} has no command line of training, which must follow a --. Write it like "
            f"{program()} {_USAGE}; for example {program()} plan {_EXAMPLE}"
        )
    return own, list(words[len(own) + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """A job, and what its plan rests on.

    Attributes:
        kind: None where all strategies are compared.
        start: the rules of a start.
        limit: host memory of a node that checkpoints may take; None if nobody knows.
        save_minutes: between checkpoints of Megatron itself, as given.
    """

    job: PlannedJob
    kind: StrategyKind | None
    command: TrainingCommand
    start: Any
    values: Values
    notes: list[str]
    limit: float | None
    save_minutes: float | None

    def advisor(self, saves: tuple[str, int] | None = None) -> Advisor:
        """Return what compares strategies for the job, and with Megatron's own checkpoints."""
        return Advisor(
            job=self.job,
            configure=lambda flags: _with_flags(self.command, flags).config,
            node_limit_bytes=self.limit,
            check=self.refusal,
            saves=saves,
        )

    def begin(self, flags: Sequence[str]) -> StartCommand:
        """Return the command that starts the job with further flags."""
        job = self.job
        return start_command(
            self.command, flags, world_size=job.num_ranks, ranks_per_node=job.ranks_per_node
        )

    def refusal(self, flags: Sequence[str]) -> str:
        """Return why a start of the job with further flags is refused; empty if it is not."""
        begun = self.begin(flags)
        try:
            self.start.check(
                _with_flags(self.command, flags).config,
                begun.environment,
                is_kept=begun.is_kept,
                is_watched=begun.is_watched,
            )
        except ConfigError as error:
            return str(error)
        return ""


def run(options: argparse.Namespace) -> int:
    """Print the plan of the job that a command line starts, or advice on how to checkpoint it."""
    check_page(options.html)
    planned = _plan(options)
    if planned.kind is None or options.json or options.html is not None:
        answer = word(_advise(planned))
        write_page(options.html, answer.as_html())
        if planned.kind is None or options.json:
            answer.print(as_json=options.json)
            return 0
    job, kind, notes = planned.job, registry.chosen(planned.job.config), planned.notes
    registry.check(
        job.config,
        ModelFacts(num_experts=job.model.num_experts, num_iterations=job.train_iterations),
    )
    log = boundary_line(job, kind.longest_window(job.config))
    refusal = planned.refusal(())
    void = planned.command.config.warnings(job.train_iterations)
    notes += [line for line in void if line != refusal]
    notes += (
        [f"a start refuses this: {refusal}"] if refusal else planned.values.notes(planned.command)
    )
    lines = "\n".join(f"note: {line}" for line in notes)
    plan = kind.plan(job)
    share = plan.footprint.share
    num_sending = share.num_covered(job.replication_factor, job.replica_regions)
    survival = f"memory survives the loss of {_survival(job, num_sending)}"
    parts = [
        "" if planned.limit is None else check_room(job, plan.host_bytes, planned.limit)[1],
        plan.report(),
        survival,
        *spare_lines(job),
        *live_replica_lines(job),
        *slot_lines(job),
        *lost_node_lines(job),
        *log,
        *planned.values.text(),
        lines,
    ]
    print("\n\n".join(filter(None, parts)))
    return 0


def compare(words: Sequence[str]) -> Proposal:
    """Return what `plan` compares with a command line of its own, without what the best hangs on.

    Raises:
        ConfigError: as the command refuses what cannot be.
    """
    return _advise(_plan_words(words), varies=False)


def advisor_of(words: Sequence[str]) -> Advisor:
    """Return what compares strategies for the job of a command line of `plan`.

    Raises:
        ConfigError: as the command refuses what cannot be.
    """
    return _plan_words(words).advisor()


def _plan_words(words: Sequence[str]) -> _Planned:
    parser = CommandParser()
    commands = parser.add_subparsers()
    add_plan_command(commands)
    own_parser = commands.choices["plan"]
    own_parser.error = partial(refuse, own_parser)  # type: ignore[method-assign]
    own, of_training = split_command_line(["plan", *words])
    options = parser.parse_args(own)
    options.of_training = of_training
    return _plan(options)


def _plan(options: argparse.Namespace) -> _Planned:
    if options.save_minutes is not None and not 0 < options.save_minutes < math.inf:
        raise ConfigError(
            f"--save-minutes={options.save_minutes:g} must be more than 0. Give the minutes between two "
            "checkpoints of --save."
        )
    model = None if options.model is None else read_model(options.model)
    cluster = None if options.cluster is None else read_cluster(options.cluster)
    command = _command(options, model)
    world_size, ranks_per_node = _ranks(options, command, model, cluster)
    command.config.validate(world_size, allows_void=True)
    kind = registry.kind_of(command.config.strategy.strategy)
    if kind is not None and not command.config.storage.persists:
        _check_storage(options.storage_bandwidth)
    values = Values(
        options,
        cluster,
        math.ceil(world_size / ranks_per_node),
        command.config.memory.streams,
    )
    if "iteration_s" in values.found:  # else it may follow from the job
        values.measured()
    planned = command if kind is not None else _with_flags(command, _ANY_STRATEGY)
    on_gpus = cluster is not None and cluster.has_gpus
    start = planned_start(planned, world_size=world_size, on_gpus=on_gpus)
    job, notes = plan_job(
        planned, MeasuredTimes(), world_size=world_size, ranks_per_node=ranks_per_node
    )
    if cluster is not None:
        _check_fits(job, cluster)
    values.estimate_iteration(job)
    job = replace(job, measured=values.measured())
    limit = values.memory_limit(command.config)
    return _Planned(
        job=job,
        kind=kind,
        command=command,
        start=start,
        values=values,
        notes=[*(model.notes if model else ()), *notes],
        limit=limit,
        save_minutes=options.save_minutes,
    )


def _check_storage(bandwidth: str | None) -> None:
    """Raise ConfigError if a speed of storage is given for a job that writes nothing there."""
    if bandwidth is not None:
        raise ConfigError(
            f"--storage-bandwidth={bandwidth} needs checkpoints that go to storage. Add --moe-ft-persist-dir "
            "URL to the flags of training, or leave it out."
        )


def _survival(job: PlannedJob, num_sending: int) -> str:
    """Return the losses that replicas cover, whichever nodes of a file with domains the job gets."""
    given, num_nodes = job.config.memory.failure_domain, job.replication_factor
    found = Survival(
        num_nodes=num_nodes, num_sending=num_sending if num_sending < num_nodes else None
    )
    if given is None or not num_nodes:
        return replace(found, domain=None if given is None else False).describe()
    if given == SLURM:
        return f"{replace(found, domain=True).describe()}, if SLURM gives it several"
    sizes = Counter(read_domains(Path(given)).values())
    largest = max(sizes.values(), default=0)
    words = replace(found, domain=len(sizes) > 1).describe()
    if len(sizes) > 1 and job.num_nodes <= largest:
        words += f", if its {job.num_nodes} nodes are in several (one domain has {largest} nodes)"
    return words


def _advise(planned: _Planned, *, varies: bool = True) -> Proposal:
    """Compare all strategies, or look at the one that was chosen."""
    job, kind, command, values = planned.job, planned.kind, planned.command, planned.values
    values.check_complete(job)
    if kind is None:
        advisor = planned.advisor(values.saves(planned.save_minutes, command))
        found = advisor.compare()
    else:
        advisor = planned.advisor()
        found = [advisor.evaluate(kind.name, kind)]
    advice = advisor.advise(found) if varies else Advice(alternatives=tuple(found))
    flags = () if advice.best is None else advice.best.flags
    return Proposal(
        job=job,
        advice=advice,
        begin=planned.begin(flags),
        assumptions=values.assumptions,
        notes=[*planned.notes, *values.notes(_with_flags(command, flags))],
    )


def _command(options: argparse.Namespace, model: ModelFlags | None) -> TrainingCommand:
    """Return the command line of training: that of a preset, with the flags that were given after it."""
    command = read_command(options.of_training)
    if model is None:
        return command
    flags = (*model.flags, *command.flags)
    return replace(command, flags=flags, config=read_command(flags).config)


def _with_flags(command: TrainingCommand, flags: Sequence[str]) -> TrainingCommand:
    words = (*command.flags, *flags)
    return replace(command, flags=words, config=read_command(words).config)


def _check_fits(job: PlannedJob, cluster: Cluster) -> None:
    """Raise ConfigError if the state of a job does not fit the GPUs of a cluster."""
    if job.state_bytes > cluster.gpu_bytes:
        raise ConfigError(
            f"--cluster={cluster.name} does not fit the layout: weights, gradients and optimizer take "
            f"{job.state_bytes / 1e9:,.0f} GB of the fullest GPU, and {cluster.gpu} has "
            f"{cluster.gpu_bytes / 1e9:,.0f} GB. Raise --pipeline-model-parallel-size or "
            "--expert-model-parallel-size, or the number of nodes."
        )


def _ranks(
    options: argparse.Namespace,
    command: TrainingCommand,
    model: ModelFlags | None,
    cluster: Cluster | None,
) -> tuple[int, int]:
    """Return the ranks of the job and of a node: as given, as the launcher starts them, as the model has."""
    for name in ("world_size", "ranks_per_node"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(options, name)} must be a whole number, at least 1. "
                "Give a larger one."
            )
    world_size = options.world_size or command.launch.world_size
    if world_size is None and model is not None and model.nodes is not None:
        world_size = model.nodes * _DEFAULT_RANKS_PER_NODE
    if world_size is None:
        raise ConfigError(
            f"the number of ranks is not known: {command.launch.reason}. Give --world-size N before the --."
        )
    default = _DEFAULT_RANKS_PER_NODE if cluster is None else cluster.gpus_per_node
    per_node = options.ranks_per_node or command.launch.ranks_per_node or default
    if cluster is not None and per_node > cluster.gpus_per_node:
        raise ConfigError(
            f"{per_node} ranks of a node (--ranks-per-node, or what the launcher starts) must be at most the "
            f"{cluster.gpus_per_node} GPUs that --cluster={cluster.name} has. Give fewer."
        )
    return world_size, min(per_node, world_size)
