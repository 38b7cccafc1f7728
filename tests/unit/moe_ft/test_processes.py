"""Processes of this machine: which have ended, what ps calls them, and how many cores each has."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from moe_ft.processes import (
    boot_id,
    has_ended,
    num_cores_of_rank,
    process_name,
    process_namespace,
    start_ticks,
)


def test_process_has_ended_before_its_parent_notices_and_after_its_number_went_to_another() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process.pid)
    process.wait()
    assert has_ended(process.pid)
    own = start_ticks(os.getpid())
    assert [has_ended(os.getpid(), *each) for each in ((), (own,), (own - 1,))] == [
        False,
        False,
        True,
    ]


def test_process_of_another_user_has_not_ended() -> None:
    assert not has_ended(1)


def test_processes_of_one_boot_and_namespace_have_one_name_for_it() -> None:
    code = "from moe_ft.processes import process_namespace; print(process_namespace())"
    other = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    assert other == process_namespace()
    assert other.startswith(f"{boot_id()} ") and len(boot_id()) == 36


def test_name_of_a_process_is_the_one_that_it_has_set() -> None:
    code = "from moe_ft.processes import set_process_name; set_process_name('rank_7'); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"\n"
        assert process_name(process.pid) == "rank_7"
        process.communicate(b"\n")
    assert process_name(process.pid) == ""


@pytest.mark.parametrize(
    ("of_node", "of_process", "num_ranks", "of_rank"),
    [
        (2, 2, "1", 2),
        (128, 128, "8", 16),
        (16, 2, "8", 2),  # bound to cores of its own
        (128, 16, "8", 16),
        (4, 4, "8", 1),
    ],
)
def test_ranks_share_the_cores_of_their_node_unless_they_are_bound(
    of_node: int, of_process: int, num_ranks: str, of_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: Callable[[int], range] = lambda _: range(of_process)  # noqa: E731 - a stand-in
    monkeypatch.setattr(os, "cpu_count", lambda: of_node)
    monkeypatch.setattr(os, "sched_getaffinity", bound)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    assert num_cores_of_rank() == of_rank
