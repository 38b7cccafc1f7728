"""Jobs in which peers cannot share micro-batches are refused, with flag, reason and remedy."""

from argparse import Namespace
from typing import Any

import pytest

from megatron.fault_tolerance.degraded.rules import check_job
from moe_ft.errors import ConfigError
from tests.unit.fault_tolerance.parsing import parse

SUPPORTED = ("--pipeline-model-parallel-size", "2", "--moe-ft-strategy", "dense")
# Flags, what is set as Megatron sets it, and the message.
BAD: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((), {"virtual_pipeline_model_parallel_size": 2}, "virtual stages .* one stage a rank"),
    (
        ("--pipeline-model-parallel-layout", "Et|(tt|)*2L"),
        {},
        "a layout with virtual stages does not work",
    ),
    (("--overlap-moe-expert-parallel-comm",), {}, "--overlap-moe-expert-parallel-comm .* as one"),
    ((), {"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
    (("--cuda-graph-impl", "local"), {}, "--cuda-graph-impl=local .* usual order"),
    (
        ("--moe-router-load-balancing-type", "global_aux_loss"),
        {},
        "load-balancing-type=global_aux_loss .* all data-parallel ranks. Use aux_loss",
    ),
    ((), {"fp8": "hybrid"}, "--fp8-recipe=delayed .* Use another recipe"),
    ((), {"variable_seq_lengths": True}, "--variable-seq-lengths .* one shape"),
    (
        ("--dataloader-type", "cyclic"),
        {},
        "--dataloader-type=cyclic .* Use --dataloader-type single",
    ),
]


def job(*flags: str, **changes: Any) -> Namespace:
    args = parse(*SUPPORTED, *flags)
    for name, value in {"virtual_pipeline_model_parallel_size": None, **changes}.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--context-parallel-size", "2"),
        ("--pipeline-model-parallel-layout", "Ett|ttL"),
        ("--num-experts", "4", "--expert-model-parallel-size", "4"),
        ("--fp8-recipe", "blockwise"),
        ("--moe-ft-strategy", "sparse", "--moe-ft-upstream-log", "--moe-ft-breakpoints"),
        ("--fp16", "--save", "there", "--eval-iters", "3", "--mtp-num-layers", "1"),
    ],
    ids=" ".join,
)
def test_what_crowding_can_do_peers_can_share(flags: tuple[str, ...]) -> None:
    check_job(job(*flags))


@pytest.mark.parametrize(("flags", "changes", "message"), BAD, ids=[each[2] for each in BAD])
def test_job_whose_micro_batches_cannot_be_shared_is_refused_by_flag_and_value(
    flags: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_job(job(*flags, **changes))
