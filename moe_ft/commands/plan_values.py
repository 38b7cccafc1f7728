"""Values of `python -m moe_ft plan` that no flag of training gives, and where each comes from."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import fields

from moe_ft.command_lines import as_flag, flag_value
from moe_ft.commands.command_line import TrainingCommand
from moe_ft.commands.plan_advice import SPEEDS
from moe_ft.commands.plan_inputs import Cluster, read_run
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import parse_size
from moe_ft.config.flags import as_arguments
from moe_ft.config.untested import refusals_on_gpus
from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import Measured, PlannedJob
from moe_ft.tables import table

SECONDS = {
    "iteration_s": "seconds of an iteration; with --cluster an estimate if it is left out",
    "update_s": "of it the optimizer step, which hides no snapshot (default 0)",
    "mtbf_s": "mean time between failures",
    "restart_s": "from a failure until processes run again (default 0)",
    "keep_s": "from a failure until ranks run again that `python -m moe_ft keep` starts",
    "repair_s": "from a failure until dead processes are replaced, with --moe-ft-repair auto",
}
SAVE_MINUTES = 30.0  # between checkpoints of Megatron itself, where nobody says
_TMPFS_SHARE = 0.5  # of host memory, as Linux makes /dev/shm


class Values:
    """Values that no flag of training gives, and where each comes from.

    Attributes:
        found: by name, as `Measured` has them.
        assumptions: of each the name, the value and the source.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        cluster: Cluster | None,
        num_nodes: int,
        num_streams: int,
    ) -> None:
        self.cluster = cluster
        self.found: dict[str, float] = {}
        self.assumptions: list[tuple[str, str, str]] = []
        if cluster is not None:
            for name, (value, source) in cluster.values(num_nodes, num_streams).items():
                self._take({name: value}, source)
        if options.from_run is not None:
            run = read_run(options.from_run)
            self._take(run.values, f"measured: --from-run {options.from_run}")
            self.assume("stall of an iteration", f"{run.stall_s:.3f} s", "measured, not planned")
            self.assume("failures", f"{run.num_failures}", "of the measured run")
        typed = {name: getattr(options, name) for name in SECONDS}
        Measured(mtbf_s=typed["mtbf_s"])  # refused before the model is built
        typed |= {name: _bandwidth(options, name) for name in SPEEDS}
        self._take({name: value for name, value in typed.items() if value is not None}, "given")

    def _take(self, values: Mapping[str, float], source: str) -> None:
        self.found |= values
        self.assumptions = [each for each in self.assumptions if each[0] not in values]
        for name, value in values.items():
            text = f"{value / 1e9:.3g} GB/s a rank" if name in SPEEDS else f"{value:,.6g} s"
            self.assume(name, text, source)

    def assume(self, name: str, value: str, source: str) -> None:
        """Note an assumption."""
        self.assumptions.append((name, value, source))

    def memory_limit(self, config: MoeFtConfig) -> float | None:
        """Return the host memory of a node that checkpoints may take; None if nobody knows."""
        limit = config.memory.host_memory_limit_bytes
        if limit is None and self.cluster is not None:
            limit = int(self.cluster.host_bytes * _TMPFS_SHARE)
            found = f"{limit / 2**30:,.0f} GiB"
            self.assume("host memory for checkpoints", found, "half of a node's")
        return limit

    def notes(self, command: TrainingCommand) -> list[str]:
        """Return what a start on GPUs would refuse, where nobody says whether the job has any."""
        return refusals_on_gpus(as_arguments(command.config)) if self.cluster is None else []

    def measured(self) -> Measured:
        """Return the values; raise ConfigError for the first that cannot be."""
        known = {each.name for each in fields(Measured)}
        return Measured(**{name: value for name, value in self.found.items() if name in known})

    def estimate_iteration(self, job: PlannedJob) -> None:
        """Estimate the time of an iteration where only the cluster is known: 6 operations a parameter."""
        if "iteration_s" in self.found or self.cluster is None:
            return
        if job.tokens is None:
            raise ConfigError(
                "--iteration-s not given, and --global-batch-size or --seq-length neither: an estimate for "
                f"--cluster={self.cluster.name} needs the tokens of an iteration. Give the first before the "
                "--, or the others after it."
            )
        flops = 6 * job.model.active_parameters * job.tokens
        seconds = flops / (job.num_ranks * self.cluster.model_flops)
        rate = f"{self.cluster.model_flops / 1e12:g} TFLOP/s a GPU"
        self._take({"iteration_s": seconds}, f"assumed: {job.tokens:,} tokens, {rate}")

    def saves(self, minutes: float | None, command: TrainingCommand) -> tuple[str, int]:
        """Return how often the user has Megatron save, in words and in iterations of known time.

        Args:
            minutes: as given before the --; else the command line of training may say it.
        """
        if "restart_s" not in self.found:
            self.assume("restart_s", "0 s", "assumed: default")
        interval = flag_value(command.flags, "--save-interval")
        if minutes is None and interval.isdecimal() and int(interval):
            self.assume("save_minutes", f"every {interval} iterations", "--save-interval")
            return f"every {interval} iterations", int(interval)
        source = "given" if minutes is not None else "assumed: default"
        minutes = SAVE_MINUTES if minutes is None else minutes
        self.assume("save_minutes", f"{minutes:g} min", source)
        return f"every {minutes:g} min", max(1, round(60 * minutes / self.found["iteration_s"]))

    def check_complete(self, job: PlannedJob) -> None:
        """Raise ConfigError if advice lacks a value."""
        needed = ["iteration_s", "bandwidth", "mtbf_s"]
        if job.num_nodes > 1:
            needed.append("network_bandwidth" if job.replication_factor else "storage_bandwidth")
        missing = [as_flag(name) for name in needed if name not in self.found]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} must be known to calculate useful time (ETTR). Give them before "
                "the --, or use --cluster NAME or --from-run DIR. Sizes need none of them: they are printed "
                "for one --moe-ft-strategy, without --json and --html."
            )
        for source in self.cluster.sources if self.cluster else ():
            self.assume("source", "", source)

    def text(self) -> list[str]:
        """Return the assumptions of a plan that rests on more than what was typed."""
        if all(source == "given" for _, _, source in self.assumptions):
            return []
        return [table(self.assumptions, ("assumption", "value", "from"))]


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
