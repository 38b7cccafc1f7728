"""Packages of object stores get a generator of their own, others keep Python's."""

import random
import sys
from types import ModuleType

import pytest

from moe_ft.files import storage
from moe_ft.files.storage import give_own_random


@pytest.mark.parametrize(
    ("name", "is_own"), [("s3fs.made_up", True), ("aiohttp.made_up", True), ("made_up", False)]
)
def test_modules_of_object_stores_draw_from_another_generator(
    monkeypatch: pytest.MonkeyPatch, name: str, is_own: bool
) -> None:
    module = ModuleType(name)
    module.random = random  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(storage, "_num_modules", 0)
    before = random.getstate()
    give_own_random()
    module.random.shuffle([1, 2, 3])
    assert (random.getstate() == before) is is_own
