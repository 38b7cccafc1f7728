"""Couplings between pipeline stages that no record of an iteration can answer.

A stage that runs an iteration again alone gets the tensors of its neighbours from their logs, and the numbers
of the whole job from records: gradient norm, number of tokens, found-inf. A gradient that Megatron sums over
several stages is in neither. These stages must run the iteration again together.

Pure. planning/local_recovery.py plans with the couplings; planning/remains.py has the layout that they belong
to.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_TIED = "tied word embeddings (no --untie-embeddings-and-output-weights)"
_MTP = "the word embedding with the layers of --mtp-num-layers"
_POSITIONS = "position embeddings"
_EVERYWHERE = "parameters that Megatron sums over all stages"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coupling:
    """Stages that run an iteration again together or not at all.

    Attributes:
        stages: ascending, at least two.
    """

    stages: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedWeights:
    """Weights of which several stages have a copy, each with a part of the gradient.

    Attributes:
        mtp_stages: stages that have multi-token prediction layers, which embed tokens too.
        embedding_group: stages of the group in which Megatron sums gradients of word embeddings, if a script
            has chosen them; None: the first one, those with such layers, and the last one if it is tied.
        position_stages: stages of the group for position embeddings; Megatron's default is the first one.
        has_common: whether parameters are summed over all stages (has_cond_embedder, flextron).
    """

    num_stages: int
    is_tied: bool
    mtp_stages: tuple[int, ...] = ()
    embedding_group: tuple[int, ...] | None = None
    position_stages: tuple[int, ...] = (0,)
    has_common: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CouplingReport:
    """Couplings of a job, and what they mean for its recoveries.

    Attributes:
        couplings: no stage is in two of them.
        line: one line for people; empty if every stage can run iterations again alone.
        is_global: whether a recovery that runs iterations again always needs all stages.
    """

    couplings: tuple[Coupling, ...]
    line: str
    is_global: bool


def shared_weights_of(args: Any) -> SharedWeights:
    """Return the weights that stages share, as Megatron's own programs build the model."""
    num_stages, layout = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    mtp_stages: tuple[int, ...] = ()
    if args.mtp_num_layers:
        mtp_stages = (num_stages - 1,) if layout is None else mtp_stages_of(layout, num_stages)
    return SharedWeights(
        num_stages=num_stages,
        is_tied=not args.untie_embeddings_and_output_weights,
        mtp_stages=mtp_stages,
    )


def mtp_stages_of(layout: str, num_stages: int) -> tuple[int, ...]:
    """Return the stages with multi-token prediction layers.

    Args:
        layout: value of --pipeline-model-parallel-layout, such as ``Et*3|(tt|)*5m|L``.
        num_stages: pipeline ranks; virtual stages go round them.
    """
    unrolled = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(pattern, lambda found: found[1] * int(found[2]), unrolled)
    parts = enumerate(unrolled.split("|"))
    return tuple(sorted({index % num_stages for index, part in parts if "m" in part}))


def report_couplings(weights: SharedWeights) -> CouplingReport:
    """Return the couplings of a job, and the line that says whether recoveries will be global, and why."""
    couplings = _merged(_couplings(weights))
    is_global = weights.num_stages == 1 or any(
        len(each.stages) == weights.num_stages for each in couplings
    )
    if weights.num_stages == 1:
        line = "recoveries that run iterations again are global: the job has one pipeline stage"
    elif is_global:
        line = (
            f"recoveries that run iterations again are global: all {weights.num_stages} stages share "
            f"{couplings[0].reason}"
        )
    else:
        line = "; ".join(
            f"stages {_names(each.stages)} always run iterations again together: they share {each.reason}"
            for each in couplings
        )
    return CouplingReport(couplings=couplings, line=line, is_global=is_global)


def _couplings(weights: SharedWeights) -> list[Coupling]:
    found = []
    last = weights.num_stages - 1
    group = set(weights.embedding_group or ())
    if weights.is_tied:
        found.append((group | {0, last}, _TIED))
    if weights.mtp_stages:
        found.append((group | {0, *weights.mtp_stages}, _MTP))
    found.append((set(weights.position_stages), _POSITIONS))
    if weights.has_common:
        found.append((set(range(weights.num_stages)), _EVERYWHERE))
    return [
        Coupling(stages=tuple(sorted(stages)), reason=reason)
        for stages, reason in found
        if len(stages) > 1
    ]


def _merged(couplings: Iterable[Coupling]) -> tuple[Coupling, ...]:
    """Return couplings that have no stage in common."""
    merged: list[Coupling] = []
    for each in couplings:
        touched = [other for other in merged if set(other.stages) & set(each.stages)]
        stages = {stage for other in (*touched, each) for stage in other.stages}
        reasons = dict.fromkeys(other.reason for other in (*touched, each))
        merged = [other for other in merged if other not in touched]
        merged.append(Coupling(stages=tuple(sorted(stages)), reason=" and ".join(reasons)))
    return tuple(sorted(merged, key=lambda each: each.stages))


def _names(stages: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, stages[:-1]))} and {stages[-1]}"
