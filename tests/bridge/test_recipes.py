"""Recipes of Bridge get the answers that docs/recipes_bridge.md shows."""

from tests.recipes.bridge import PAGE, all_rows, written

_MOST_REFUSED = 30  # by `dense`, of 214; each for a reason that the page names


def test_recipes_of_bridge_get_the_answers_that_the_page_shows() -> None:
    rows, text = all_rows(), PAGE.read_text()

    assert written(text, rows) == text, "run .venv/bridge/bin/python -m tests.recipes.bridge"
    refused = [row for row in rows if row.answers and not row.answers["dense"].is_accepted]
    assert len(refused) <= _MOST_REFUSED
    assert all(row.answers["dense"].reasons for row in refused)
