"""The store of a start, in which ranks that leave meet: what they use of torch.distributed.TCPStore."""

from collections import defaultdict

from tests.simulation.active import World

_ANSWER_S = 0.001
_FORGED = "0" * 64 + " [0,999]"  # as if rank 0 had said so


class Store:
    """The store of one start, as the ranks see it. The launcher of the first node keeps it."""

    def __init__(self, world: World, node: str) -> None:
        self._world, self._node = world, node
        self._numbers: dict[str, int] = defaultdict(int)
        self._texts: dict[str, str] = defaultdict(str)

    def _reach(self, key: str) -> None:
        kernel, network = self._world.kernel, self._world.network
        kernel.event("store")
        kernel.sleep(_ANSWER_S * kernel.random.random())
        if network.is_lost(self._node):
            raise RuntimeError("Connection reset by peer")
        if self._world.has_stranger:
            self._forge(key)

    def _forge(self, key: str) -> None:
        """Write what a stranger can without deleting: more of a list, and a number or a value beforehand."""
        if key.endswith("/count"):
            self._numbers[key] += 1
        elif f"{key}/count" in self._numbers:
            self._texts[key] += f"{_FORGED}\n{_FORGED[:-1]}"
        else:
            self._texts.setdefault(key, _FORGED)

    def add(self, key: str, amount: int) -> int:
        self._reach(key)
        self._numbers[key] += amount
        return self._numbers[key]

    def set(self, key: str, text: str) -> None:
        self._reach(key)
        self._texts[key] = text

    def append(self, key: str, text: str) -> None:
        self._reach(key)
        self._texts[key] += text

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Return a text; what was expected if there is none, as torch does."""
        assert expected == desired, "only to read without waiting"
        self._reach(key)
        return self._texts.get(key, expected).encode()


def default_store(world: World) -> Store:
    """Return the store of the start that the running process belongs to."""
    group = world.process.local["world_group"]
    found: Store | None = group.shared.store
    if found is None:
        node = group.shared.groups[0].process.node
        found = group.shared.store = Store(world, node)
    return found
