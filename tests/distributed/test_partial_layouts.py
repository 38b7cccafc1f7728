"""Partial checkpoints in several layouts: all tokens are counted, and each rank saves what `plan` says."""

import pytest

from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.planning.planned_job import MeasuredTimes
from moe_ft.strategies.partial.plan import PartialPlan
from moe_ft.strategies.partial.selection import PartialConfig
from tests.demo_model import RERUNS
from tests.jobs import CheckpointJob
from tests.partial_runs import LAYERS, PARTIAL, follow, recount
from tests.shares import share_of


def planned_bytes(*flags: str, num_ranks: int) -> list[list[int]]:
    """Return ``[rank][snapshot]`` the bytes that `plan` expects with one expert per layer."""
    command = read_command([*flags, "--moe-ft-event-log", "events"])
    planned, _ = plan_job(command, MeasuredTimes(), world_size=num_ranks, ranks_per_node=num_ranks)
    workload = PartialPlan(planned, PartialConfig()).plan_workload(1)
    return [list(of_rank) for of_rank in zip(*workload.rotation, strict=True)]


def saved_bytes(job: CheckpointJob, until: int) -> list[list[int]]:
    """Return ``[rank][snapshot]`` the bytes that each rank saved in the first start until an iteration."""
    return [
        [
            line["bytes"]
            for line in job.events("snapshot", rank)
            if line["incarnation"] == 0 and line["iteration"] <= until
        ]
        for rank in range(job.num_ranks)
    ]


@pytest.mark.parametrize("sharding", share_of(["none", "equal", "adaptive"], "adaptive"))
def test_replicated_state_is_saved_and_recovered_however_it_is_divided(
    job: CheckpointJob, sharding: str
) -> None:
    job.base = [flag for flag in job.base if flag != "--use-distributed-optimizer"]
    job.run_with_faults(
        "kill:1@7:backward",
        flags=(
            *PARTIAL,
            *("--train-iters", "8", "--moe-ft-k-snapshot", "1", "--moe-ft-sharding", sharding),
            *("--num-layers", "3"),  # odd: one rank has more experts
            *("--moe-ft-persist-interval", "1"),
        ),
        storage=True,
    )
    assert job.stored()[-1] == 8
    (recovery,) = job.events("recovery")
    counted = recount(job, 1, layers=LAYERS[:3])
    follow(counted, 0, 0, recovery["restored_iteration"])
    assert recovery["lost_per_expert"] == counted.recover(recovery["restored_iteration"])
    planned = planned_bytes(
        *(*job.base, "--num-layers", "3", *PARTIAL, "--moe-ft-sharding", sharding), num_ranks=2
    )
    assert saved_bytes(job, 6) == [of_rank[:3] for of_rank in planned]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("layout", "is_sharded"),
    [
        ({"pp": 2, "ep": 2}, True),
        ({"ep": 2}, False),  # two ranks hold each expert and share its parts
    ],
)
def test_layouts_count_the_tokens_of_each_stage(
    job: CheckpointJob, layout: dict[str, int], is_sharded: bool
) -> None:
    # Odd without stages: two ranks that share an expert then save unequal parts of it.
    num_layers = 4 if "pp" in layout else 3
    layers = LAYERS[:num_layers]
    optimizer = {"use_distributed_optimizer": is_sharded}
    job.set_model(4, layout, **{"train_iters": 8, "num_layers": num_layers, **optimizer})
    at = 7 if is_sharded else 5  # some experts have not been saved by then
    results = job.run_with_faults(
        f"kill:3@{at}:backward",
        flags=(*PARTIAL, "--moe-ft-k-snapshot", "1", "--moe-ft-sharding", "adaptive"),
    )
    warning = "--moe-ft-sharding=adaptive changes nothing with --use-distributed-optimizer"
    assert (warning in results[0].output(0)) == is_sharded
    (recovery,) = job.events("recovery")
    stages = [layers[:2], layers[2:]] if "pp" in layout else [layers]
    lost: dict[str, list[int]] = {}
    for of_stage in stages:
        counted = recount(job, 1, num_ranks=4, layers=of_stage)
        follow(counted, 0, 0, recovery["restored_iteration"])
        lost.update(counted.recover(recovery["restored_iteration"]))
    assert recovery["lost_per_expert"] == lost
    assert recovery["lost_tokens"] == sum(map(sum, lost.values())) > 0
    planned = planned_bytes(
        *(*job.base, *PARTIAL, "--moe-ft-sharding", "adaptive"), num_ranks=job.num_ranks
    )
    assert saved_bytes(job, 4) == [of_rank[:2] for of_rank in planned]


def test_router_load_counts_each_processed_token_once(
    job: CheckpointJob, expected: list[tuple[str, str]]
) -> None:
    def counts(name: str, *flags: str) -> list[dict[str, list[int]]]:
        job.events_dir = job.folder / name
        job.run("--moe-ft-strategy", "none", "--moe-ft-router-log", "--train-iters", "2", *flags)
        return [line["tokens"] for rank in range(2) for line in job.events("router_load", rank)]

    plain = counts("plain")
    assert len(plain) == 4
    for tokens in plain:
        assert [sum(tokens[layer]) for layer in LAYERS] == [16 // 2 * 32 * 2] * 4
    # Each layer runs its forward pass twice, and Megatron runs every iteration but the first one twice.
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    repeated = counts("repeated", *recompute, "--recompute-num-layers", "1", *RERUNS)
    assert repeated == plain
    capacity = ("--moe-expert-capacity-factor", "0.5")
    dropped = counts("dropped", *capacity)
    assert all(sum(tokens["layer.0"]) < 16 // 2 * 32 * 2 for tokens in dropped)
    padded = counts("padded", *capacity, "--moe-pad-expert-input-to-capacity")
    assert padded[0] == dropped[0]
