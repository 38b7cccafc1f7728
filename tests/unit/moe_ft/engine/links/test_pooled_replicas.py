"""Replicas with a pool over real connections: every version that an index names is at the peer."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.background import Reports
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import PeerReplicator
from moe_ft.engine.memory.pool import Pool
from moe_ft.engine.memory.rank_memory import ReplicaMemory
from moe_ft.faults import Phase
from moe_ft.recovery.readers import MemoryReader, read_unit
from tests.unit.moe_ft.builders import (
    add_units,
    fill_region,
    put_in_slot,
    rotating_unit,
)
from tests.unit.moe_ft.peer import (
    HOLDER,
    SOURCE,
    TOKEN,
    Peer,
    no_fault,
    own_state,
    replica_of,
)


@pytest.fixture
def reports() -> Reports:
    return Reports()


SLOT_ELEMENTS = 33


class Sender:
    """A rank with a pool, and a peer that keeps replicas of it."""

    def __init__(self, tmp_path: Path, reports: Reports) -> None:
        self.tmp_path = tmp_path
        self.peer = Peer(tmp_path)
        directory = self.peer.regions[0].directory
        self.pool, self.replica = self.make_pool(tmp_path / "own"), self.make_pool(directory)
        memory = ReplicaMemory(regions=tuple(self.peer.regions), pool=self.replica)
        self.peer.keep({SOURCE: memory})
        self.replicator = PeerReplicator([self.peer.info], TOKEN, reports, no_fault, Clock())
        self.connection = self.replicator._pairs[HOLDER].connection
        self.sent: list[tuple[str, ...]] = []

    def make_pool(self, directory: Path, num_slots: int = 6) -> Pool:
        """Return an open pool."""
        pool = Pool(directory, 4 * SLOT_ELEMENTS, num_slots)
        pool.open()
        return pool

    def send(
        self, iteration: int, slots: dict[int, tuple[int, int]], *, keep: int | None = None
    ) -> bool:
        """Send a snapshot whose index names these slots, each with an expert and an iteration."""
        region, index = own_state(self.tmp_path, iteration, number=iteration % 2)
        units = dict(
            put_in_slot(self.pool, slot, expert, iteration=at)
            for slot, (expert, at) in slots.items()
        )
        index = add_units(region, index, units)
        missing = self.replicator._pairs[HOLDER].missing(index)
        self.sent.append(tuple(sorted(missing)))
        return self.replicator.replicate(replica_of(region, index, keep, self.pool))

    def readable(self) -> dict[int, list[str]]:
        """Return by iteration the names of the pooled units that the replica has intact."""
        found: dict[int, list[str]] = {}
        for path in self.peer.regions[0].directory.glob("region_*.json"):
            reader = MemoryReader(path)
            pooled = sorted(name for name, unit in reader.index.units.items() if unit.file)
            for name in pooled:
                read_unit(reader, name)
            found[reader.index.iteration] = pooled
        return found

    def close(self) -> None:
        """Close all connections."""
        self.replicator.close()
        self.peer.close()


@pytest.fixture
def sender(tmp_path: Path, reports: Reports) -> Iterator[Sender]:
    sender = Sender(tmp_path, reports)
    yield sender
    sender.close()


EXPERTS = [str(rotating_unit(number)) for number in range(4)]


def test_replica_with_a_pool_has_every_version_that_its_index_names(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1), 1: (1, 1)})
    assert sender.readable() == {1: EXPERTS[:2]}


def test_versions_that_the_peer_has_already_are_not_sent_again(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1), 1: (1, 1)})
    assert sender.send(2, {0: (0, 1), 2: (1, 2)}, keep=1)
    assert sender.sent == [tuple(EXPERTS[:2]), (EXPERTS[1],)]
    assert sender.readable() == {1: EXPERTS[:2], 2: EXPERTS[:2]}


def test_all_versions_are_sent_again_after_a_failure(sender: Sender, reports: Reports) -> None:
    assert sender.send(1, {0: (0, 1), 1: (1, 1)})
    sender.replicator._phase_hook = _die
    assert not sender.send(2, {0: (0, 1), 2: (1, 2)}, keep=1)
    sender.replicator._phase_hook = no_fault
    assert sender.send(3, {0: (0, 1), 2: (1, 3)}, keep=1)
    assert sender.sent[2] == tuple(EXPERTS[:2])
    assert sender.readable()[3] == EXPERTS[:2]


def _die(phase: Phase, iteration: int) -> None:
    raise RuntimeError("the sender dies here")


def test_slot_of_a_snapshot_that_must_be_kept_is_not_overwritten(
    sender: Sender, reports: Reports
) -> None:
    assert sender.send(1, {0: (0, 1)})
    assert not sender.send(2, {0: (0, 2)}, keep=1)
    report = reports.drain()[-1]
    assert report.event == "skipped"  # the peer keeps the older state as it should
    assert (
        "a slot of iteration 1 would be overwritten, which must be kept" in report.fields["reason"]
    )
    assert sender.readable() == {1: EXPERTS[:1]}
    assert not sender.send(3, {0: (0, 3)}, keep=1)  # but not again and again
    assert reports.drain()[-1].event == "degraded"


def test_replica_after_one_that_was_refused_is_taken(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1)})
    assert not sender.send(2, {0: (0, 2)}, keep=1)
    assert sender.send(3, {1: (0, 3)}, keep=1)


def test_index_that_names_a_version_that_is_overwritten_is_removed(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1)})
    assert sender.send(2, {1: (0, 2)}, keep=1)
    assert sender.send(3, {0: (0, 3)}, keep=2)
    assert sender.readable() == {2: EXPERTS[:1], 3: EXPERTS[:1]}


def test_index_that_names_the_same_version_stays(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1), 1: (1, 1)})
    sender.replicator._pairs[HOLDER]._known = {}
    assert sender.send(2, {0: (0, 1), 1: (1, 1)}, keep=1)
    assert sender.readable() == {1: EXPERTS[:2], 2: EXPERTS[:2]}


def test_slot_of_a_pool_of_another_geometry_is_not_taken_for_one_that_must_be_kept(
    sender: Sender,
) -> None:
    # The start before had another k: what it left names slots of another file.
    directory = sender.peer.regions[0].directory
    old = sender.make_pool(directory, num_slots=5)
    region, index = fill_region(directory, 0, rank=SOURCE, iteration=1)
    add_units(region, index, dict([put_in_slot(old, 0, 0, iteration=1)]))
    sender.peer.regions[0].iteration = 1
    assert sender.send(2, {0: (0, 2)}, keep=1)


@pytest.mark.parametrize("wrong", [{"file": "pool_7x192.safetensors"}, {"offset": 64}])
def test_version_without_a_place_in_the_peers_pool_is_refused(
    tmp_path: Path, sender: Sender, wrong: dict[str, object]
) -> None:
    region, index = own_state(tmp_path, 5)
    name, unit = put_in_slot(sender.pool, 0, 0)
    index = add_units(region, index, {name: msgspec.structs.replace(unit, **wrong)})
    with pytest.raises(OSError, match="has no place in the pool|closed|reset|pipe"):
        sender.connection.put(replica_of(region, index, None, sender.pool), [name], no_fault)
    assert sender.readable() == {}


def test_version_that_is_corrupt_is_refused(sender: Sender, reports: Reports) -> None:
    region, index = own_state(sender.tmp_path, 5)
    name, unit = put_in_slot(sender.pool, 0, 0)
    index = add_units(region, index, {name: unit})
    sender.pool.mapping[unit.offset] ^= 0x20
    assert not sender.replicator.replicate(replica_of(region, index, None, sender.pool))
    assert f"unit {name} does not match its checksum" in reports.drain()[-1].fields["reason"]
    assert sender.readable() == {}
