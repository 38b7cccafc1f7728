"""Temporary replacement of attributes."""

from typing import Any


class Patches:
    """Replaced attributes, restored in the opposite order. Owned by the training thread."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, bool, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._originals)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``.

        `restore` removes an attribute that the owner only inherited, or lacked.
        """
        self._originals.append((owner, name, name in vars(owner), vars(owner).get(name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put every replaced attribute back."""
        while self._originals:
            owner, name, own, original = self._originals.pop()
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
