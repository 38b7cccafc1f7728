"""Ranks and experts must divide; training and plan refuse the same."""

from argparse import Namespace
from typing import Any

import pytest

from megatron.fault_tolerance.seams.settings import check_experts, check_world_size
from moe_ft.errors import ConfigError


def sizes(**changes: Any) -> Namespace:
    """Return Megatron's arguments of a job on one rank."""
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    ones = {f"{name}_parallel_size": 1 for name in names}
    return Namespace(**{**ones, "expert_tensor_parallel_size": None, **changes})


@pytest.mark.parametrize(
    ("changes", "world_size"),
    [
        ({}, 1),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2),
        ({"expert_model_parallel_size": 4}, 8),
    ],
)
def test_sizes_that_divide_the_ranks_are_accepted(changes: dict[str, int], world_size: int) -> None:
    check_world_size(sizes(**changes), world_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"context_parallel_size": 3},
            "world size 4 must be a multiple of --tensor-model-parallel-size=1 x .*=3 = 3. Start",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4},
            r"multiple of --expert-tensor-parallel-size=2 \(default: the tensor .* = 8. Start",
        ),
        (
            {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 4},
            "multiple of --expert-tensor-parallel-size=2 x --expert-model-parallel-size=4 x .* = 8",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_world_size(sizes(**changes), 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 2, 1), "--expert-model-parallel-size=2 needs a model with experts. Add"),
        ((5, 2, 1), "--num-experts=5 must be a multiple of --expert-model-.*=2: .* Change"),
        ((4, 2, 5), "--moe-router-topk=5 must be at most --num-experts=4. Lower"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(
    given: tuple[int | None, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_experts(*given)


def test_model_without_experts_needs_no_expert_parallelism() -> None:
    check_experts(None, 1, 2)
