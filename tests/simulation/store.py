"""The store of a start, in which ranks that leave meet: what they use of torch.distributed.TCPStore."""

from collections import defaultdict

from tests.simulation.active import World

_ANSWER_S = 0.001


class Store:
    """The store of one start, as the ranks see it. The launcher of the first node keeps it."""

    def __init__(self, world: World, node: str) -> None:
        self._world, self._node = world, node
        self._numbers: dict[str, int] = defaultdict(int)
        self._texts: dict[str, str] = defaultdict(str)

    def _reach(self) -> None:
        kernel, network = self._world.kernel, self._world.network
        kernel.event("store")
        kernel.sleep(_ANSWER_S * kernel.random.random())
        if network.is_lost(self._node):
            raise RuntimeError("Connection reset by peer")

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return it."""
        self._reach()
        self._numbers[key] += amount
        return self._numbers[key]

    def set(self, key: str, text: str) -> None:
        """Replace a text."""
        self._reach()
        self._texts[key] = text

    def append(self, key: str, text: str) -> None:
        """Add to a text."""
        self._reach()
        self._texts[key] += text

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Return a text; what was expected if there is none, as torch does."""
        assert expected == desired, "only to read without waiting"
        self._reach()
        return self._texts.get(key, expected).encode()


def default_store(world: World) -> Store:
    """Return the store of the start that the running process belongs to."""
    group = world.process.local["world_group"]
    found: Store | None = group.shared.store
    if found is None:
        node = group.shared.groups[0].process.node
        found = group.shared.store = Store(world, node)
    return found
