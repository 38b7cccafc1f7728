"""Temporary replacement of attributes."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Self


class Patches:
    """Replaced attributes, restored in the opposite order. Owned by the training thread."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, bool, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._originals:
            owner, name, own, original = self._originals.pop()
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``.

        An attribute that the owner only inherited, or lacked, is removed in the end.
        """
        self._originals.append((owner, name, name in vars(owner), vars(owner).get(name)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call `around` instead of ``owner.name``, with that function before the arguments."""
        original = getattr(owner, name)
        self.set(owner, name, wraps(original)(partial(around, original)))
