"""Small jobs with the flags of public recipes lose a rank and end in the same bits."""

import pytest

from tests.jobs import NUM_ITERATIONS, CheckpointJob
from tests.recipes.recipe import Recipe, read_recipes
from tests.recipes.small import NUM_RANKS, small_words

# One model from Megatron-Bridge has all features of the model of another recipe.
_IN_MAKE_TEST = "deepseek_v3_h100_bridge"
# Its attention is built by Transformer Engine alone.
_NOT_ON_CPUS = "qwen3_next_80b_h100"


def _parameters() -> list[object]:
    """Return the recipes whose small jobs differ."""
    found: dict[tuple[str, ...], Recipe] = {}
    for each in sorted(read_recipes(), key=lambda recipe: recipe.key != _IN_MAKE_TEST):
        if each.key != _NOT_ON_CPUS:
            found.setdefault(tuple(sorted(small_words(each, NUM_ITERATIONS))), each)
    return [
        pytest.param(
            each, id=each.key, marks=[] if each.key == _IN_MAKE_TEST else [pytest.mark.rest]
        )
        for each in found.values()
    ]


@pytest.mark.parametrize("recipe", _parameters())
@pytest.mark.parametrize("strategy", [pytest.param("dense", marks=pytest.mark.rest), "sparse"])
def test_small_job_with_the_flags_of_a_recipe_recovers_bit_for_bit(
    job: CheckpointJob, recipe: Recipe, strategy: str
) -> None:
    job.num_ranks = NUM_RANKS
    job.base = [*small_words(recipe, NUM_ITERATIONS), *job.place.dataset_flags]

    window = ("--moe-ft-window", "2") if strategy == "sparse" else ()
    job.run_with_faults("kill:1@4:backward", flags=("--moe-ft-strategy", strategy, *window))

    assert job.digests() == job.reference()
