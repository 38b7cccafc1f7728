"""Agents and fork servers as processes: what they run, how they end, and that nothing stays behind."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_ft.cluster import law
from moe_ft.cluster.agent import Agent
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.forks import Forks
from moe_ft.cluster.options import KeepOptions
from moe_ft.cluster.roster import OVER, Order, of_node
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.cluster.target import Target
from moe_ft.engine.memory.job_directory import entered_job, own_directory
from moe_ft.recovery.job_memory import MemoryOfNode, alive_lock
from tests.ports import free_port
from tests.processes import is_running
from tests.unit.moe_ft.cluster.keeping import SLEEP, kept
from tests.unit.moe_ft.cluster.node_job import Job
from tests.waiting import wait_for


def test_ranks_run_the_script_as_python_would_with_the_variables_of_torchrun(
    tmp_path: Path,
) -> None:
    script = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
tell(argv=sys.argv[1:], module=__name__, path=sys.path[0], values=[os.environ[each] for each in names],
     leads=os.getsid(0) == os.getpid(), comm=open("/proc/self/comm").read())
print("out of", os.environ["RANK"])
print("err of", os.environ["RANK"], file=sys.stderr)
"""
    with kept(tmp_path, script, "--ranks-per-node", "2", flags=("--", "x")) as job:
        assert job.code() == 0, job.log
        for rank in range(2):
            found = job.read(f"rank_{rank}")
            assert (found["argv"], found["module"]) == (["--", "x"], "__main__")
            assert found["path"] == str(tmp_path)
            assert found["values"] == [str(rank), str(rank), "2", "2", "0", "none"]
            assert found["leads"] and found["comm"] == f"rank_{rank}\n"
            assert f"out of {rank}" in job.log and f"err of {rank}" in job.log


def test_allocator_of_pyarrow_starts_no_thread_whatever_the_user_sets(tmp_path: Path) -> None:
    name = "JE_ARROW_MALLOC_CONF"
    env = {name: "background_thread:true,narenas:1"}
    with kept(tmp_path, f"tell(value=os.environ[{name!r}])", env=env) as job:
        assert job.read("rank_0")["value"] == f"{env[name]},background_thread:false"
        assert job.code() == 0, job.log


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(7 * (os.environ['RANK'] == '1'))", 7), ("os.kill(os.getpid(), 9)", 137)],
    ids=["worst", "signal"],
)
def test_agent_ends_with_the_worst_code_of_its_ranks(
    tmp_path: Path, ending: str, code: int
) -> None:
    with kept(tmp_path, ending, "--ranks-per-node", "2") as job:
        assert job.code() == code, job.log


def test_failed_ranks_begin_again_on_the_same_fork_server_as_often_as_is_allowed(
    tmp_path: Path,
) -> None:
    script = "tell('start_' + os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(1)"
    with kept(tmp_path, script, "--max-restarts", "2") as job:
        assert job.code() == 1, job.log
        assert len({job.read(f"start_{number}")["server"] for number in range(3)}) == 1
    assert not (tmp_path / "start_3").exists()


def processes_of(job: Any) -> dict[str, psutil.Process]:
    return {each.name(): each for each in job.agent.processes()}


@pytest.mark.parametrize(
    ("killed", "code"),
    [("agent", -9), ("moe_ft_forks", 137), ("moe_ft_store", 1), ("rank_0", 137)],
)
def test_nothing_stays_behind_whichever_process_is_killed(
    tmp_path: Path, killed: str, code: int
) -> None:
    with kept(tmp_path, SLEEP, "--ranks-per-node", "2") as job:
        for rank in range(2):
            job.read(f"rank_{rank}")
        found = processes_of(job)
        pids = [each.pid for each in found.values()]
        assert {"moe_ft_forks", "moe_ft_store", "rank_0", "rank_1"} <= found.keys()
        (job.agent.send_signal if killed == "agent" else found[killed].send_signal)(signal.SIGKILL)
        assert job.code() == code, job.log
        wait_for(lambda: not any(map(is_running, pids)), "the end of all processes")


def test_fork_server_that_is_stopped_is_killed_and_another_one_forks_the_ranks(
    tmp_path: Path,
) -> None:
    script = "tell('start_' + os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    script += "time.sleep(1000 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))"
    settings = {"_ANSWER_S": 2.0, "_ASK_EVERY_S": 0.1}
    with kept(tmp_path, script, "--max-restarts", "1", settings=settings) as job:
        first = job.read("start_0")
        os.kill(first["server"], signal.SIGSTOP)
        assert job.code() == 0, job.log
        assert job.read("start_1")["server"] != first["server"]
        assert not is_running(first["server"]) and not is_running(first["pid"])
        assert f"process {first['server']}, which forks ranks, has not answered" in job.log


