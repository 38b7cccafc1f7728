"""Jobs that flags describe, for tests of plans."""

import functools
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from moe_ft.strategies import registry

# 350 M parameters per token: MoC-System, Table 1, with the vocabulary as it is.
LARGE = (
    *("--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16"),
    *("--num-experts", "16", "--moe-layer-freq", "([0,1])*12", "--max-position-embeddings", "2048"),
    *("--padded-vocab-size", "50257", "--bf16", "--use-distributed-optimizer"),
)
LARGE_OF_8 = (*LARGE, "--expert-model-parallel-size", "8")
# The model and layout of examples/quickstart.sh, on four ranks.
SMALL = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--num-experts", "8", "--ffn-hidden-size", "256", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--vocab-size", "256"),
    *("--position-embedding-type", "rope", "--bf16", "--use-distributed-optimizer"),
    *("--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
)
FULL = 10_436_352  # bytes of its heaviest rank of four

_EXPERTS = SMALL.index("--num-experts"), SMALL.index("--expert-model-parallel-size")
WITHOUT_EXPERTS = tuple(
    word
    for place, word in enumerate(SMALL)
    if place not in {at + 1 for at in _EXPERTS} | {*_EXPERTS}
)


# Settings that change nothing of the model that is built, which takes a second.
_LATER = re.compile(
    r"--moe-ft-(strategy|interval|k-\w+|window|max-window|\w+-budget|replication-factor|persist-[\w-]+)"
)


def planned_job(
    *flags: str, world_size: int = 8, ranks_per_node: int = 8, **measured: Any
) -> PlannedJob:
    """Return the job that flags of training and measured values describe."""
    if "--moe-ft-strategy" not in flags:
        flags = (*flags, "--moe-ft-strategy", "dense")
    of_model = tuple(
        word
        for before, word in pairwise(("", *flags))
        if not _LATER.fullmatch(word) and not _LATER.fullmatch(before)
    )
    job = _built(of_model, world_size, ranks_per_node)
    return replace(job.with_config(read_command(flags).config), measured=MeasuredTimes(**measured))


@functools.cache
def _built(flags: tuple[str, ...], world_size: int, ranks_per_node: int) -> PlannedJob:
    command = read_command((*flags, "--moe-ft-strategy", "dense"))
    return plan_job(command, MeasuredTimes(), world_size=world_size, ranks_per_node=ranks_per_node)[
        0
    ]


def planned(strategy: str, *flags: str, **facts: Any) -> str:
    """Return the plan of a job, without the checks that a start makes."""
    kind = registry.kind_of(strategy)
    assert kind is not None
    return kind.plan(planned_job(*flags, "--moe-ft-strategy", strategy, **facts)).report()


def row(text: str, first: str) -> list[str]:
    """Return the cells of the table row that begins with a cell."""
    (line,) = re.findall(rf"^ *{re.escape(first)}  .*$", text, re.MULTILINE)
    return re.split("  +", line.strip())
