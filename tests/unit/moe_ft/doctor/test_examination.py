"""Processes examine their nodes together: real ones, of which one may be silent or another version."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from moe_ft.config.config import MemoryConfig, MoeFtConfig, StorageConfig
from moe_ft.doctor import examination, network
from moe_ft.doctor.examination import Examination
from moe_ft.doctor.job import ExaminedJob
from moe_ft.doctor.meeting import Meeting, MeetingPlace
from tests.ports import free_port
from tests.waiting import wait_for

FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 120.0
Act = Callable[[], None]


def examined(place: MeetingPlace, **settings: Any) -> int:
    """Return the exit code of an examination, without an environment."""
    given = {"job": ExaminedJob(), "timeout_s": TIMEOUT_S, "transfer_bytes": 1, **settings}
    return Examination(place=place, environment={}, **given).run()


class Launch:
    """Processes that are one node each, and have more time than a busy machine takes."""

    def __init__(
        self, folder: Path, memory_dir: Path, world_size: int, token: str = "0123456789abcdef"
    ) -> None:
        self._folder, self._memory_dir, self._token = folder, memory_dir, token
        self._world_size, self._port = world_size, free_port()
        self._processes: dict[int, Any] = {}

    def start(self, rank: int, act: Act = lambda: None) -> None:
        """Fork a process, which does something before it examines."""
        self._processes[rank] = FORK.Process(target=self._run, args=(rank, act))
        self._processes[rank].start()

    def terminate(self, rank: int) -> None:
        """Terminate a process as launchers do, and wait for its end."""
        self._processes[rank].terminate()
        self._processes[rank].join(TIMEOUT_S)

    def end(self) -> tuple[list[int], dict[str, list[dict[str, str]]]]:
        """Return the exit codes by rank, and the rows of rank 0 by check."""
        for process in self._processes.values():
            process.join(2 * TIMEOUT_S)
        codes = [self._processes[rank].exitcode for rank in sorted(self._processes)]
        found: dict[str, list[dict[str, str]]] = {}
        for row in json.loads((self._folder / "0").read_text()):
            found.setdefault(row["check"], []).append(row)
        return codes, found

    def _run(self, rank: int, act: Act) -> None:
        """Examine in a process of its own; what it prints goes to a file."""
        act()
        # A busy machine has no slow links.
        network.SLOWEST_BYTES_PER_S = 0.0  # type: ignore[attr-defined]
        config = MoeFtConfig(
            memory=MemoryConfig(memory_dir=str(self._memory_dir), job_id="a", node_id=f"n{rank}"),
            storage=StorageConfig(persist_dir=str(self._folder / "persist")),
        )
        master = ("127.0.0.1", self._port)
        place = MeetingPlace(
            rank=rank, world_size=self._world_size, master=master, token=self._token
        )
        job = ExaminedJob(config=config)
        with (self._folder / str(rank)).open("w") as out, redirect_stdout(out):
            code = examined(place, job=job, transfer_bytes=1 << 20, is_json=True)
        os._exit(code)


def test_nodes_examine_each_other_and_leave_nothing(tmp_path: Path, memory_dir: Path) -> None:
    launch = Launch(tmp_path, memory_dir, 3)
    for rank in range(3):
        launch.start(rank)
    codes, rows = launch.end()
    assert [row for found in rows.values() for row in found if row["result"] == "fail"] == []
    assert codes == [0, 0, 0]
    assert [row["found"][:13] for row in rows["reach"]] == ["2 other nodes"] * 3
    assert {row["where"] for row in rows["bandwidth"]} == {"n0", "n1", "n2"}
    assert len(rows["bandwidth"]) == 6  # to both others each
    assert len(rows["storage read"]) == 3
    assert len(rows["storage"]) == len(rows["clocks"]) == 1
    assert not (tmp_path / "persist").exists()
    assert list(memory_dir.iterdir()) == []


def test_rank_that_never_answers_is_named(tmp_path: Path, memory_dir: Path) -> None:
    def give_up_soon() -> None:
        collect, examination._MET = Meeting.collect, 1.0 / TIMEOUT_S

        def collect_from_living(
            self: Meeting, name: str, ranks: Any, end_s: float, decoder: Any
        ) -> Any:
            if name == "facts":  # rank 2 may take longer than a rank is waited for
                collect(self, name, [0, 2], time.monotonic() + TIMEOUT_S, decoder)
            return collect(self, name, ranks, end_s, decoder)

        Meeting.collect = collect_from_living  # type: ignore[method-assign, assignment]

    launch = Launch(tmp_path, memory_dir, 3)
    launch.start(0, give_up_soon)
    launch.start(2)
    codes, rows = launch.end()
    assert codes == [1, 1]
    (row,) = rows["silent ranks"]
    assert (row["where"], row["result"]) == ("rank 1", "fail")
    assert len(rows["reach"]) == 2  # the others are checked


def test_launch_without_a_token_sends_nothing_to_peers(tmp_path: Path, memory_dir: Path) -> None:
    launch = Launch(tmp_path, memory_dir, 2, token="")
    for rank in range(2):
        launch.start(rank)
    codes, rows = launch.end()
    assert codes == [0, 0]
    assert [row["found"] for row in rows["bandwidth"]] == ["not measured: no token is set"] * 2
    assert "MOE_FT_DOCTOR_TOKEN" in rows["bandwidth"][0]["remedy"]


@pytest.mark.rest
def test_node_that_falls_silent_is_named(tmp_path: Path, memory_dir: Path) -> None:
    def die_at_the_first_check() -> None:
        examination.check_memory = lambda *_: os._exit(9)  # type: ignore[attr-defined]

    def give_up_soon() -> None:
        examination._ROWS = examination._WRITTEN = examination._READ = 1.0 / TIMEOUT_S

    launch = Launch(tmp_path, memory_dir, 2)
    launch.start(0, give_up_soon)
    launch.start(1, die_at_the_first_check)
    codes, rows = launch.end()
    assert codes == [1, 9]
    (row,) = rows["silent ranks"]
    assert (row["where"], row["result"]) == ("n1", "fail")
    assert not (tmp_path / "persist").exists()


def test_process_that_hangs_ends_in_time() -> None:
    def hang() -> None:
        examination.find_facts = lambda *_: time.sleep(1e6)  # type: ignore[attr-defined, assignment]
        examined(MeetingPlace(), timeout_s=1.0)

    process = FORK.Process(target=hang)
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 1


def test_process_that_is_terminated_cleans_up(tmp_path: Path, memory_dir: Path) -> None:
    def hang(*_: object) -> None:
        (tmp_path / "hangs").touch()
        time.sleep(1e6)

    def hang_at_the_lock() -> None:
        examination.check_lock = hang  # type: ignore[attr-defined, assignment]

    launch = Launch(tmp_path, memory_dir, 1)
    launch.start(0, hang_at_the_lock)
    wait_for((tmp_path / "hangs").exists, "the check that hangs")
    assert (tmp_path / "persist").exists()
    launch.terminate(0)
    assert not (tmp_path / "persist").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_store_that_nobody_opens_is_reported(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 1: there is no rank 0. Rank 0: torchrun, which should listen there, does not.
    place = MeetingPlace(
        rank=rank, world_size=2, master=("127.0.0.1", free_port()), has_agent_store=True
    )
    monkeypatch.setattr(examination, "_MET", 0.0)
    # An examination that takes longer ends this process.
    assert examined(place, timeout_s=3600.0) == 1
    out = capsys.readouterr().out
    assert "the store at 127.0.0.1" in out
    assert "nothing listens there" in out
