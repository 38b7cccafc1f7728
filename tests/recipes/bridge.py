"""Answers of a start on GPUs to the recipes of Megatron-Bridge, and the tables of docs/recipes_bridge.md.

Run it with the environment of Bridge: `.venv/bridge/bin/python -m tests.recipes.bridge`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron.bridge.training.state import TrainState

from megatron.fault_tolerance.bridge.refusals import check_bridge, in_words_of_bridge, problems
from megatron.fault_tolerance.bridge.view import BridgeArgs
from megatron.fault_tolerance.repair.rules import answer_to_lost_nodes, why_not_in_place
from megatron.fault_tolerance.seams.refusals import SCRIPT_REFUSALS, check_refusals, refused
from megatron.fault_tolerance.seams.settings import check_model, check_settings, check_sizes
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.config.stock_defects import check_schedule
from moe_ft.config.untested import GRAPHS, UNTESTED
from moe_ft.errors import ConfigError
from tests.recipes.bridge_recipes import BridgeRecipe, build, read_recipes
from tests.recipes.page import page_with
from tests.recipes.table import COLUMNS, STRATEGIES, Answer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes_bridge.md"
ASKED = (*STRATEGIES, "repair")
# Beginning of a recipe's name -> the models in words.
_NAMES = {
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v4": "DeepSeek-V4",
    "glm45": "GLM-4.5",
    "glm52": "GLM-5.2",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "Kimi-K2",
    "moonlight": "Moonlight",
    "olmoe": "OLMoE",
    "qwen2": "Qwen2 and 2.5, dense",
    "qwen35": "Qwen3.5",
    "qwen3_next": "Qwen3-Next",
    "qwen3_235b": "Qwen3-235B",
    "qwen3_30b": "Qwen3-30B",
    "qwen3": "Qwen3, dense",
}
_PERMISSION = re.compile(r"--moe-ft-allow-untested ([\w-]+)")
_STRATEGY = re.compile(r" with --moe-ft-strategy=\w+")
_NUM_EXPERT_RANKS = re.compile(r"with \d+ expert-parallel ranks, more than (\d+)")


@dataclass(frozen=True, slots=True)
class Row:
    """A recipe with its answers.

    Attributes:
        precision: of its matrix products.
        error: why it has no configuration here.
        invalid: why Bridge itself refuses it with this Megatron.
    """

    recipe: BridgeRecipe
    precision: str = ""
    error: str = ""
    invalid: str = ""
    answers: Mapping[str, Answer] = field(default_factory=dict)


def all_rows() -> list[Row]:
    """Return all recipes with their answers."""
    return [_row(recipe) for recipe in read_recipes()]


def _row(recipe: BridgeRecipe) -> Row:
    try:
        built = build(recipe)
    except Exception as error:  # of any kind: it is counted
        return Row(recipe, error=f"{type(error).__name__}: {str(error).partition('://')[0]}")
    with patch.dict("os.environ", {"WORLD_SIZE": str(built.gpus)}):
        answers = {column: _answer(built.config, COLUMNS[column]) for column in ASKED}
    return Row(recipe, _precision(built.config.model), invalid=built.invalid, answers=answers)


def _precision(model: Any) -> str:
    if model.fp4 or not model.fp8:
        return "NVFP4" if model.fp4 else "BF16"
    return "MXFP8" if model.fp8_recipe == "mxfp8" else f"FP8, {model.fp8_recipe}"


def _answer(config: Any, words: Sequence[str]) -> Answer:
    """Return the answer to flags, after each permission that a start asks for has been given."""
    permissions: list[str] = []
    while True:
        given = ["--moe-ft-allow-untested", ",".join(permissions)] if permissions else []
        state = SimpleNamespace(train_state=TrainState())
        args = BridgeArgs(config, state, [*words, *given, "--moe-ft-job-id", "recipe"])
        try:
            _check(config, args)
        except ConfigError as error:
            asked = _PERMISSION.search(str(error))
            if asked is None or asked[1] not in UNTESTED or asked[1] in permissions:
                return Answer(_reasons(config, args, error))
            permissions.append(asked[1])
        else:
            return Answer(permissions=tuple(permissions))


def _check(config: Any, args: BridgeArgs) -> None:
    """Raise ConfigError on the first rule of a start on GPUs that a configuration breaks."""
    check_bridge(config, args)
    check_sizes(args)
    check_refusals(args, SCRIPT_REFUSALS)
    check_schedule(args)
    own = check_settings(args, on_gpus=True)
    check_model(args, own)
    if own.recovery.repair != "off":
        member = Member(Assignment(rank=0, local_rank=0, world_size=args.world_size, node=""))
        assert not why_not_in_place(own, args, member, on_gpus=True)
        answer_to_lost_nodes(own, args, member)


def _reasons(config: Any, args: BridgeArgs, first: ConfigError) -> tuple[str, ...]:
    """Return the reasons of all rules that no permission changes, and the first refusal of any kind."""
    args.moe_ft_allow_untested = ",".join(UNTESTED)
    messages = (*problems(config, args), *refused(args, SCRIPT_REFUSALS), str(first))
    return tuple(dict.fromkeys(_short(each, config) for each in messages))


def _short(message: str, config: Any) -> str:
    text = _STRATEGY.sub("", in_words_of_bridge(message, config).partition(". ")[0])
    return _NUM_EXPERT_RANKS.sub(r"with more than \1 expert-parallel ranks", text)


def written(text: str, rows: Sequence[Row]) -> str:
    """Return a text of the page with other tables."""
    return page_with(text, tables(rows), "tests.recipes.bridge")


def tables(rows: Sequence[Row]) -> str:
    """Return the tables of the page: numbers, reasons, recipes that Bridge refuses, and every recipe."""
    known = [row for row in rows if row.answers]
    invalid = [(row.invalid, row) for row in known if row.invalid]
    unknown = [(row.error, row) for row in rows if row.error]
    lines = (
        *_numbers_of_models(known),
        *("", "Why not, and how many recipes that closes to what:", ""),
        *_reasons_of(known),
        *("", "Bridge 0.6.2 with Megatron 0.19.2 does not start these as they are:", ""),
        *_refused_by_bridge(invalid),
        *("", "These are not counted: their configuration is built from files on the network.", ""),
        *_refused_by_bridge(unknown),
        *("", "## Every recipe", ""),
        *_table(("recipe", *ASKED), ([_shown(row), *_cells(row)] for row in known)),
    )
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _numbers_of_models(rows: Sequence[Row]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((_models(row), row.precision), []).append(row)
    groups = {**dict(sorted(groups.items())), ("all", ""): list(rows)}
    lines = ([*key, *_num_recipes(each), *_num_accepted(each)] for key, each in groups.items())
    return _table(("models", "precision", "recipes", "with graphs", *ASKED), lines)


def _num_recipes(rows: Sequence[Row]) -> list[str]:
    with_graphs = sum(GRAPHS.allowed_by in row.answers[ASKED[0]].permissions for row in rows)
    return [str(len(rows)), str(with_graphs)]


def _num_accepted(rows: Sequence[Row]) -> list[str]:
    return [str(sum(row.answers[column].is_accepted for row in rows)) for column in ASKED]


def _reasons_of(rows: Sequence[Row]) -> Iterator[str]:
    found: dict[str, dict[str, int]] = {}  # reason -> column -> number of recipes
    for row in rows:
        for column, answer in row.answers.items():
            for reason in answer.reasons:
                by_column = found.setdefault(reason, dict.fromkeys(ASKED, 0))
                by_column[column] += 1
    ordered = sorted(found.items(), key=lambda each: (-max(each[1].values()), each[0]))
    lines = ([reason, *(str(number or "") for number in each.values())] for reason, each in ordered)
    return _table(("reason", *ASKED), lines)


def _refused_by_bridge(rows: Sequence[tuple[str, Row]]) -> Iterator[str]:
    found: dict[str, list[Row]] = {}
    for reason, row in rows:
        found.setdefault(reason, []).append(row)
    lines = (
        [reason, str(len(each)), ", ".join(sorted({_models(row) for row in each}))]
        for reason, each in found.items()
    )
    return _table(("reason", "recipes", "models"), lines)


def _models(row: Row) -> str:
    return next(words for start, words in _NAMES.items() if row.recipe.name.startswith(start))


def _shown(row: Row) -> str:
    note = " (not as it is)" if row.invalid else ""
    return row.recipe.name.replace("_pretrain", "").removesuffix("_config") + note


def _cells(row: Row) -> list[str]:
    """Return the answers in words, with what a user has to allow."""
    cells = []
    for column in ASKED:
        answer = row.answers[column]
        allowed = ", ".join(answer.permissions)
        cells.append("no" if answer.reasons else f"yes: {allowed}" if allowed else "yes")
    return cells


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), all_rows()))
