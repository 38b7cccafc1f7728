"""Imports of the fork server, reasons not to fork, and replacements; test_agent.py has the rest."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moe_ft.cluster import fork_server, forked_rank, forks
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.fork_server import ForkServer, import_modules
from moe_ft.cluster.forked_rank import why_not_to_fork
from moe_ft.cluster.link import Pulse
from moe_ft.cluster.target import Target
from tests.kept_job import KeptResult, run_kept
from tests.processes import is_running
from tests.unit.signed import member_of
from tests.unit.source import ROOT
from tests.waiting import wait_for


def test_modules_come_from_the_folder_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "NAME, begun = __file__, []\ndef begin(): begun.append(True)"
    (tmp_path / "own_module.py").write_text(own)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    (tmp_path / "ending_module.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "script.py").touch()
    preload = ("broken_module", "ending_module", "no_such_module.part", "own_module:begin")
    path = list(sys.path)
    import_modules(Target(words=(str(tmp_path / "script.py"),), preload=preload))
    found = sys.modules.pop("own_module")
    assert (found.NAME, found.begun) == (str(tmp_path / "own_module.py"), [True])
    assert sys.path == path
    broken, ending = capsys.readouterr().err.splitlines()
    assert "broken_module is not imported beforehand: ZeroDivisionError" in broken
    assert "ending_module is not imported beforehand: SystemExit: 3" in ending


def reason_after(code: str, **variables: str) -> str:
    """Return what forbids a fork in a process that has run some code."""
    code += "; from moe_ft.cluster.forked_rank import why_not_to_fork; print(why_not_to_fork())"
    command, environment = [sys.executable, "-c", code], {**os.environ, **variables}
    return subprocess.run(
        command, env=environment, check=True, cwd=ROOT, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


def test_threads_that_end_before_a_fork_do_not_forbid_it() -> None:
    """OpenBLAS starts one for each core, and joins them before each fork."""
    code = "import os, numpy; assert len(os.listdir('/proc/self/task')) > 1"
    assert reason_after(code, OPENBLAS_NUM_THREADS="2") == ""


def test_open_device_forbids_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_rank, "_num_threads", lambda: 1)
    assert why_not_to_fork() == ""
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia0")
    assert "has used CUDA (/dev/nvidia0 is open)" in why_not_to_fork()


@pytest.mark.parametrize("has_driver", [True, False])
def test_imports_do_not_ask_the_driver_whether_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_driver: bool
) -> None:
    def fail() -> int:
        raise AssertionError("the driver was asked")

    real = torch.cuda.is_available
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", fail)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    monkeypatch.setattr(forked_rank, "_DRIVER", str(tmp_path / "nvidiactl"))
    if has_driver:
        (tmp_path / "nvidiactl").touch()
    for name in ("asks", "compiles"):
        (tmp_path / f"{name}.py").write_text("import torch; ANSWER = torch.cuda.is_available()")
    monkeypatch.setattr(fork_server, "_OF_COMPILER", ("compiles",))
    import_modules(Target(words=(str(tmp_path / "script.py"),), preload=("asks",)))
    assert sys.modules.pop("asks").ANSWER is has_driver
    assert ("compiles" in sys.modules) is has_driver
    sys.modules.pop("compiles", None)
    assert torch.cuda.is_available is real


def test_compiler_is_not_imported_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_rank, "_DRIVER", str(tmp_path / "nvidiactl"))
    monkeypatch.setattr(fork_server, "_OF_COMPILER", ("compiles",))
    (tmp_path / "compiles.py").touch()
    import_modules(Target(words=(str(tmp_path / "script.py"),), preload=()))
    assert "compiles" not in sys.modules


def test_requests_and_answers_arrive_as_they_were_sent_and_an_end_is_noticed() -> None:
    given = Assignment(rank=1, local_rank=0, world_size=2, node="a", died_s=1.5, token="t")
    agents, servers = forks.socket_pair()
    request = forks.Fork(number=3, assignment=given, environment={"RANK": "1"})
    for each in (request, forks.Signal(15, (3, 4)), forks.Ask()):
        forks.send(agents, each)
        assert forks.receive(servers, forks.REQUEST) == each
    forks.send(servers, forks.Ended(3, 9))
    assert forks.receive(agents, forks._ANSWER) == forks.Ended(3, 9)
    servers.close()
    assert forks.receive(agents, forks._ANSWER) is None
    with pytest.raises(OSError):
        forks.send(agents, forks.Ask())


# Dies or stops when it has armed its link, unless it replaces one that died or arguments say otherwise.
ARMED = """
import json, os, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from moe_ft.cluster import job_store
from moe_ft.cluster.link import Heart
from moe_ft.cluster.member import own_member

