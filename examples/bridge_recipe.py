"""Trains a recipe of Megatron-Bridge by its name. It knows nothing of moe_ft, whose flags are in front of it.

    python -m moe_ft launch --ranks-per-node 8 --moe-ft-strategy dense -- \\
        examples/bridge_recipe.py olmoe_7b_pretrain_8gpu_h100_bf16_config train.train_iters=1000

The other words are overrides of the recipe's configuration, as Bridge's own scripts take them. docs/bridge.md
says more.
"""

import sys

from megatron.bridge import recipes
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides


def read_config(name: str, overrides: list[str]) -> ConfigContainer:
    """Return the configuration of a recipe with overrides; ends the process if there is no such recipe."""
    recipe = getattr(recipes, name, None)
    if recipe is None:
        known = [each for each in dir(recipes) if "_pretrain_" in each and each.endswith("_config")]
        raise SystemExit(f"{name} is no recipe of megatron.bridge.recipes: {', '.join(known)}")
    config: ConfigContainer = process_config_with_overrides(
        recipe(), cli_overrides=overrides or None
    )
    return config


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(f"Usage: {sys.argv[0]} RECIPE [SECTION.FIELD=VALUE...]")
    pretrain(read_config(sys.argv[1], sys.argv[2:]), forward_step)
