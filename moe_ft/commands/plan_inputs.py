"""Inputs of `python -m moe_ft plan` that no flag of training gives: models, clusters, and measured runs.

The folder presets/ has the models and clusters. docs/plan.md has the fields of a cluster.
"""

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

from moe_ft.commands.model_config import Model, model_of
from moe_ft.errors import ConfigError
from moe_ft.events import Event, event_path, ranks_with_events, read_events
from moe_ft.files.private_files import open_regular
from moe_ft.spelling import hint

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


def read_model(name: str) -> Model:
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
    return Model(flags=tuple(shlex.split(words)), notes=notes, **values)


def _published_model(path: Path) -> Model:
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
        values: by name, as `Measured` has them.
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