def test_fork_server_may_import_for_long(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    settings = {"_LINE_S": 0.2}
    module = "tests.unit.moe_ft.cluster.imports_slowly"
    with kept(tmp_path, "tell()", preload=module, settings=settings) as job:
        wait_for(lambda: "has been importing for" in job.log, "a line on it")
        (tmp_path / "slow").unlink()
        assert job.code() == 0, job.log


def test_agent_ends_if_two_fork_servers_never_end_their_imports(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    module = "tests.unit.moe_ft.cluster.imports_slowly"
    settings = {"_IMPORT_S": 1.0}
    with kept(tmp_path, "", "--max-restarts", "5", preload=module, settings=settings) as job:
        assert job.code() == 1
        assert "2 of them have ended before they answered" in job.log


def test_signals_reach_ranks_and_what_they_have_started(tmp_path: Path) -> None:
    script = """
import signal
def hear(number, frame):
    tell(f"{name}_{number}")
name = "parent"
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, hear)
if os.fork() == 0:
    name = "child"
    tell("begun")
    time.sleep(1000)
time.sleep(1000)
"""
    with kept(tmp_path, script, "--grace", "10") as job:
        child = job.read("begun")["pid"]
        for number in (signal.SIGUSR1, signal.SIGTERM):
            job.agent.send_signal(number)
            for name in ("parent", "child"):
                job.read(f"{name}_{number.value}")
        assert "is told to end" in job.log
        assert is_running(child)


def test_rank_ignores_the_exit_signal_of_megatron_until_that_has_its_handler(
    tmp_path: Path,
) -> None:
    script = """
import signal
tell("begun", blocked=signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
while not os.path.exists(os.path.join(os.environ["FOLDER"], "sent")):
    time.sleep(0.01)
"""
    flags = ("--exit-signal-handler", "--exit-signal", "SIGUSR1")
    with kept(tmp_path, script, flags=flags) as job:
        assert not job.read("begun")["blocked"]
        job.agent.send_signal(signal.SIGUSR1)
        (tmp_path / "sent").touch()
        assert job.code() == 0, job.log


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("starts_thread", "starts_thread has started threads (left)"),
        ("starts_native_thread", "starts_native_thread has started threads (1 native)"),
    ],
)
def test_module_after_which_nothing_can_be_forked_is_named(
    tmp_path: Path, module: str, reason: str
) -> None:
    with kept(tmp_path, "tell()", preload=f"tests.unit.moe_ft.cluster.{module}") as job:
        assert job.code() == 1
        assert f"rank 0 is not forked: tests.unit.moe_ft.cluster.{reason}" in job.log
        assert "Leave this module out of --preload" in job.log


def test_ranks_of_several_nodes_meet_where_rank_0_runs_without_repairs(tmp_path: Path) -> None:
    script = """
import socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        for _ in range(3):
            server.accept()[0].close()
else:
    while True:
        try:
            socket.create_connection(address).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
tell()
"""
    options = ["--nodes", "2", "--ranks-per-node", "2", "--meet", f"127.0.0.1:{free_port()}"]
    secret = {"MOE_FT_KEEP_TOKEN": "0123456789abcdef"}
    with (
        kept(tmp_path, script, *options, "--number", "0", env=secret) as one,
        kept(tmp_path, script, *options, "--number", "1", log="log_1", env=secret) as other,
    ):
        assert (one.code(), other.code()) == (0, 0), one.log + other.log
        assert len({one.read(f"rank_{rank}")["pid"] for rank in range(4)}) == 4


def test_agent_under_torchrun_runs_all_ranks_of_its_node(tmp_path: Path) -> None:
    script = "tell(values=[os.environ[each] for each in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')])"
    variables = {
        "TORCHELASTIC_RUN_ID": "x",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_PORT": "1",
    }
    with kept(tmp_path, script, "--ranks-per-node", "2", env=variables) as job:
        assert job.code() == 0, job.log
        assert job.read("rank_1")["values"] == ["1", "2", "1"]


# An agent in this process, over a store in memory.

