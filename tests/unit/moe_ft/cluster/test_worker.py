"""Workers stand for ranks that a zygote forks: surroundings, signals, ends, and what outlives what."""

import itertools
import os
import resource
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_ft.cluster import worker
from moe_ft.cluster.target import Target
from moe_ft.errors import UnsafePathError
from moe_ft.processes import start_ticks
from tests.processes import is_running
from tests.unit.moe_ft.cluster.agents import Agent, kill
from tests.waiting import wait_for

TELL = """
import json, os, sys

def tell(name, **facts):
    path = os.path.join(os.environ["FOLDER"], name)
    with open(f"{path}.new", "w") as file:
        json.dump({"pid": os.getpid(), "zygote": os.getppid(), **facts}, file)
    os.rename(f"{path}.new", path)
"""
FACTS = (
    TELL
    + """
import random
tell(
    "facts", module=__name__, file=__file__, argv=sys.argv, path=sys.path[0], cwd=os.getcwd(),
    rank=os.environ["RANK"], cpus=sorted(os.sched_getaffinity(0)), draw=random.random(),
    has_imported="colorsys" in sys.modules, main=sys.modules["__main__"].__file__,
)
sys.exit(7)
"""
)
SLEEP = TELL + 'import signal; tell(sys.argv[1], rank=os.environ["RANK"]); signal.pause()'


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.close()


def test_rank_runs_the_script_as_python_would(agent: Agent) -> None:
    agent.script(FACTS)
    cpu = min(os.sched_getaffinity(0))
    agent.start(0, "one", "two words", cpus=str(cpu))
    assert agent.exit_code(0) == 7, agent.log.read_text()
    first = agent.read("facts")
    script = str(agent.folder / "script.py")
    assert first["argv"] == [script, "one", "two words"]
    assert (first["module"], first["file"], first["main"]) == ("__main__", script, script)
    assert first["path"] == str(agent.folder)
    assert first["cwd"] == os.getcwd()
    assert (first["rank"], first["cpus"]) == ("0", [cpu])
    assert first["has_imported"]
    (agent.folder / "facts").unlink()
    agent.start(1)
    assert agent.exit_code(1) == 7
    second = agent.read("facts")
    assert second["rank"] == "1"
    assert second["zygote"] == first["zygote"] and second["pid"] != first["pid"]
    assert second["draw"] != first["draw"]


def test_output_and_errors_are_those_of_the_worker(agent: Agent) -> None:
    agent.script('import sys; print("to output", file=sys.stderr); raise ValueError("its end")')
    agent.start(0)
    assert agent.exit_code(0) == 1
    text = agent.log.read_text()
    assert "to output" in text and "ValueError: its end" in text


def test_worker_ends_by_the_signal_that_ended_its_rank(agent: Agent) -> None:
    agent.script("import os, sys; os.kill(os.getpid(), int(sys.argv[1]))")
    for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGTERM):
        agent.start(0, str(int(number)))
        assert agent.exit_code(0) == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_reach_the_rank_and_what_it_started(agent: Agent, number: int) -> None:
    agent.script(
        TELL
        + """
import signal, subprocess
def act(number, frame):
    tell("heard", number=number)
    sys.exit(5)
signal.signal(int(sys.argv[1]), act)
tell("ready", child=subprocess.Popen(["sleep", "1000"]).pid)
while True:
    signal.pause()
"""
    )
    pid = agent.start(0, str(int(number)))
    ready = agent.read("ready")
    kill([pid], number)
    assert agent.exit_code(0) == 5
    assert agent.read("heard")["number"] == number
    wait_for(lambda: not is_running(ready["child"]), "its end")


