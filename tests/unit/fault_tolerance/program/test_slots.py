"""Slots of experts are refused where they cannot work; their ranks are one expert-parallel group."""

import shlex

import pytest

from megatron.fault_tolerance.program.slots import SLOT_REFUSALS, complete
from megatron.fault_tolerance.seams.refusals import SCRIPT_REFUSALS, check_refusals
from moe_ft.errors import ConfigError
from tests.unit.fault_tolerance.parsing import parse

SLOTS = "--moe-ft-expert-slots"
# Flags after those of a job of 8 ranks with 4 experts, and what the refusal says.
REFUSED = {
    f"{SLOTS} 1 --num-experts 16": f"{SLOTS}=1 gives fewer slots than --num-experts: every expert of a layer "
    "needs one. Give more, or start more ranks.",
    f"{SLOTS} 1 --moe-ft-min-replicas 3": f"{SLOTS}=1 gives too few slots for --moe-ft-min-replicas",
    f"{SLOTS} 1 --expert-model-parallel-size 4": f"{SLOTS}=1 needs all ranks of a pipeline stage in one "
    "expert-parallel group: every rank has a part of every expert. Leave --expert-model-parallel-size out.",
    f"{SLOTS} 1 --tensor-model-parallel-size 2": "needs --expert-tensor-parallel-size 1",
    f"{SLOTS} 1 --transformer-impl transformer_engine": "needs --transformer-impl local",
    f"{SLOTS} 1 --moe-grouped-gemm": "cannot be used with --moe-grouped-gemm: its experts are no modules",
    f"{SLOTS} 1 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep": "cannot be used with "
    "--moe-flex-dispatcher-backend ncclep",
    f"{SLOTS} 1 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity": "cannot be used with "
    "--moe-pad-expert-input-to-capacity: replicas share the tokens of an expert",
    f"{SLOTS} 1 --moe-ft-capacity-boost 0.1": "cannot be used with --moe-ft-capacity-boost: the capacity",
    f"{SLOTS} 1 --cuda-graph-impl local": "needs --cuda-graph-impl none",
    f"{SLOTS} 1 --mtp-num-layers 1": "cannot be used with --mtp-num-layers: Megatron builds its layers",
    f"{SLOTS} 1 --log-num-zeros-in-grad": "cannot be used with --log-num-zeros-in-grad: it would count",
    f"{SLOTS} 1 --spec module function": "cannot be used with --spec: slots go into Megatron's own spec",
    f"{SLOTS} 1 --save DIR": "cannot be used with --save: Megatron's checkpoints hold experts",
    f"{SLOTS} 1 --load DIR": "cannot be used with --load",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_slots_cannot_be_used_with_is_refused_by_name(flags: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_refusals(parse(*shlex.split(flags)), SLOT_REFUSALS)
    assert REFUSED[flags] in str(refusal.value)


def test_script_of_ones_own_has_no_slots() -> None:
    with pytest.raises(ConfigError, match=f"{SLOTS}=1 needs pretrain_gpt_moe.py"):
        check_refusals(parse(SLOTS, "1"), SCRIPT_REFUSALS)


@pytest.mark.parametrize("size", [(), ("--expert-model-parallel-size", "4")])
def test_all_ranks_of_a_stage_are_expert_parallel(size: tuple[str, ...]) -> None:
    args = parse(SLOTS, "1", "--pipeline-model-parallel-size", "2", *size)
    check_refusals(args, SLOT_REFUSALS)
    complete(args)
    assert args.expert_model_parallel_size == 4
