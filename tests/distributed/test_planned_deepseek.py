"""Ranks of a model like DeepSeek-V3, on unequal pipeline stages, save the bytes that `plan` says."""

import pytest

from moe_ft.planning.model_size import unit_parameters
from moe_ft.planning.ownership import saved_parameters
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.report import saved_model
from tests.demo_model import deepseek_flags
from tests.jobs import CheckpointJob
from tests.partial_runs import PARTIAL
from tests.shares import share_of
from tests.unit.moe_ft.planning.described import planned_job

NUM_RANKS, K = 4, 1
# Without the bias of experts, which plan names and leaves out, and with tensors that need no gaps.
MODEL = deepseek_flags(
    moe_router_enable_expert_bias=False,
    q_lora_rank=64,
    kv_lora_rank=64,
    num_layers=4,
    moe_layer_freq="([0]*1+[1]*3)",
    pipeline_model_parallel_size=2,
    pipeline_model_parallel_layout="Ettt|tmL",
    expert_model_parallel_size=2,
    train_iters=4,
)


@pytest.mark.parametrize("strategy", share_of(["dense", "partial"], "partial"))
def test_ranks_save_what_plan_says(job: CheckpointJob, strategy: str) -> None:
    own: tuple[str, ...] = ("--moe-ft-strategy", "dense")
    if strategy == "partial":
        own = (*PARTIAL, "--moe-ft-k-snapshot", str(K))
    job.base, job.num_ranks = [*MODEL, *job.place.dataset_flags], NUM_RANKS
    job.run(*own).check()
    plan = planned_job(*MODEL, *own, world_size=NUM_RANKS)
    rotation = saved_model(plan, PartialConfig()).plan_workload(K).rotation
    if strategy == "dense":
        parameters = [
            count
            for units in plan.stages
            for count in saved_parameters(plan.shape, units, plan.layout)
        ]
        rotation = (tuple(count * plan.byte_model.optimizer for count in parameters),)
        copies = plan.stages[-1].keys() & plan.stages[0].keys()
        held = sum(unit_parameters(plan.shape).values())
        assert sum(parameters) == held + sum(plan.stages[-1][unit] for unit in copies)
    saved = [[line["bytes"] for line in job.events("snapshot", rank)] for rank in range(NUM_RANKS)]
    for number, of_ranks in enumerate(zip(*saved, strict=True)):
        assert of_ranks == rotation[number % len(rotation)]
    assert len(saved[0]) >= 2
