"""The tables of docs/recipes.md. The rest of that page is written by hand."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.recipes.recipe import Recipe
from tests.recipes.table import COLUMNS, Answer, answers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
_BEGIN = "<!-- These tables are written by `python -m {}`. -->\n"
_END = "<!-- Here they end. -->"

Table = Mapping[str, Mapping[str, Answer]]  # by recipe and column


def all_answers(recipes: Sequence[Recipe]) -> Table:
    """Return the answers to all recipes."""
    return {recipe.key: answers(recipe) for recipe in recipes}


def page_with(text: str, inserted: str, module: str = "tests.recipes") -> str:
    """Return a text of a page with other tables, which a module writes."""
    begin = _BEGIN.format(module)
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{inserted}\n\n{_END}{rest.partition(_END)[2]}"


def tables(recipes: Sequence[Recipe], table: Table) -> str:
    """Return the tables: answers, reasons and sources."""
    return "\n".join(_lines(recipes, table))


def _lines(recipes: Sequence[Recipe], table: Table) -> Iterator[str]:
    yield from (f"| | recipe | GPUs | {' | '.join(COLUMNS)} |", f"|{'---|' * (3 + len(COLUMNS))}")
    for number, recipe in enumerate(recipes, 1):
        cells = [_cell(table[recipe.key][column]) for column in COLUMNS]
        yield f"| {number} | {recipe.name} | {recipe.gpus:,} | {' | '.join(cells)} |"
    num_accepted = [
        sum(table[each.key][column].is_accepted for each in recipes) for column in COLUMNS
    ]
    yield f"| | accepted of {len(recipes)} | | {' | '.join(map(str, num_accepted))} |"
    yield from (
        "",
        "Why not, with the numbers of the recipes:",
        "",
        "| reason | of | recipes |",
        "|---|---|---|",
    )
    for (reason, numbers), columns in _reasons(recipes, table).items():
        yield f"| {_code(reason)} | {', '.join(columns)} | {', '.join(map(str, numbers))} |"
    yield from (
        "",
        "Sources:",
        "",
        "| | source | other names and flags in Megatron 0.19 |",
        "|---|---|---|",
    )
    for number, recipe in enumerate(recipes, 1):
        yield f"| {number} | {recipe.source} | {_differences(recipe)} |"


def _cell(answer: Answer) -> str:
    if answer.reasons:
        return "no"
    return f"yes: {', '.join(answer.permissions)}" if answer.permissions else "yes"


def _reasons(
    recipes: Sequence[Recipe], table: Table
) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """Return the columns that a reason closes to the same recipes, by reason and recipes."""
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for column in COLUMNS:
        of_column: dict[str, list[int]] = {}
        for number, recipe in enumerate(recipes, 1):
            for reason in table[recipe.key][column].reasons:
                of_column.setdefault(reason, []).append(number)
        for reason, numbers in of_column.items():
            found.setdefault((reason, tuple(numbers)), []).append(column)
    return found


def _code(text: str) -> str:
    """Return a text with its flags as code."""
    return re.sub(r"--[\w-]+(?:=[\w-]+)?", r"`\g<0>`", text)


def _differences(recipe: Recipe) -> str:
    renamed = [f"`{old}` is `{new}`" for old, new in recipe.renamed.items()]
    newer = [f"`{flag}` needs a newer one" for flag in recipe.of_newer]
    left_out = [f"`{flag}` {reason}" for flag, reason in recipe.left_out.items()]
    return "; ".join((*renamed, *newer, *left_out))
