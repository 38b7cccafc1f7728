"""Entries of an index that describe iterations: their records, and the progress of experts.

The encoding and its checksum are in format/encoding.py. Taking a record and putting it back is in
state/record.py.
"""

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]  # of a window: much is built of it
RandomStates = dict[str, Any]
Gaps = tuple[tuple[Count, Count], ...]  # disjoint ranges of token numbers, ascending
# JSON has no number for these; a clipped gradient norm may be one of them.
_Float = float | Literal["inf", "-inf", "nan"]


class RecordTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A small tensor in a record: base64 in JSON."""

    dtype: str
    shape: tuple[Count, ...]
    data: bytes


class OptimizerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scalars of one inner optimizer.

    Attributes:
        groups: per parameter group its scalars (lr, wd, step where it lives in the group, ...).
        steps: per parameter its step, for optimizers that keep one (torch's Adam); a single number under
            the name "*" if all are equal.
        scaler: loss scale and counters, None without one.
        found_inf: whether the gradients held an infinity, None if that was not checked.
        scales: scale of each low-precision state tensor (Transformer Engine), by parameter and key; FP8
            tensors also have KEY._scale_inv.
    """

    groups: tuple[dict[str, Any], ...]
    steps: dict[str, float]
    scaler: dict[str, Any] | None = None
    found_inf: bool | None = None
    scales: dict[str, RecordTensor] = {}


class IterationRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """State at the end of one iteration apart from units, including the input of a replay.

    Attributes:
        iteration: of the state; one more than the iteration that produced it.
        grad_norm, grad_norms_by_group: as clipping used them; None after a skipped step.
        num_tokens: with --calculate-per-token-loss, over the whole batch.
        consumed_valid_samples: after the evaluation that follows the iteration, if one does.
        extra_state: FP8 tensors of Transformer Engine's modules, by module and tensor name.
        tokens_per_expert: ``[expert]`` by MoE layer name, counted on this rank.
        loop_state: state that a custom loop has given for itself on this rank. Without any, the field is not
            written: files of other loops are those of earlier versions.
    """

    iteration: Count
    grad_norm: _Float | None
    grad_norms_by_group: dict[str, _Float]
    num_tokens: int | None
    optimizers: tuple[OptimizerRecord, ...]
    scheduler: dict[str, Any]
    consumed_train_samples: Count
    consumed_valid_samples: Count
    skipped_train_samples: Count
    num_floating_point_operations: float
    num_microbatches: Count
    rng: RandomStates
    buffers: dict[str, RecordTensor]
    extra_state: dict[str, RecordTensor]
    tokens_per_expert: dict[str, tuple[int, ...]]
    loop_state: dict[str, Any] = {}


class JobNumbers(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Numbers of the whole job at the end of an iteration: answers for a stage that runs it again alone.

    They are those of the record of the same state, of any rank.

    Attributes:
        found_inf: by inner optimizer of the rank that noted them, see `OptimizerRecord`. Empty if none
            checks its gradients.
    """

    iteration: Count
    grad_norm: _Float | None
    num_microbatches: Count
    consumed_train_samples: Count
    grad_norms_by_group: dict[str, _Float] = {}
    num_tokens: int | None = None
    found_inf: tuple[bool, ...] = ()
    consumed_valid_samples: Count = 0
    skipped_train_samples: Count = 0
    num_floating_point_operations: float = 0.0


# Counters of a loop in one state; only a record has what belongs to the rank alone.
Counted = IterationRecord | JobNumbers


def numbers_of(record: IterationRecord) -> JobNumbers:
    """Return the numbers of the whole job in a record."""
    names = set(JobNumbers.__struct_fields__) - {"found_inf"}
    checked = [each.found_inf for each in record.optimizers]
    return JobNumbers(
        **{name: getattr(record, name) for name in names},
        found_inf=tuple(bool(each) for each in checked) if None not in checked else (),
    )


class ExpertProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Training progress of a stage's experts, and their losses in recoveries.

    Attributes:
        cursor, k_snapshot, k_persist: state of the selection.
        least_k: lower limit of k_snapshot from now on (Dynamic-K).
        interval: iterations between snapshots.
        routed_tokens: ``[expert]`` by MoE layer, tokens that the experts have received so far.
        gaps: ``[expert]`` by MoE layer, ranges of these tokens whose updates recoveries have dropped.
        planned_tokens: tokens times top-k that a layer processes in the whole planned run.
        owed: ``[expert]`` by MoE layer, tokens that experts are to get above their capacity.
        boost_left: iterations for which the capacity is still raised.
    """

    cursor: Count
    k_snapshot: Count
    k_persist: Count
    least_k: Count
    interval: Count
    routed_tokens: dict[str, tuple[Count, ...]]
    gaps: dict[str, tuple[Gaps, ...]]
    planned_tokens: Count
    owed: dict[str, tuple[Count, ...]] = {}
    boost_left: Count = 0
