"""Ranks of real jobs save the bytes that `plan` says, to the byte, in layouts of every kind."""

import pytest

from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from moe_ft.strategies.partial.plan import PartialPlan
from moe_ft.strategies.partial.selection import PartialConfig
from tests.demo_model import deepseek_flags, layout_flags, model_flags
from tests.jobs import CheckpointJob
from tests.partial_runs import PARTIAL as PARTIAL_FLAGS
from tests.shares import share_of

K = 1
REPLICATED = {"use_distributed_optimizer": False}
LAYOUTS = {
    "pp2 ep2": (4, [*model_flags(), *layout_flags({"pp": 2, "ep": 2})]),
    "dp2": (2, [*model_flags(num_layers=3, hidden_size=48), "--overlap-grad-reduce"]),
    "dp2, small buckets": (
        2,
        [*model_flags(), "--overlap-grad-reduce", "--ddp-bucket-size", "20000"],
    ),
    "dp4 ep2, replicated": (4, [*model_flags(**REPLICATED), *layout_flags({"ep": 2})]),
    "tp2 dp2": (4, [*model_flags(), *layout_flags({"tp": 2}), "--sequence-parallel"]),
    "tp2 ep2, whole experts": (
        4,
        [*model_flags(), *layout_flags({"tp": 2, "etp": 1, "ep": 2}), "--sequence-parallel"],
    ),
    "soap, replicated": (2, model_flags(optimizer="soap", **REPLICATED)),
    "tied embeddings, pp2": (
        2,
        [
            *model_flags(untie_embeddings_and_output_weights=False),
            *layout_flags({"pp": 2}),
        ],
    ),
    "virtual stages": (
        2,
        [*model_flags(num_layers_per_virtual_pipeline_stage=1), *layout_flags({"pp": 2})],
    ),
    "slots": (
        4,
        [*model_flags(num_experts=8), *layout_flags({"pp": 2}), "--moe-ft-expert-slots", "5"],
    ),
    "slots, tp2, replicated": (
        4,
        [
            *model_flags(**REPLICATED),
            *layout_flags({"tp": 2, "etp": 1}),
            *("--sequence-parallel", "--moe-ft-expert-slots", "2"),
        ],
    ),
    "deepseek": (
        4,
        [
            *deepseek_flags(
                num_layers=4,
                moe_layer_freq="([0]*1+[1]*3)",
                pipeline_model_parallel_layout="Ettt|tmL",
            ),
            *layout_flags({"pp": 2, "ep": 2}),
        ],
    ),
}
CHOSEN = ("tp2 ep2, whole experts", "deepseek")


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("strategy", ["dense", "partial"])
@pytest.mark.parametrize("name", share_of(LAYOUTS, *CHOSEN))
def test_ranks_save_what_plan_says(job: CheckpointJob, name: str, strategy: str) -> None:
    num_ranks, model = LAYOUTS[name]
    own: tuple[str, ...] = ("--moe-ft-strategy", "dense")
    if strategy == "partial":
        own = (*PARTIAL_FLAGS, "--moe-ft-k-snapshot", str(K))
    job.num_ranks = num_ranks
    job.base = [*model, "--train-iters", "4", *job.place.dataset_flags]
    job.run(*own).check()
    command = read_command([*model, *own, "--moe-ft-event-log", "events"])
    planned, _ = plan_job(command, MeasuredTimes(), world_size=num_ranks, ranks_per_node=num_ranks)
    expected = rotation_of(planned, strategy)
    saved = [[line["bytes"] for line in job.events("snapshot", rank)] for rank in range(num_ranks)]
    assert saved[0]
    for number, of_ranks in enumerate(zip(*saved, strict=True)):
        assert list(of_ranks) == expected[number % len(expected)]


def rotation_of(planned: PlannedJob, strategy: str) -> list[list[int]]:
    """Return ``[snapshot][rank]`` planned bytes, until snapshots are the first ones again."""
    if strategy == "partial":
        workload = PartialPlan(planned, PartialConfig()).plan_workload(K)
        return [list(each) for each in workload.rotation]
    stages = planned.stages
    return [planned.by_rank([[rank.full_bytes for rank in stage.ranks] for stage in stages])]
