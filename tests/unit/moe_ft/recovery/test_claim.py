"""A rank's memory on a node is claimed: made, marked and locked, or refused with the reason."""

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.memory.job_directory import job_lock, own_directory, read_marker
from moe_ft.engine.memory.regions import BoundarySlot, Region, breakpoint_region
from moe_ft.errors import BusyError, ConfigError
from moe_ft.format.encoding import encode
from moe_ft.processes import is_ending
from moe_ft.recovery import job_memory
from moe_ft.recovery.job_memory import (
    alive_lock,
    check_memory,
    claim_memory,
    is_alive,
    leave_place,
)
from moe_ft.recovery.protect import make_room
from moe_ft.topology import Topology
from tests.unit.moe_ft.builders import make_window
from tests.unit.moe_ft.recovery.jobs import REGION_BYTES, leave_job, site_of
from tests.waiting import wait_for

STRANGER = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_claimed_memory_is_private_marked_and_alive(tmp_path: Path) -> None:
    lock = claim_memory(site_of(tmp_path / "memory"))
    job = tmp_path / "memory" / "job"
    assert {mode_of(path) for path in (job.parent, job, job / "node")} == {0o700}
    assert read_marker(job) is not None
    assert is_alive(job)
    lock.release()
    assert not is_alive(job)


def test_last_rank_that_leaves_a_node_without_state_leaves_nothing(tmp_path: Path) -> None:
    first, second = (replace(site_of(tmp_path / "memory"), rank=rank) for rank in (0, 1))
    locks = claim_memory(first), claim_memory(second)
    leave_place(first, locks[0])
    assert is_alive(first.node_dir)
    leave_place(second, locks[1])
    assert not (tmp_path / "memory" / "job").exists()


@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_directory_that_the_user_named_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(mode)
    claim_memory(site_of(shared)).release()
    assert (mode_of(shared), mode_of(shared / "job")) == (mode, 0o700)


def test_directory_that_others_can_write_is_refused_with_flag_and_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    message = (
        f"--moe-ft-memory-dir={tmp_path} .* on node node: {tmp_path} can be written by other users.*"
        "must be a directory on a tmpfs in which no other user can replace.*Name a new one"
    )
    with pytest.raises(ConfigError, match=message):
        claim_memory(site_of(tmp_path))


@as_root
@pytest.mark.parametrize("path", ["memory", "memory/job", "memory/job/node"])
def test_directory_that_another_user_made_first_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    os.chown(tmp_path / path, STRANGER, STRANGER)
    with pytest.raises(BusyError, match=f"{path} belongs to user {STRANGER}"):
        claim_memory(site_of(tmp_path / "memory"))


@as_root
def test_second_user_has_room_in_a_shared_directory(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    os.chown(leave_job(shared, "theirs"), STRANGER, STRANGER)
    claim_memory(site_of(shared)).release()
    assert (shared / "theirs").stat().st_uid == STRANGER


def test_job_directory_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "final.tex").touch()
    with pytest.raises(ConfigError, match=r"--moe-ft-job-id=thesis .* holds final\.tex"):
        claim_memory(site_of(tmp_path, "thesis"))


def test_rank_whose_place_is_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_memory, "_OLD_START_S", 0.0)
    leave_job(tmp_path, "job")
    (tmp_path / "job" / "node").mkdir()
    with (
        alive_lock(tmp_path / "job" / "node", 0),
        pytest.raises(
            ConfigError, match="--moe-ft-job-id=job: rank 0 of a job of this name is run"
        ),
    ):
        claim_memory(site_of(tmp_path))


def test_job_that_is_being_removed_all_the_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_OLD_START_S", "_ENDING_S"):
        monkeypatch.setattr(job_memory, name, 0.0)
    with (
        job_lock(leave_job(tmp_path, "job")).acquire(),
        pytest.raises(BusyError, match="--moe-ft-job-id=job"),
    ):
        claim_memory(site_of(tmp_path))


_ENDS_BUT_FOR_A_THREAD = """
import ctypes, sys, threading
from pathlib import Path
from moe_ft.recovery.job_memory import alive_lock
lock = alive_lock(Path(sys.argv[1]), 0)
lock.acquire()
threading.Thread(target=sys.stdin.read).start()
print("taken", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of the thread, not of the process
"""