def test_rank_ignores_the_exit_signal_of_megatron_until_that_has_its_handler(agent: Agent) -> None:
    agent.script(
        TELL
        + "import signal; numbers = signal.SIGUSR1, signal.SIGTERM; "
        + "tell(sys.argv[1], **{each.name: signal.getsignal(each).name for each in numbers})"
    )
    words = ("--exit-signal-handler", "--exit-signal", "SIGUSR1")
    agent.start(0, "handled", *words)
    agent.start(1, "default", *words[:1])
    handled, default = (agent.read(name) for name in ("handled", "default"))
    assert (handled["SIGUSR1"], handled["SIGTERM"]) == ("SIG_IGN", "SIG_DFL")
    assert (default["SIGUSR1"], default["SIGTERM"]) == ("SIG_DFL", "SIG_DFL")


def test_rank_dies_with_its_worker_and_the_zygote_serves_the_next(agent: Agent) -> None:
    agent.script(SLEEP)
    worker_pid = agent.start(0, "first")
    first = agent.read("first")
    kill([worker_pid])
    assert agent.exit_code(0) == -signal.SIGKILL
    wait_for(lambda: not is_running(first["pid"]), "its end")
    line = "the process that stood for rank 0 has ended: rank 0 is killed"
    wait_for(lambda: line in agent.log.read_text(), "the reason")
    agent.start(0, "second")
    assert agent.read("second")["zygote"] == first["zygote"]


def test_zygote_serves_on_when_a_rank_and_its_worker_have_ended_at_the_same_time(
    agent: Agent,
) -> None:
    agent.script(SLEEP)
    worker_pid = agent.start(0, "first")
    first = agent.read("first")
    kill([first["zygote"]], signal.SIGSTOP)
    kill([first["pid"]])
    wait_for(lambda: not is_running(first["pid"]), "its end")
    kill([worker_pid])
    assert agent.exit_code(0) == -signal.SIGKILL
    kill([first["zygote"]], signal.SIGCONT)
    agent.start(0, "second")
    assert agent.read("second")["zygote"] == first["zygote"]


def test_ranks_and_workers_end_with_the_zygote_and_a_new_one_is_started(agent: Agent) -> None:
    agent.script(SLEEP)
    agent.start(0, "first")
    agent.start(1, "other")
    ranks = [agent.read("first"), agent.read("other")]
    kill([ranks[0]["zygote"]])
    assert [agent.exit_code(rank) for rank in (0, 1)] == [1, 1]
    for each in ranks:
        wait_for(lambda pid=each["pid"]: not is_running(pid), "its end")
    assert "the process that forks ranks has ended" in agent.log.read_text()
    agent.start(0, "second")
    assert agent.read("second")["zygote"] != ranks[0]["zygote"]


def test_zygote_that_is_stopped_is_killed_with_its_ranks_and_replaced(tmp_path: Path) -> None:
    agent = Agent(tmp_path, looks=15)
    agent.script(SLEEP)
    worker_pid = agent.start(0, "first")
    first = agent.read("first")
    kill([first["zygote"]], signal.SIGSTOP)
    kill([worker_pid])
    assert agent.exit_code(0) == -signal.SIGKILL
    agent.start(0, "second")
    assert agent.read("second")["zygote"] != first["zygote"]
    assert not is_running(first["zygote"])
    wait_for(lambda: not is_running(first["pid"]), "its end")
    line = f"process {first['zygote']}, which forks ranks, has not answered for"
    assert line in agent.log.read_text()
    agent.close()


def test_rank_that_ends_while_the_zygote_is_stopped_ends_its_worker(tmp_path: Path) -> None:
    agent = Agent(tmp_path, looks=15)
    agent.script(SLEEP)
    agent.start(0, "first")
    first = agent.read("first")
    kill([first["zygote"]], signal.SIGSTOP)
    kill([first["pid"]])
    assert agent.exit_code(0) == 1
    assert not is_running(first["zygote"])
    agent.close()


