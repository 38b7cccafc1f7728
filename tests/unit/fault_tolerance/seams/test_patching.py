"""Replaced attributes are restored."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron.fault_tolerance.seams.patching import Patches


class Owner:
    """An owner of an attribute and of what it inherits."""

    def __init__(self) -> None:
        self.own = "original"

    def method(self) -> str:
        """Return the inherited answer."""
        return "inherited"


@pytest.fixture
def owner() -> Any:
    return Owner()


def test_restoring_puts_back_what_was_there_before_the_first_of_several_changes(owner: Any) -> None:
    with Patches() as patches:
        patches.set(owner, "own", "first")
        patches.set(owner, "own", "second")
        assert owner.own == "second"
    assert owner.own == "original"


def test_restoring_removes_what_an_object_only_inherited_or_lacked(owner: Any) -> None:
    with Patches() as patches:
        patches.set(owner, "method", lambda: "replaced")
        patches.set(owner, "new", 1)
        assert (owner.method(), owner.new) == ("replaced", 1)
    assert owner.method() == "inherited"
    assert not {"method", "new"} & vars(owner).keys()


def test_wrapped_function_gets_the_original_and_what_it_is_called_with(owner: Any) -> None:
    def around(original: Callable[[], str], mark: str) -> str:
        return original() + mark

    with Patches() as patches:
        patches.wrap(owner, "method", around)
        assert owner.method("!") == "inherited!"
        assert owner.method.__name__ == "method"
    assert owner.method() == "inherited"
