"""Processes of this machine: those that have ended are told from living ones, and names are those of ps."""

import os
import subprocess
import sys

from moe_ft.processes import boot_id, has_ended, process_name, process_namespace, start_ticks


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
