"""Host memory: how many regions and slots there are, and what they add up to."""

import pytest

from moe_ft.planning.host_memory import MemoryShare, num_regions, num_slots, slot_bytes


def test_regions_are_as_many_as_their_uses() -> None:
    assert (num_regions(persists=False), num_regions(persists=True)) == (2, 3)


def test_pool_has_slots_for_the_newest_versions_a_snapshot_and_what_is_written() -> None:
    assert num_slots(8, 2) == 12


def test_slot_has_room_for_the_largest_format() -> None:
    assert slot_bytes(800, 3) == 3 * 800 * 4.125  # split into weight, remainder and a bit


@pytest.mark.parametrize(
    ("persists", "replication_factor", "total"),
    # 12 bytes of a parameter in each region: two, or three with storage, and two for each replica.
    [(False, 0, 24), (True, 0, 36), (False, 1, 48), (True, 1, 60), (False, 2, 72), (True, 2, 84)],
)
def test_dense_checkpoints_take_24_to_84_bytes_of_a_parameter(
    persists: bool, replication_factor: int, total: int
) -> None:
    share = MemoryShare(region_bytes=12)
    found = share.total_bytes(persists=persists, replication_factor=replication_factor)
    assert found == total


def test_breakpoint_is_a_part_of_what_a_rank_keeps_and_of_no_replica() -> None:
    share = MemoryShare(region_bytes=10, pool_bytes=7, breakpoint_bytes=5)
    assert share.own_bytes(persists=False) == 32
    assert share.replica_bytes == 27
    assert share.total_bytes(persists=False, replication_factor=1) == 59


def test_boundary_log_is_the_ranks_own() -> None:
    share = MemoryShare(region_bytes=10, boundary_bytes=5)
    assert share.own_bytes(persists=False) == 25
    assert share.replica_bytes == 20