def test_zygote_may_import_for_longer_than_it_may_take_to_answer(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "tests.unit.moe_ft.cluster.imports_slowly", looks=10)
    agent.script(SLEEP)
    (tmp_path / "slow").touch()
    agent.start(0, "first")
    wait_for(lambda: "has been importing for 2 s" in agent.log.read_text(), "the line about it")
    (tmp_path / "slow").unlink()
    agent.read("first")
    assert "has not answered" not in agent.log.read_text()
    agent.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_zygote_that_never_ends_its_imports_is_replaced(tmp_path: Path, is_stopped: bool) -> None:
    looks = {"looks": 10, "looks_at_imports": 9999} if is_stopped else {"looks_at_imports": 10}
    agent = Agent(tmp_path, "tests.unit.moe_ft.cluster.imports_slowly", **looks)
    agent.script(SLEEP)
    (tmp_path / "slow").touch()
    agent.start(0, "first")
    (importing := tmp_path / "importing").touch()
    wait_for(importing.read_text, "the first zygote")
    if is_stopped:
        kill([int(importing.read_text())], signal.SIGSTOP)
    wait_for(lambda: "it is killed" in agent.log.read_text(), "the line about it")
    (tmp_path / "slow").unlink()
    agent.read("first")
    agent.close()


def test_zygote_serves_others_while_a_caller_says_nothing(agent: Agent) -> None:
    agent.script(SLEEP)
    worker_pid = agent.start(0, "first")
    first = agent.read("first")
    (path,) = agent.folder.glob("moe_ft_keep_*/*.socket")
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as wrong:
        for each in (silent, wrong):
            each.connect(str(path))
        wrong.sendall(b"\0")  # the beginning of something
        agent.start(1, "second")
        assert agent.read("second")["zygote"] == first["zygote"]
        kill([worker_pid])
        assert agent.exit_code(0) == -signal.SIGKILL
        wait_for(lambda: not is_running(first["pid"]), "the end of the rank")
        assert wrong.recv(1) == b""
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # it has its time
            silent.recv(1)


def test_fork_that_fails_costs_one_rank_and_not_the_zygote(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "tests.unit.moe_ft.cluster.cannot_fork")
    agent.script(SLEEP)
    agent.start(0, "first")
    first = agent.read("first")
    (tmp_path / "full").touch()
    agent.start(1, "second")
    assert agent.exit_code(1) == 1
    text = agent.log.read_text()
    assert "rank 1 cannot be forked: [Errno 11] Resource temporarily unavailable" in text
    (tmp_path / "full").unlink()
    agent.start(1, "second")
    assert agent.read("second")["zygote"] == first["zygote"]
    assert is_running(first["pid"])
    agent.close()


def test_replacement_that_cannot_be_forked_costs_one_rank_and_not_the_zygote(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path, "tests.unit.moe_ft.cluster.cannot_fork")
    agent.script(
        "from moe_ft.cluster.link import own_link; link = own_link(); link and link.arm()\n" + SLEEP
    )
    agent.start(0, "unrepaired")
    agent.start(1, "first", "--moe-ft-repair=auto")
    first, other = agent.read("first"), agent.read("unrepaired")
    (tmp_path / "full").touch()
    kill([first["pid"]])
    assert agent.exit_code(1) == -signal.SIGKILL
    assert "rank 1 cannot be replaced: [Errno 11]" in agent.log.read_text()
    assert is_running(other["pid"]) and is_running(other["zygote"])
    agent.close()


def test_zygote_without_descriptors_turns_ranks_away_and_serves_on(agent: Agent) -> None:
    agent.script(SLEEP)
    agent.start(0, "first")
    first = agent.read("first")
    limits = resource.prlimit(first["zygote"], resource.RLIMIT_NOFILE)
    used = {int(each) for each in os.listdir(f"/proc/{first['zygote']}/fd")}
    first_free = next(number for number in itertools.count() if number not in used)
    resource.prlimit(first["zygote"], resource.RLIMIT_NOFILE, (first_free, limits[1]))
    agent.start(1, "second")
    assert agent.exit_code(1) == 1
    assert "a request for a rank is refused: [Errno 24]" in agent.log.read_text()
    resource.prlimit(first["zygote"], resource.RLIMIT_NOFILE, limits)
    agent.start(1, "second")
    assert agent.read("second")["zygote"] == first["zygote"]


