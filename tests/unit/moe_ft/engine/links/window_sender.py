"""A rank that takes windows and sends them to a peer, snapshot by snapshot."""

from pathlib import Path

import msgspec

from moe_ft.engine.background import Reports
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import PeerReplicator, Replica
from moe_ft.engine.memory.regions import Region
from moe_ft.faults import Phase
from moe_ft.format.encoding import decode, encode
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index, check_units
from tests.unit.moe_ft.builders import (
    WINDOW_FILE_BYTES,
    WindowState,
    make_window,
)
from tests.unit.moe_ft.peer import HOLDER, SOURCE, TOKEN, Peer, served_connections
from tests.waiting import wait_for

LENGTH = 3


class Sender:
    """A rank that takes windows into two regions, and the peer that gets them.

    Attributes:
        fails_at: iterations at which sending breaks off in the middle.
        stretches: (first byte, last byte) of all that was sent, whether it arrived or not.
    """

    def __init__(self, directory: Path) -> None:
        self.peer = Peer(directory, WINDOW_FILE_BYTES)
        self.reports = Reports()
        self.fails_at: set[int] = set()
        self.stretches: list[tuple[int, int]] = []
        self.replicator = PeerReplicator([self.peer.info], TOKEN, self.reports, self._hook, Clock())
        self.pair = self.replicator._pairs[HOLDER]
        self._spy_on_connection()
        self.regions = [Region(directory / "own", number, WINDOW_FILE_BYTES) for number in (0, 1)]
        for region in self.regions:
            region.open()

    def _spy_on_connection(self) -> None:
        put = self.pair.connection.put

        def spy(replica: Replica, *rest: object) -> None:
            self.stretches.append((replica.start_byte, replica.end_byte))
            put(replica, *rest)  # type: ignore[arg-type]

        self.pair.connection.put = spy  # type: ignore[method-assign]

    def _hook(self, phase: Phase, iteration: int) -> None:
        assert phase is Phase.REPLICATE
        if iteration in self.fails_at:
            wait_for(served_connections, "the peer to serve the connection")
            raise RuntimeError("the sender breaks off here")

    def replica(
        self, window: WindowState, position: int, *, keep: int | None, region: int = 0
    ) -> Replica:
        """Have a snapshot of a window committed, and return what peers are to get of it."""
        own = self.regions[region]
        start, end = window.stretch(position)
        own.mapping[start:end] = window.content[start:end]
        index = msgspec.structs.replace(window.up_to(position + 1), file=own.data_path.name)
        own.commit(encode(index), index.iteration)
        return Replica(
            region=own,
            pool=None,
            index=index,
            start_byte=start,
            end_byte=end,
            keep_iteration=keep,
        )

    def send(
        self, window: WindowState, position: int, *, keep: int | None = None, region: int = 0
    ) -> bool:
        """Send a snapshot, whatever failed before; return whether the peer has it."""
        return self.send_replica(self.replica(window, position, keep=keep, region=region))

    def send_replica(self, replica: Replica) -> bool:
        """Send what may be spoiled; return whether the peer has it."""
        self.pair.retry_s = 0.0
        has_arrived = self.replicator.replicate(replica)
        if self.pair.connection._connection is None:
            wait_for(lambda: not served_connections(), "the peer to give up the connection")
        return has_arrived

    def send_all(self, window: WindowState, *, keep: int | None = None, region: int = 0) -> None:
        """Send a whole window."""
        for position in range(window.index.window):
            assert self.send(window, position, keep=keep, region=region)

    def found(self) -> dict[int, int]:
        """Return by iteration how many snapshots the peer has, after checking every byte of them."""
        numbers = {}
        for path in self.peer.regions[0].directory.glob("region_*.json"):
            index = decode(path.read_bytes(), Index, str(path))
            content = (path.parent / index.file).read_bytes()
            check_units(index, {"": memoryview(content)}, str(path))
            numbers[index.iteration] = index.num_snapshots
        return numbers

    def reasons(self) -> list[str]:
        """Return why something was not taken since the last call."""
        return [each.fields["reason"] for each in self.reports.drain() if each.event == "degraded"]

    def close(self) -> None:
        """Close all connections."""
        self.replicator.close()
        self.peer.close()


def window_at(first: int, length: int = LENGTH, identity: Identity | None = None) -> WindowState:
    return make_window(SOURCE, first, length, identity)


OLD, NEW = window_at(2), window_at(5)  # which end at iterations 4 and 7
ENDS = NEW.layout.ends
