"""Replaced attributes are restored."""

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
    patches = Patches()
    patches.set(owner, "own", "first")
    patches.set(owner, "own", "second")
    assert owner.own == "second"
    patches.restore()
    assert owner.own == "original"
    assert not patches


def test_restoring_removes_what_an_object_only_inherited(owner: Any) -> None:
    patches = Patches()
    patches.set(owner, "method", lambda: "replaced")
    assert owner.method() == "replaced"
    patches.restore()
    assert owner.method() == "inherited"
    assert "method" not in vars(owner)


def test_restoring_removes_what_an_object_lacked(owner: Any) -> None:
    patches = Patches()
    patches.set(owner, "new", 1)
    assert patches
    patches.restore()
    assert not hasattr(owner, "new")
