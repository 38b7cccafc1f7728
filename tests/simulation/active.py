"""The simulation that runs now, for the functions that stand in the places of the operating system's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

from tests.simulation.kernel import Kernel, Process

if TYPE_CHECKING:
    from tests.simulation.collectives import Collectives
    from tests.simulation.files import Files
    from tests.simulation.network import Network
    from tests.simulation.threads import Clocks


@dataclass(eq=False, kw_only=True, slots=True)
class World:
    """Everything that simulated processes share.

    Attributes:
        clocks: by node.
        os_thread: that runs the simulation. Others of this process, such as that of fsspec, are none of it.
        has_stranger: whether somebody else writes to the stores of starts.
    """

    kernel: Kernel
    files: "Files"
    network: "Network"
    collectives: "Collectives"
    clocks: dict[str, "Clocks"] = field(default_factory=dict)
    has_stranger: bool = False
    os_thread: int = field(default_factory=get_ident)

    @property
    def process(self) -> Process:
        assert self.kernel.running is not None
        return self.kernel.running.process


_worlds: list[World] = []


def world() -> World | None:
    """Return the world of the simulated thread that runs; None outside of simulated threads."""
    if _worlds and _worlds[-1].kernel.running is not None and _worlds[-1].os_thread == get_ident():
        return _worlds[-1]
    return None


@contextmanager
def active(current: World) -> Iterator[None]:
    _worlds.append(current)
    try:
        yield
    finally:
        _worlds.pop()


class Patches:
    """Attributes that were replaced."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def divert(self, owner: Any, name: str, simulated: Callable[..., Any]) -> None:
        """Replace a function for simulated threads; others still get the original.

        Args:
            simulated: takes the world, then the function's own arguments.
        """
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if (current := world()) is not None:
                return simulated(current, *args, **kwargs)
            return original(*args, **kwargs)

        self.set(owner, name, call)

    def restore(self) -> None:
        while self._originals:
            owner, name, value = self._originals.pop()
            setattr(owner, name, value)