SAVING = ("train.py", "--exit-signal-handler", "--exit-signal", "SIGUSR1")
SPARE = KeepOptions(
    target=Target(words=SAVING),
    num_nodes=2,
    number=2,
    is_alone=False,
    meet=("host0", 1),
    lost_after_s=100.0,
    grace_s=100.0,
    name="host2",
)


class NoForks(Forks):
    """A fork server that is never asked for a rank."""

    def __init__(self) -> None:
        super().__init__(lambda connection: None)

    @property
    def runs(self) -> bool:
        return True

    def hear(self, timeout_s: float) -> None:
        """Hear nothing."""


class Cut:
    """A store that does not answer, once."""

    def __init__(self, store: SignedStore) -> None:
        self._store, self.is_cut = store, False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut:
            raise TimeoutError("cut off")
        return getattr(self._store, name)


@pytest.mark.parametrize(("host", "host_ranks"), [(None, [None, None]), (3, [6, 7])])
def test_ranks_know_whose_devices_they_share(
    host: int | None, host_ranks: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, given = Job(), list[Assignment]()
    monkeypatch.setattr(NoForks, "run", lambda self, each, variables: given.append(each))
    over = {"code": 0, "why": ""}
    monkeypatch.setattr(NoForks, "hear", lambda self, timeout_s: job.store.set(OVER, over))
    target = Target(words=("train.py", "--moe-ft-repair", "auto"))
    options = replace(SPARE, target=target, ranks_per_node=2)
    member = Agent(options, NoForks(), lambda limit_s: job.store)
    (id,) = (each["id"] for each in job.store.values("nodes/arrived"))
    order = Order(ranks=(0, 1), round=1, lost_node="host1", num_nodes=4, host=host)
    job.store.append(of_node(id, "orders"), asdict(order))
    assert member.run() == 0
    assert [each.host_rank for each in given] == host_ranks


@pytest.mark.parametrize(("store_on", "code"), [(0, 0), (2, 1)], ids=["node", "of the store"])
def test_node_that_is_told_to_end_and_cut_off_does_not_register_again(
    store_on: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job, options = Job(), replace(SPARE, store=store_on)
    store: Any = Cut(job.store)
    member = Agent(options, NoForks(), lambda limit_s: store)
    member.on_signal(signal.SIGTERM)
    store.is_cut = True
    assert member.run() == code, "the job ends with the node of its store, and is not done"
    assert job.store.length("nodes/arrived") == 1
    assert "node host2 ends: it is told to end, and is cut off" in capsys.readouterr().err


@pytest.mark.parametrize("is_cut", [False, True], ids=["told", "told when cut off"])
def test_node_reports_under_its_newest_name_that_it_is_told_to_end(
    is_cut: bool,
    advance: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job()
    store: Any = Cut(job.store)

    def reach(limit_s: float) -> Any:
        if store.is_cut:
            store.is_cut = False
            member.on_signal(signal.SIGTERM)
        return store

    def decide(self: NoForks, timeout_s: float) -> None:
        job.coordinator.step()
        advance(law.GATHER_S)

    member = Agent(SPARE, NoForks(), reach)
    monkeypatch.setattr(NoForks, "hear", decide)
    store.is_cut = is_cut
    if not is_cut:
        member.on_signal(signal.SIGTERM)
    assert member.run() == 0
    assert job.store.length("nodes/arrived") == 1 + is_cut
    assert job.store.values("nodes/leaving") == [job.store.values("nodes/arrived")[-1]["id"]]
    assert "node host2 ends: it was a spare, and it is told to end" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "is_alive", "stays"),
    [(0, False, False), (1, False, True), (0, True, True)],
    ids=["over", "failed", "lived in"],
)
def test_node_without_ranks_removes_its_memory_when_the_job_is_over_for_good(
    code: int, is_alive: bool, stays: bool, tmp_path: Path
) -> None:
    with entered_job(tmp_path / "job", timeout_s=100):
        held = own_directory(tmp_path / "job" / "host2", 3)
        held.mkdir(parents=True)
    job, memory = Job(), MemoryOfNode(held.parent)
    member = Agent(SPARE, NoForks(), lambda limit_s: job.store, memory)
    job.store.set(OVER, {"code": code, "why": "it failed" * code})
    with alive_lock(held.parent, 3) if is_alive else nullcontext():
        assert member.run() == code
    assert held.exists() == stays
    assert (tmp_path / "job").exists() == stays
