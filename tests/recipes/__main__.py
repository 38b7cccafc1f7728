"""Write docs/recipes.md: python -m tests.recipes."""

from tests.recipes.page import PAGE, all_answers, page_with, tables
from tests.recipes.recipe import read_recipes

if __name__ == "__main__":
    recipes = read_recipes()
    PAGE.write_text(page_with(PAGE.read_text(), tables(recipes, all_answers(recipes))))
