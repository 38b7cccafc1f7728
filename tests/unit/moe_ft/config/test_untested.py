"""The page on GPUs says what the product says of each feature."""

import re
from pathlib import Path

from moe_ft.config.untested import FEATURES, UNTESTED
from moe_ft.strategies.registry import kinds

PAGE = Path(__file__).parents[4] / "docs" / "gpus.md"


def test_page_on_gpus_has_the_features_and_values_of_the_product() -> None:
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    features = [row[:2] for row in rows if len(row) == 4][1:]
    refused = {each.name: f"refused, `{each.allowed_by}`" for each in UNTESTED.values()}
    expected = {
        **{f"strategy {kind.name}": kind.seen_on_gpu for kind in kinds()},
        **{each.name: each.seen for each in FEATURES},
    }
    assert dict(features) == {
        name: f"seen: {seen}" if seen else refused.get(name, "written")
        for name, seen in expected.items()
    }
    values = [value for row in rows if len(row) == 2 for value in re.findall("^`(.*)`$", row[0])]
    assert values == list(UNTESTED)
