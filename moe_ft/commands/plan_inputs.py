"""Inputs of `python -m moe_ft plan` that no flag of training gives, and where each value comes from.

Models, clusters, and measured runs. The folder presets/ has models and clusters; docs/plan.md has the fields
of a cluster.
"""

import argparse
import json
import math
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from moe_ft.command_lines import as_flag, flag_value
from moe_ft.commands.command_line import TrainingCommand
from moe_ft.commands.model_config import ModelFlags, model_of
from moe_ft.commands.plan_advice import SPEEDS
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import parse_size
from moe_ft.config.flags import as_arguments
from moe_ft.config.untested import refusals_on_gpus
from moe_ft.errors import ConfigError
from moe_ft.events import Event, event_path, ranks_with_events, read_events
from moe_ft.files.private_files import open_regular
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from moe_ft.spelling import hint
from moe_ft.tables import table

_FOLDER = Path(__file__).parent / "presets"
# Of a rank, with one connection and with several: medians of docs/benchmarks/streams.md, on a loopback.
_ONE_CONNECTION, _CONNECTIONS = 1.4e9, 1.6e9
_NO_GPU = "none"
_CONFIG = "config.json"
_MOST_BYTES = 64 << 20  # of a file that a user names
_MOST_RANKS_READ = 64  # of a measured run: the first ones
_DEFAULTS = (
    *("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--seq-length", "4096", "--micro-batch-size", "1", "--global-batch-size", "1024"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes that need not exist. presets/clusters.toml has the units.

    Attributes:
        own: fields that a file of the user's own gives; those of presets are assumed.
    """

    name: str
    gpu: str
    gpus_per_node: int
    gpu_bytes: float
    host_bytes: float
    model_flops: float
    bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    storage_bandwidth: float
    node_mtbf_h: float
    restart_s: float
    repair_s: float
    sources: tuple[str, ...]
    own: frozenset[str] = frozenset()

    @property
    def has_gpus(self) -> bool:
        """True unless it is one of CPUs."""
        return self.gpu != _NO_GPU

    def values(self, num_nodes: int, num_streams: int) -> dict[str, tuple[float, str]]:
        """Return the values that a job on so many nodes may assume, each with where it comes from.

        Args:
            num_streams: connections between two ranks.
        """
        card = self.network_bandwidth
        measured = _CONNECTIONS if num_streams > 1 else _ONE_CONNECTION
        found = {
            "bandwidth": self.bandwidth,
            "network_bandwidth": min(card, measured),
            "storage_bandwidth": self.storage_bandwidth / self.gpus_per_node,
            "mtbf_s": self.node_mtbf_h * 3600 / num_nodes,
            "restart_s": self.restart_s,
            "repair_s": self.repair_s,
        }
        fields_of = {name: name for name in found} | {"mtbf_s": "node_mtbf_h"}
        sources = {
            name: f"{'' if of in self.own else 'assumed: '}--cluster {self.name}"
            for name, of in fields_of.items()
        }
        if measured < card:
            sources["network_bandwidth"] = (
                f"measured on a loopback, --moe-ft-streams {num_streams} (docs/benchmarks/streams.md); "
                f"the network card of --cluster {self.name} has {card / 1e9:g} GB/s"
            )
        return {name: (value, sources[name]) for name, value in found.items()}


@cache
def _presets(name: str) -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))


def model_names() -> list[str]:
    """Return the names of the models."""
    return [name for name in _presets("models") if name != "common"]


def cluster_names() -> list[str]:
    """Return the names of the clusters."""
    return [*_presets("clusters")]


def _unknown(flag: str, value: str, names: list[str], other: str) -> ConfigError:
    remedy = hint(value, names, 3, 0.4) or " Name one of them."
    return ConfigError(f"{flag}={value} must be one of {', '.join(names)}, or {other}.{remedy}")


def read_model(name: str) -> ModelFlags:
    """Return a model by its name, or by the path of its config.json of Hugging Face.

    Raises:
        ConfigError: if there is no such model, or it is no decoder with experts.
    """
    if "/" in name or name.endswith(".json"):
        return _published_model(Path(name))
    if name not in model_names():
        raise _unknown("--model", name, model_names(), "the path of a config.json")
    common, found = _presets("models")["common"], _presets("models")[name]
    words = " ".join((common["flags"], common[found["like"]], found["flags"]))
    names = ("source", "nodes", "parameters", "active")
    values = {key: found[key] for key in names if key in found}
    notes = tuple(found.get("notes", ()))
    return ModelFlags(flags=tuple(shlex.split(words)), notes=notes, **values)


def _published_model(path: Path) -> ModelFlags:
    file = path / _CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--model={path} must be a {_CONFIG} or its folder, but there is none. Correct the path, or name "
            f"one of {', '.join(model_names())}.{hint(path.name, model_names(), 3)}"
        )
    try:
        config = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--model={path} cannot be read: {error}. Give the {_CONFIG} as it was published."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"--model={path} must hold a JSON object, and holds a {type(config).__name__}. Give the file "
            "as it was published."
        )
    found = model_of(f"{path}", config)
    return replace(found, flags=(*found.flags, *_DEFAULTS))


def read_text(path: Path) -> str:
    """Return a text that a user names. Raises OSError for a pipe or a device, ValueError if it is no text."""
    with open_regular(path) as file:
        return file.read(_MOST_BYTES).decode()


def read_cluster(name: str) -> Cluster:
    """Return a cluster by its name, or by the path of a TOML file with the same fields.

    Raises:
        ConfigError: if there is no such cluster, or a value of it cannot be.
    """
    known = _presets("clusters")
    if name.endswith(".toml"):
        try:
            values = tomllib.loads(read_text(Path(name)))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"--cluster={name} cannot be read: {error}. Give a TOML file as docs/plan.md has it."
            ) from error
    elif name in known:
        values = dict(known[name])
    else:
        raise _unknown("--cluster", name, cluster_names(), "the path of a .toml file")
    like = values.pop("like", None)
    if like is not None and str(like) not in known:
        raise _unknown(f"--cluster={name} like", str(like), cluster_names(), "left out")
    own = frozenset(values) if name.endswith(".toml") else frozenset[str]()
    values = {**(known[like] if like else {}), **values, "name": name}
    return _checked_cluster(name, values, own)


def _checked_cluster(name: str, values: dict[str, Any], own: frozenset[str]) -> Cluster:
    types = {each.name: each.type for each in fields(Cluster) if each.name != "own"}
    for key in sorted({*values} ^ {*types}):
        problem = "is no field of a cluster" if key in values else "is missing"
        raise ConfigError(
            f"--cluster={name}: {key} {problem}; its fields are {', '.join(types)}. Correct it, or add "
            f'like = "{cluster_names()[0]}" for the missing ones.'
        )
    for key in (each for each in types if types[each] in (int, float)):
        value = values[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ConfigError(
                f"--cluster={name}: {key}={value!r} must be a number, more than 0. Give a measured value."
            )
    sources = values["sources"] if isinstance(values["sources"], list) else [values["sources"]]
    return Cluster(**{**values, "sources": tuple(map(str, sources)), "own": own})


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """Values that the event log of a run gives, those of the slowest rank.

    Attributes:
        values: by name, as `MeasuredTimes` has them.
        stall_s: that an iteration waited for checkpoints.
        num_failures: starts after the first, and repairs.
    """

    values: Mapping[str, float]
    stall_s: float
    num_failures: int


def read_run(directory: Path) -> MeasuredRun:
    """Read the event log of a run: medians of each rank, the slowest of the first ranks.

    Raises:
        ConfigError: if there is no log, or nobody came as far as two iterations.
    """
    try:
        ranks = ranks_with_events(directory)[:_MOST_RANKS_READ]
        found = [_values_of([*read_events(event_path(directory, rank))]) for rank in ranks]
    except OSError as error:
        raise ConfigError(
            f"--from-run={directory} cannot be read: {error.strerror}. Give the directory that "
            "--moe-ft-event-log named."
        ) from error
    if not any("iteration_s" in each for each in found):
        raise ConfigError(
            f"--from-run={directory} must hold the event log (rank_00000.jsonl, ...) of a run with at least "
            "two iterations. Give the directory that --moe-ft-event-log named."
        )
    slowest = {
        name: (min if name.endswith("bandwidth") or name == "mtbf_s" else max)(
            each[name] for each in found if name in each
        )
        for name in {name for each in found for name in each}
    }
    stall_s, num_failures = slowest.pop("stall_s", 0.0), slowest.pop("num_failures", 0.0)
    return MeasuredRun(values=slowest, stall_s=stall_s, num_failures=int(num_failures))


def _values_of(events: list[Event]) -> dict[str, float]:
    """Return what a rank's events say; the first iteration of a start pays for warming up."""
    known = [event for event in events if event["event"] in ("start", "iteration")]
    iterations = [
        event
        for before, event in pairwise(known)
        if event["event"] == before["event"] == "iteration"
    ]
    repairs = [event["phases_s"] for event in events if event["event"] == "repair"]
    repaired = {event["incarnation"] for event in events if event["event"] == "repair"}
    last = {event["incarnation"]: event["time"] for event in events}
    restarts = [
        event["time"] - last[event["incarnation"] - 1]
        for event in events
        if event["event"] == "start" and event["incarnation"] - 1 in last
        if event["incarnation"] not in repaired
    ]
    series = {
        "iteration_s": [event["iteration_s"] for event in iterations],
        "stall_s": [event["stall_s"] for event in iterations],
        "bandwidth": [*_rates(events, "snapshot", "copy_s")],
        "network_bandwidth": [*_rates(events, "replicate", "seconds")],
        "storage_bandwidth": [*_rates([*_with_reading(events)], "persist", "seconds")],
        "restart_s": restarts,
        "repair_s": [sum(s for name, s in each.items() if name in _SETUP) for each in repairs],
    }
    values = {name: float(median(of)) for name, of in series.items() if of}
    if num_failures := len(restarts) + len(repairs):
        values["num_failures"] = num_failures
        values["mtbf_s"] = (events[-1]["time"] - events[0]["time"]) / num_failures
    return values


_SETUP = ("notice", "free", "build", "meet", "swap")  # phases of a repair before state is read


def _with_reading(events: list[Event]) -> Iterator[Event]:
    """Yield what went to storage, with the time to read it back: the next checkpoint waits for that too."""
    read_s = {each["iteration"]: each["seconds"] for each in events if each["event"] == "read_back"}
    for event in events:
        if event["event"] == "persist":
            yield {**event, "seconds": event["seconds"] + read_s.get(event["iteration"], 0.0)}


def _rates(events: list[Event], kind: str, seconds: str) -> Iterator[float]:
    """Yield the bytes per second of each copy; a snapshot goes to each of its peers."""
    for event in events:
        if event["event"] == kind and event.get("bytes") and event.get(seconds):
            yield event["bytes"] * max(1, len(event.get("peers", ()))) / event[seconds]


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
        found: by name, as `MeasuredTimes` has them.
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
        MeasuredTimes(mtbf_s=typed["mtbf_s"])  # refused before the model is built
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

    def measured(self) -> MeasuredTimes:
        """Return the values; raise ConfigError for the first that cannot be."""
        known = {each.name for each in fields(MeasuredTimes)}
        return MeasuredTimes(**{name: value for name, value in self.found.items() if name in known})

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
