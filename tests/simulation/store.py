"""The store of a start, in which ranks that leave meet: what they use of torch.distributed.TCPStore."""

from collections import defaultdict
from typing import override

from tests.simulation.active import World

_FORGED = "0" * 64 + " [0,999]"  # as if rank 0 had said so
_ANSWER_S = 0.001


class Values:
    """Texts and numbers of a store, which a stranger may write to.

    Attributes:
        forged: what a stranger writes.
        spared: beginnings of the texts that are there before a stranger.
    """

    def __init__(self, forged: str, spared: tuple[str, ...] = ()) -> None:
        self.forged, self.spared = forged, spared
        self.numbers: dict[str, int] = defaultdict(int)
        self.texts: dict[str, str] = {}

    def forge(self, key: str) -> None:
        """Write what a stranger can without deleting: more of a list, and a number or a value beforehand."""
        if key.endswith("/count"):
            self.numbers[key] += 1
        elif f"{key}/count" in self.numbers:
            self.append(key, f"{self.forged}\n{self.forged[:-1]}")
        elif not key.startswith(self.spared):
            self.texts.setdefault(key, self.forged)

    def append(self, key: str, text: str) -> None:
        self.texts[key] = self.texts.get(key, "") + text


class Store:
    """Values as the rank of a start sees them, who waits for each answer."""

    values: Values

    def _reach(self, key: str) -> None:
        """Wait for the store; raises RuntimeError if it does not answer."""
        raise NotImplementedError

    def add(self, key: str, amount: int) -> int:
        self._reach(key)
        self.values.numbers[key] += amount
        return self.values.numbers[key]

    def set(self, key: str, text: str) -> None:
        self._reach(key)
        self.values.texts[key] = text

    def append(self, key: str, text: str) -> None:
        self._reach(key)
        self.values.append(key, text)

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        """Write a text in the place of an expected one, or of none; return what is there, as torch does."""
        expected = expected.decode() if isinstance(expected, bytes) else expected
        self._reach(key)
        texts = self.values.texts
        if texts.get(key, "") == expected:
            texts[key] = desired
        return texts.get(key, expected).encode()

    def rest(self, key: str, start: int) -> bytes:
        """Return what is in a text from a place on."""
        self._reach(key)
        return self.values.texts.get(key, "")[start:].encode()


class _StoreOfStart(Store):
    """The store of one start. The launcher of the first node keeps it."""

    def __init__(self, world: World, node: str) -> None:
        self._world, self._node = world, node
        self.values = Values(_FORGED)

    @override
    def _reach(self, key: str) -> None:
        kernel, network = self._world.kernel, self._world.network
        kernel.event("store")
        kernel.sleep(_ANSWER_S * kernel.random.random())
        if network.is_lost(self._node):
            raise RuntimeError("Connection reset by peer")
        if self._world.has_stranger:
            self.values.forge(key)


def default_store(world: World) -> Store:
    """Return the store of the start that the running process belongs to."""
    group = world.process.local["world_group"]
    found: Store | None = group.shared.store
    if found is None:
        node = group.shared.groups[0].process.node
        found = group.shared.store = _StoreOfStart(world, node)
    return found