member, folder = own_member(), Path(sys.argv[3])
link, is_replacement = member.link, member.is_replacement
facts = {"pid": os.getpid(), "is_replacement": is_replacement}
if is_replacement:
    members = member.rounds.wait_for_all(1, 30.0)
    facts["members"], facts["hung_s"] = [each.rank for each in members], members[0].hung_s
elif sys.argv[4].endswith("hangs"):
    facts["child"] = subprocess.Popen(["sleep", "1000"]).pid
(folder / f"facts_{int(is_replacement)}").write_text(json.dumps(facts))
if not is_replacement:
    if not sys.argv[4].startswith("not"):
        link.arm()
    if sys.argv[4].endswith("hangs"):
        Heart(link, limit_s=1.0).start()
        os.killpg(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_rank(folder: Path, code: str, *words: str) -> KeptResult:
    """Run one rank that may be repaired, with a script and words after its folder."""
    script = folder / "script.py"
    script.write_text(code)
    flags = ["--moe-ft-repair", "auto", str(folder), *words]
    return run_kept(flags, 1, log=folder / "log", script=str(script))


def test_armed_rank_that_dies_is_replaced_and_its_agent_does_not_learn_of_it(
    tmp_path: Path,
) -> None:
    result = run_rank(tmp_path, ARMED, "armed")
    assert result.code == 0, result.log.read_text()
    first, second = (json.loads((tmp_path / f"facts_{n}").read_text()) for n in range(2))
    assert not first["is_replacement"] and second["is_replacement"]
    assert first["pid"] != second["pid"]
    assert (second["members"], second["hung_s"]) == ([0], 0), "it has declared a round"
    assert "rank 0 has died (Killed), and is replaced" in result.log.read_text()


def test_rank_that_is_stopped_is_killed_with_what_it_started_and_replaced(tmp_path: Path) -> None:
    result = run_rank(tmp_path, ARMED, "hangs")
    assert result.code == 0, result.log.read_text()
    first, second = (json.loads((tmp_path / f"facts_{n}").read_text()) for n in range(2))
    assert second["hung_s"] > 1.0
    line = f"rank 0 (process {first['pid']}) has given no sign of life for {second['hung_s']:.1f} s"
    assert line in result.log.read_text()
    wait_for(lambda: not is_running(first["child"]), "the end of what it has started")


def test_rank_that_has_noted_its_hang_and_is_silent_then_is_killed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(fork_server, "_send_signal", lambda rank, number: killed.append(rank.pid))
    member = member_of()
    member.link.expect_beats(0.01)
    member.link.note_hang(5.0)
    rank = SimpleNamespace(pid=7, member=member, pulse=Pulse(member.link))
    keeper = SimpleNamespace(_ranks=[rank])

    def look() -> list[int]:
        time.sleep(0.02)
        ForkServer._end_silent(cast(Any, keeper))
        return killed

    wait_for(look, "its end")
    for _ in range(20):
        look()
    assert killed == [7]


def test_rank_that_hangs_and_is_not_armed_ends_its_agent(tmp_path: Path) -> None:
    result = run_rank(tmp_path, ARMED, "not armed, hangs")
    assert result.code == 128 + signal.SIGKILL, result.log.read_text()
    assert not (tmp_path / "facts_1").exists()
