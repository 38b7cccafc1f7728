"""Public recipes are accepted as docs/recipes.md says, and can be planned."""

import pytest

from megatron.fault_tolerance.program.plan import plan_job
from moe_ft.config.flags import config_from_words
from moe_ft.planning.planned_job import MeasuredTimes
from moe_ft.strategies import registry
from tests.recipes.page import PAGE, all_answers, page_with, tables
from tests.recipes.recipe import Recipe, read_recipes
from tests.recipes.table import STRATEGIES

_RECIPES = read_recipes()
# Parameters of the published models in billions, those that predict further tokens included.
_PUBLISHED = {
    "deepseek_v3": 682.6,
    "gpt_oss_120b": 116.8,
    "kimi_k2": 1026.4,
    "mixtral_8x22b": 140.6,
    "mixtral_8x7b": 46.7,
    "qwen3_235b": 235.1,
    "qwen3_30b": 30.5,
}
# Models whose layers only Transformer Engine can build, which needs a GPU.
_NOT_PLANNED = "qwen3_next_80b_h100"
# Sizes that the tokenizers of the recipes have, by model.
_VOCABULARY = {"deepseek": 129280, "kimi": 163840, "mixtral": 32000, "qwen3": 151936}


def test_recipes_get_the_answers_that_the_page_shows() -> None:
    answers = all_answers(_RECIPES)
    text = PAGE.read_text()

    assert page_with(text, tables(_RECIPES, answers)) == text, "run python -m tests.recipes"
    for strategy in STRATEGIES:
        refused = [key for key, each in answers.items() if not each[strategy].is_accepted]
        assert not refused, f"{strategy} refuses public recipes"


@pytest.mark.rest
@pytest.mark.parametrize(
    "recipe",
    [each for each in _RECIPES if each.key != _NOT_PLANNED],
    ids=lambda recipe: recipe.key,
)
def test_recipe_is_planned_with_the_parameters_of_its_model(recipe: Recipe) -> None:
    published = [size for key, size in _PUBLISHED.items() if recipe.key.startswith(key)]
    vocabulary = [size for key, size in _VOCABULARY.items() if recipe.key.startswith(key)]
    own = ["--moe-ft-strategy", "dense", "--moe-ft-job-id", "recipe"]
    config, _ = config_from_words(own, registry.option_types(), {"strategy": registry.names()})
    words = [*recipe.words, *own, *(f"--padded-vocab-size={each}" for each in vocabulary)]

    job, _ = plan_job(
        words,
        config,
        MeasuredTimes(),
        world_size=recipe.gpus,
        ranks_per_node=recipe.gpus_per_node,
        runs_script=True,
    )

    for size in published:
        assert job.model.num_parameters == pytest.approx(size * 1e9, rel=1e-3)