def test_zygote_outlives_the_agent_only_as_long_as_ranks_run(agent: Agent) -> None:
    agent.script(SLEEP)
    agent.start(0, "facts")
    facts = agent.read("facts")
    agent.kill()
    (path,) = agent.folder.glob("moe_ft_keep_*/*.socket")
    assert is_running(facts["pid"]) and is_running(facts["zygote"])
    kill([facts["pid"]])
    wait_for(lambda: not is_running(facts["zygote"]), "its end")
    assert not path.exists()


def test_without_torchrun_the_rank_starts_as_usual(tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:], sys.path[0]); sys.exit(4)")
    pid = os.fork()
    if pid == 0:
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        worker.main(["--", str(script), "a", "b"])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    output = capfd.readouterr()
    assert f"['a', 'b'] {tmp_path}" in output.out
    assert "torchrun has not started this process" in output.err


@pytest.mark.parametrize(
    ("preload", "reason"),
    [
        ("tests.unit.moe_ft.cluster.starts_thread", "starts_thread has started threads (left)"),
        (
            "tests.unit.moe_ft.cluster.starts_native_thread",
            "starts_native_thread has started threads (1 native)",
        ),
        ("tests.unit.moe_ft.cluster.is_not_there", "is not imported beforehand: ModuleNotFound"),
    ],
)
def test_rank_runs_all_the_same_where_a_module_cannot_be_used(
    tmp_path: Path, preload: str, reason: str
) -> None:
    agent = Agent(tmp_path, preload)
    agent.script(TELL + 'tell("facts", rank=os.environ["RANK"])')
    agent.start(0)
    assert agent.exit_code(0) == 0
    assert reason in agent.log.read_text()
    assert agent.read("facts")["rank"] == "0"
    agent.close()


def test_directory_that_others_could_replace_is_not_used(tmp_path: Path) -> None:
    (tmp_path / f"moe_ft_keep_{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"moe_ft_keep_{os.getuid()}").chmod(0o777)
    agent = Agent(tmp_path)
    agent.script(TELL + 'tell("facts", rank=os.environ["RANK"])')
    agent.start(0)
    assert agent.exit_code(0) == 0
    assert "can be written by other users" in " ".join(agent.log.read_text().split())
    assert agent.read("facts")["zygote"] != os.getpid()
    agent.close()


def test_sockets_of_agents_that_have_ended_are_removed_when_another_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: None)
    own = os.getpid(), start_ticks(os.getpid())
    lives, ended, other = (f"{own[0]}_{own[1]}.socket", "999999999_1.socket", f"{own[0]}_1.socket")
    for name in (lives, ended, other, "a_b.socket"):
        (tmp_path / name).touch()
    worker._start_zygote(Target(words=("x.py",), preload=()), 1, tmp_path / "1_2.socket")
    assert {each.name for each in tmp_path.iterdir()} == {lives, "a_b.socket", "1_2.socket"}


def test_workers_of_an_agent_meet_elsewhere_if_the_directory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"moe_ft_keep_{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)

    def path_with(error_file: str) -> Path:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
        return worker.socket_path(os.getpid())

    path = path_with("/tmp/x/none_abc/attempt_0/0/error.json")
    assert path.parent.name.startswith(f"{taken.name}_")
    assert path == path_with("/tmp/x/none_abc/attempt_3/1/error.json"), "other ranks and restarts"
    assert path != path_with("/tmp/x/none_xyz/attempt_0/0/error.json")
    with pytest.raises(UnsafePathError):
        path_with("/somewhere/error.json")
    taken.rmdir()
    assert path_with("/tmp/x/none_abc/attempt_0/0/error.json").parent == taken
