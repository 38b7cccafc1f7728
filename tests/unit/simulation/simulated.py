"""A small simulation whose processes a test writes."""

from collections.abc import Callable
from typing import Any, Self, cast

from tests.simulation import collectives, network, threads
from tests.simulation.active import Patches, World, active
from tests.simulation.collectives import Collectives
from tests.simulation.kernel import Kernel, Process
from tests.simulation.network import Network

LONG_S = 10_000.0


class Simulated:
    """A world, from `with` on also in the places of the operating system's functions.

    Attributes:
        trace: what processes have said, and when.
    """

    def __init__(self, seed: int | str = 1, switching: float = 0.2) -> None:
        self.kernel = Kernel(seed, switching=switching)
        self.network = Network(self.kernel)
        self.collectives = Collectives(self.kernel, self.network)
        self.world = World(
            kernel=self.kernel,
            files=cast(Any, None),  # real ones
            network=self.network,
            collectives=self.collectives,
        )
        self.trace: list[tuple[float, Any]] = []
        self._patches = Patches()
        self._active = active(self.world)

    def __enter__(self) -> Self:
        for module in (threads, network, collectives):
            module.install(self._patches)
        self._active.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.kernel.close()
        finally:
            self._active.__exit__(None, None, None)
            self._patches.restore()

    def process(self, act: Callable[[], Any], node: str = "node-a", name: str = "main") -> Process:
        process = self.kernel.make_process(name, node)
        self.kernel.spawn(process, act)
        return process

    def rank(self, act: Callable[[], Any], rank: int, world_size: int, start: int = 0) -> Process:
        process = self.process(act, f"node-{rank}", f"rank-{rank}")
        self.collectives.join(process, rank=rank, start=start, world_size=world_size)
        return process

    def say(self, what: Any) -> None:
        self.trace.append((self.kernel.now, what))

    @property
    def said(self) -> list[Any]:
        return [what for _, what in self.trace]

    def run(self, deadline_s: float = LONG_S) -> None:
        """Run until the first threads of all processes have ended; raises what has ended a thread."""
        first = [process.threads[0] for process in self.kernel.processes if process.threads]
        is_over = self.kernel.run(
            lambda: all(each.is_done or not each.process.is_alive for each in first), deadline_s
        )
        for _, error in self.kernel.errors:
            raise error
        assert is_over, (
            f"hangs at {self.kernel.now:.1f} s: {[each for each in first if not each.is_done]}"
        )

    def later(self, seconds: float, act: Callable[[], Any]) -> None:
        self.kernel.call_later(seconds, act)
