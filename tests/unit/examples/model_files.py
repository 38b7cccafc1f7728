"""Model files of examples/slurm/models, as bash reads them, and the comment that each must begin with."""

import functools
import math
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.planning.host_memory import Footprint
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from moe_ft.strategies import registry
from moe_ft.tables import table

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "slurm" / "models"
MODELS = ("mixtral_8x7b", "deepseek_moe_16b", "qwen3_30b_a3b", "deepseek_v3")
STRATEGIES = ("dense", "sparse", "partial")
_ARRAYS = ("MODEL", "TRAINING", "LAYOUT", "TOKENIZER", "FAULT_TOLERANCE")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Settings of a model file."""

    num_nodes: int
    ranks_per_node: int
    iteration_s: float
    flags: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


@functools.cache
def read_model(name: str, strategy: str = "none", variables: str = ":") -> ModelFile:
    """Return what bash reads from a model file in which a strategy was chosen.

    Args:
        variables: assignments that come before it, as a shell has them.
    """
    arrays = " ".join(f'"${{{array}_FLAGS[@]}}"' for array in _ARRAYS)
    script = (
        f"set -eu; {variables}; . {FOLDER / name}.sh; "
        f'printf "%s\\0" "$NODES" "$RANKS_PER_NODE" "$ITERATION_S" {arrays}'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": "/usr/bin:/bin", "STRATEGY": strategy},
        capture_output=True,
        text=True,
        check=True,
    )
    nodes, ranks, seconds, *flags = done.stdout.split("\0")[:-1]
    return ModelFile(int(nodes), int(ranks), float(seconds), tuple(flags))


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a model file and a strategy.

    Attributes:
        text: as people see it.
    """

    job: PlannedJob
    footprint: Footprint
    text: str

    @property
    def node_bytes(self) -> int:
        """Host memory that checkpoints take on a node."""
        total = self.footprint.share.total_bytes(
            persists=self.job.persists,
            replication_factor=self.job.replication_factor,
            replica_regions=self.job.replica_regions,
        )
        return self.job.ranks_per_node * total


@functools.cache
def plan_of(name: str, strategy: str, *extra: str) -> Plan:
    """Return what plan says of a model file, with the bandwidths that plan.sh assumes.

    With them a plan of partial experts also looks for the largest k that is hidden: that takes long, and is
    left out.
    """
    model = read_model(name, strategy)
    command = read_command([*model.flags, "--moe-ft-persist-dir", "/persist", *extra])
    command.config.validate(model.world_size)
    speeds = {"bandwidth": 25e9, "storage_bandwidth": 250e6, "network_bandwidth": 1.25e9}
    names = {"dense": list(speeds)[:2], "partial": []}.get(strategy, speeds)
    job, _ = plan_job(
        command,
        MeasuredTimes(iteration_s=model.iteration_s, **{each: speeds[each] for each in names}),
        world_size=model.world_size,
        ranks_per_node=model.ranks_per_node,
    )
    kind = registry.kind_of(strategy)
    assert kind is not None
    found = kind.plan(job)
    return Plan(job, found.footprint, found.report())


def comment_of(name: str) -> str:
    """Return the lines on memory and failures that a model file must have."""
    static, activations = gpu_memory(name)
    lines = [
        f"The fullest GPU has {static / 1e9:.0f} GB of weights, gradients and optimizer, and about "
        f"{math.ceil(activations / 1e9)} GB of activations.",
        "Host memory of a node, most bytes of a checkpoint, and what a failure costs, as plan.sh says:",
        "",
        *_strategies_table(name).splitlines(),
    ]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _strategies_table(name: str) -> str:
    headers = (
        "strategy",
        "memory",
        "checkpoint",
        "every",
        "repeated",
        "updates lost",
        "with all nodes",
    )
    return table([_row(strategy, plan_of(name, strategy)) for strategy in STRATEGIES], headers)


def _row(strategy: str, plan: Plan) -> tuple[str, ...]:
    text, checkpoint = plan.text, plan.footprint.checkpoint_bytes
    iterations, repeated, lost = plan.job.persist_interval, "1 to 2", ("none", "none")
    if strategy == "sparse":
        (window,) = re.findall(r"window: (\d+), the shortest", text)
        (repeated,) = re.findall(r"again, conversion included: (\d+ to \d+),", text)
        iterations *= int(window)
    if strategy == "partial":
        (some,) = re.findall(r"memory or peers +([\d.]+)", text)
        (everything,) = re.findall(r"storage \(all nodes lost\) +([\d.]+)", text)
        lost = (f"{float(some):g} iterations", f"{float(everything):g} iterations")
    return (
        strategy,
        f"{plan.node_bytes / 1e9:,.0f} GB",
        f"{checkpoint / 1e9:,.0f} GB",
        f"{iterations} iterations",
        f"{repeated} iterations",
        *lost,
    )


def gpu_memory(name: str) -> tuple[int, int]:
    """Return the bytes of the rank that needs the most: of its state, and about those of activations.

    The state is 16-bit weights and fp32 gradients of what the rank holds, and 12 bytes of what it updates.
    With full recomputation, activations are the inputs of all layers, once for each micro-batch in flight,
    one layer's own with their gradients (routers in balance), and on the last stage those of the loss.
    """
    job, flags = plan_of(name, "dense").job, read_model(name).flags
    given = dict(zip(flags, flags[1:], strict=False))
    tokens = int(given["--seq-length"]) * int(given["--micro-batch-size"])
    hidden, vocabulary = int(given["--hidden-size"]), int(given["--padded-vocab-size"])
    found = []
    for stage in job.stages:
        (number, *_) = stage.numbers
        held = sum(stage.elements[unit] for unit in stage.ranks[0].units)
        state = 6 * held + 12 * max(rank.num_elements for rank in stage.ranks)
        layers = len({unit.layer_name for unit in stage.elements if unit.layer >= 0})
        inputs = 2 * tokens * hidden * layers * (job.num_stages - number)
        loss = 10 * tokens * vocabulary if number == job.num_stages - 1 else 0
        found.append((state, inputs + _layer_bytes(given, tokens) + loss))
    return max(found, key=sum)


def _layer_bytes(given: Mapping[str, str], tokens: int) -> int:
    """Return the bytes of one MoE layer's activations and of their gradients."""
    hidden, heads = int(given["--hidden-size"]), int(given["--num-attention-heads"])
    width = int(given.get("--kv-channels", hidden // heads)) * heads * 4
    if "--kv-lora-rank" in given:
        sizes = (
            given[f"--{name}"] for name in ("qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
        )
        width = heads * 2 * sum(map(int, sizes))
    routed = int(given["--moe-router-topk"])
    expert = 2 * hidden + 3 * int(given.get("--moe-ffn-hidden-size", given["--ffn-hidden-size"]))
    shared = 3 * int(given.get("--moe-shared-expert-intermediate-size", 0))
    return 2 * 2 * tokens * (width + 4 * hidden + routed * expert + shared)
