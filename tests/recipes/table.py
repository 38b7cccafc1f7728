"""Answers of a start on GPUs to public recipes, by the rules of a start and Megatron's own parser.

The recipes have their real sizes; no process group exists. `python -m tests.recipes` writes the result to
docs/recipes.md, and test_recipes.py compares the two: a rule that changes shows as a change of that page.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron.fault_tolerance.program.arguments import REFUSALS
from megatron.fault_tolerance.program.plan import PlannedStart
from megatron.fault_tolerance.program.slots import SLOT_REFUSALS
from megatron.fault_tolerance.seams.refusals import SCRIPT_REFUSALS, refused
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.flags import as_arguments, config_from_words
from moe_ft.config.untested import UNTESTED
from moe_ft.errors import ConfigError
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts
from tests.recipes.recipe import Recipe

STRATEGIES = ("dense", "sparse", "partial", "selective")
_REPAIR = ("--moe-ft-strategy", "dense", "--moe-ft-repair", "auto")
# Columns of the table, each with the flags of moe_ft that a user adds.
COLUMNS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        **{name: ("--moe-ft-strategy", name) for name in STRATEGIES},
        "repair": _REPAIR,
        "crowding": (*_REPAIR, "--moe-ft-without-spare", "crowd"),
        "sharing": (*_REPAIR, "--moe-ft-without-spare", "share"),
        "gradients": ("--moe-ft-strategy", "dense", "--moe-ft-replicate", "gradients"),
        "slots": ("--moe-ft-strategy", "dense", "--moe-ft-expert-slots", "64"),
    }
)
_PERMISSION = re.compile(r"--moe-ft-allow-untested ([\w-]+)")
_STRATEGY = re.compile(r" with --moe-ft-strategy=\w+")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a start.

    Attributes:
        reasons: of a refusal; empty if the recipe is accepted.
        permissions: values of --moe-ft-allow-untested without which it is refused.
    """

    reasons: tuple[str, ...] = ()
    permissions: tuple[str, ...] = ()

    @property
    def is_accepted(self) -> bool:
        """True if a start takes the flags, perhaps with permissions."""
        return not self.reasons


def answers(recipe: Recipe) -> dict[str, Answer]:
    """Return the answer to each column's flags."""
    starts = {runs_script: _planned(recipe, runs_script) for runs_script in (False, True)}
    # Only pretrain_gpt_moe.py has slots; the recipes are run by scripts of Megatron's.
    return {
        column: _answer(starts["--moe-ft-expert-slots" not in words], words)
        for column, words in COLUMNS.items()
    }


def _planned(recipe: Recipe, runs_script: bool) -> PlannedStart:
    start = PlannedStart(
        recipe.words, world_size=recipe.gpus, on_gpus=True, runs_script=runs_script
    )
    for flag in recipe.of_newer:
        setattr(start._args, flag.removeprefix("--").replace("-", "_"), True)
    return start


def _answer(start: PlannedStart, words: Sequence[str]) -> Answer:
    """Return the answer of a start, after it has got each permission that it asks for."""
    permissions: list[str] = []
    while True:
        given = ["--moe-ft-allow-untested", ",".join(permissions)] if permissions else []
        config = _config([*words, *given])
        try:
            _check(start, config)
        except ConfigError as error:
            asked = _PERMISSION.search(str(error))
            if asked is None or asked[1] not in UNTESTED or asked[1] in permissions:
                return Answer(_reasons(start, config, error))
            permissions.append(asked[1])
        else:
            return Answer(permissions=tuple(permissions))


def _config(words: Sequence[str]) -> MoeFtConfig:
    named = [*words, "--moe-ft-job-id", "recipe"]
    choices = {"strategy": registry.names()}
    return config_from_words(named, registry.option_types(), choices)[0]


def _check(start: PlannedStart, config: MoeFtConfig) -> None:
    is_kept = config.recovery.repair != "off"
    start.check(config, {}, is_kept=is_kept, is_watched=is_kept)
    facts = ModelFacts(num_experts=start._args.num_experts, num_iterations=1_000_000)
    registry.check(config, facts)


def _reasons(start: PlannedStart, config: MoeFtConfig, first: ConfigError) -> tuple[str, ...]:
    """Return the reasons of all rules that refuse flags, and the first refusal, whatever its kind."""
    args = argparse.Namespace(**{**vars(start._args), **as_arguments(config)})
    has_slots = config.elastic.expert_slots > 0
    rules = (*REFUSALS, *SLOT_REFUSALS) if has_slots else SCRIPT_REFUSALS
    messages = (*refused(args, rules), str(first))
    return tuple(dict.fromkeys(_STRATEGY.sub("", each.partition(". ")[0]) for each in messages))