def test_place_of_a_rank_that_cannot_end_yet_is_waited_for_and_refuses_no_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_memory(site_of(tmp_path)).release()
    command = [sys.executable, "-c", _ENDS_BUT_FOR_A_THREAD, str(tmp_path / "job" / "node")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dying:
        assert dying.stdin is not None and dying.stdout is not None
        assert dying.stdout.readline() == b"taken\n"
        wait_for(lambda: is_ending(dying.pid), "the end of the first thread")
        monkeypatch.setattr(job_memory, "_OLD_START_S", 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(job_memory, "_ENDING_S", 0.0)
            with pytest.raises(BusyError, match="on node node is held by a process that is ending"):
                claim_memory(site_of(tmp_path))
        dying.stdin.close()
        claim_memory(site_of(tmp_path)).release()


def test_room_that_others_take_refuses_no_flag_but_too_small_a_file_system_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(tmp_path / "memory")
    claim_memory(site).release()
    for total, kind in ((1 << 20, BusyError), (4096, ConfigError)):
        usage = shutil.disk_usage(tmp_path)._replace(total=total, free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        with pytest.raises(kind, match="its file system has 0 B"):
            check_memory(site, [()])


def test_room_is_not_made_by_removing_what_a_link_leads_to(tmp_path: Path) -> None:
    site = site_of(tmp_path / "memory")
    claim_memory(site).release()
    region = Region(own_directory(tmp_path / "elsewhere", 7), 0, REGION_BYTES)
    region.open()
    own_directory(site.node_dir, 7).symlink_to(own_directory(tmp_path / "elsewhere", 7))
    make_room(site, [()], [])
    assert region.data_path.exists()


def test_room_is_made_for_all_but_the_breakpoint_that_was_recovered_from(tmp_path: Path) -> None:
    site = site_of(tmp_path / "memory")
    claim_memory(site).release()
    gone = make_window().index
    regions = []
    for rank, iteration in ((7, gone.iteration), (8, gone.iteration + 1)):
        region = breakpoint_region(own_directory(site.node_dir, rank), REGION_BYTES)
        region.open()
        index = msgspec.structs.replace(gone, iteration=iteration, window=1, num_snapshots=1)
        region.commit(encode(index), iteration)
        regions.append(region)
    make_room(site, [()], [(gone.identity.start, gone.iteration)])
    assert [region.index_path.exists() for region in regions] == [True, False]
    assert [region.data_path.exists() for region in regions] == [True, False]


def test_breakpoints_are_counted_and_named_where_memory_is_too_small(tmp_path: Path) -> None:
    site = site_of(tmp_path / "memory", limit="10kB")
    claim_memory(site).release()
    check_memory(site, [()])
    info = replace(site.topology.ranks[0], breakpoint_bytes=4096)
    memory = replace(site.config.memory, breakpoints=True)
    larger = replace(
        site,
        topology=Topology(ranks=(info,)),
        config=replace(site.config, memory=memory),
    )
    with pytest.raises(ConfigError, match="replicas and breakpoints take 12.00 KiB") as refused:
        check_memory(larger, [()])
    assert "Leave out --moe-ft-breakpoints" in str(refused.value)


def test_boundary_log_counts_and_is_named_where_memory_is_short(tmp_path: Path) -> None:
    site = site_of(tmp_path, limit="9kB")
    site.node_dir.mkdir(parents=True)
    check_memory(site, [()])
    info = replace(site.topology.ranks[0], boundary_slot_bytes=2048, num_boundary_slots=3)
    config = replace(site.config, memory=replace(site.config.memory, upstream_log=True))
    site = replace(site, config=config, topology=Topology(ranks=(info,)))
    with pytest.raises(
        ConfigError,
        match=r"snapshots with their indexes, replicas and boundary logs \(6.00 KiB\) take 14.00 KiB on node "
        "node, more than the limit.* Leave out --moe-ft-upstream-log. Lower",
    ):
        check_memory(site, [()])


def test_boundary_log_of_a_rank_that_is_elsewhere_now_makes_room(tmp_path: Path) -> None:
    site = site_of(tmp_path / "memory")
    claim_memory(site).release()
    slots = [BoundarySlot(own_directory(site.node_dir, rank), 0, REGION_BYTES) for rank in (0, 7)]
    for slot in slots:
        slot.open()
        slot.commit(b"index", 0)
    make_room(site, [()], [])
    assert [slot.data_path.exists() for slot in slots] == [True, False]
    assert [slot.index_path.exists() for slot in slots] == [True, False]
