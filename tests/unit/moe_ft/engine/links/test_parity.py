"""Parity over real connections: it counts when all have added to it, once, and nobody else can."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moe_ft.engine.background import EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import PeerReplicator
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.parity import ParityIndex, ParityStore, parity_files
from moe_ft.engine.memory.regions import Region
from moe_ft.format.encoding import checksum
from moe_ft.format.index import Index
from moe_ft.planning.parity import group_of_regions
from moe_ft.topology import RankInfo
from tests.unit.moe_ft.builders import fill_region, make_state
from tests.unit.moe_ft.peer import HOST, TOKEN, authenticated, no_fault, replica_of

RANKS, HOLDER = (1, 4, 6), 4
SOURCES = (1, 6)
SIZE = len(make_state(1)[1])
GROUP = group_of_regions(RANKS, [SIZE] * len(RANKS))


class Holder:
    """A rank that keeps parity, and those that add to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = parity_files(folder / "rank_00004", GROUP)
        for each in self.files:
            each.open()
        self.store = ParityStore(self.files, HOLDER, GROUP)
        self.server = PeerServer(folder, HOST)
        self.server.start()
        self.server.admit(TOKEN)
        self.reports = EventQueue()
        self.server.keep({}, self.reports, self.store)
        address = self.server.address
        info = RankInfo(rank=HOLDER, node="b", stage=0, pid=1, address=address, region_bytes=SIZE)
        self.replicators = {
            source: PeerReplicator(
                [info],
                TOKEN,
                self.reports,
                no_fault,
                Clock(),
                stripes={HOLDER: GROUP.stripe(source, HOLDER)},
            )
            for source in SOURCES
        }

    def state(self, source: int, iteration: int) -> tuple[Region, Index]:
        """Return a rank's region with the state of an iteration."""
        return fill_region(self.folder / f"own_{source}", rank=source, iteration=iteration)

    def add(self, source: int, iteration: int, keep_iteration: int | None = None) -> bool:
        """Have a rank send its state; return whether it counts as sent."""
        region, index = self.state(source, iteration)
        return self.replicators[source].replicate(replica_of(region, index, keep_iteration))

    def whole(self) -> dict[int, bytes]:
        """Return the parity that counts, by iteration."""
        found = {}
        for each in self.files:
            if each.index_path.exists():
                found[each.index(ParityIndex).iteration] = bytes(each.mapping)
        return found

    def reasons(self) -> list[str]:
        """Return why sending has failed."""
        return [
            str(each.fields["reason"]) for each in self.reports.drain() if "reason" in each.fields
        ]

    def close(self) -> None:
        """Close all connections."""
        for each in self.replicators.values():
            each.close()
        self.server.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    made = Holder(tmp_path)
    yield made
    made.close()


def expected(iteration: int) -> bytes:
    """Return the XOR of what the holder keeps of the states of an iteration."""
    total = np.zeros(GROUP.stripe_bytes, np.uint8)
    for source in SOURCES:
        start, end = GROUP.stripe(source, HOLDER)
        part = np.frombuffer(make_state(source, iteration)[1][start:end], np.uint8)
        total[: len(part)] ^= part
    return total.tobytes()


def test_parity_counts_when_all_others_have_added_their_stripe(holder: Holder) -> None:
    assert holder.add(1, 5)
    assert holder.whole() == {}
    assert holder.add(6, 5)
    assert holder.whole() == {5: expected(5)}


def test_state_that_is_sent_again_is_not_added_twice(holder: Holder) -> None:
    for source in (1, 1, 6, 6, 1):
        assert holder.add(source, 5)
    assert holder.whole() == {5: expected(5)}


def test_next_version_leaves_the_one_that_must_be_kept(holder: Holder) -> None:
    for iteration, kept in ((5, None), (6, 5), (7, 6)):
        for source in SOURCES:
            assert holder.add(source, iteration, kept)
            if source == SOURCES[0] and kept is not None:
                assert holder.whole() == {kept: expected(kept)}
    assert holder.whole() == {6: expected(6), 7: expected(7)}


def test_stripe_that_arrives_damaged_spoils_its_version_alone(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.add(1, 5)
    with monkeypatch.context() as patches:
        patches.setattr("moe_ft.engine.links.peers.checksum", lambda data: checksum(b""))
        assert not holder.add(6, 5)
    assert "does not match its checksum" in " ".join(holder.reasons())
    assert not holder.add(6, 5)  # whatever is wrong stays in there
    assert "this window's parity is incomplete" in " ".join(holder.reasons())
    assert holder.whole() == {}
    holder.replicators[6]._pairs[HOLDER].retry_s = 0.0
    assert all(holder.add(source, 6) for source in SOURCES)
    assert holder.whole() == {6: expected(6)}


def test_nothing_is_written_when_the_rank_has_ended(holder: Holder) -> None:
    assert all(holder.add(source, 5) for source in SOURCES)
    assert holder.add(1, 6, 5)
    holder.server.close()
    assert not holder.add(6, 6, 5)
    assert holder.whole() == {5: expected(5)}


def test_what_is_not_of_the_group_is_not_added(holder: Holder) -> None:
    region, index = holder.state(1, 5)
    foreign = msgspec.structs.replace(index, rank=3)
    replicator = holder.replicators[1]
    assert not replicator.replicate(replica_of(region, foreign, None))
    start, end = GROUP.stripe(1, 6)  # of another holder
    replicator._stripes = {HOLDER: (start, end)}
    assert not replicator.replicate(replica_of(region, index, None))
    assert holder.whole() == {}
    assert len(holder.reasons()) == 2  # the connection has ended
    address = holder.server.address
    assert address is not None
    with pytest.raises(ConnectionError, match="token is wrong"):
        authenticated(address, "another token")
