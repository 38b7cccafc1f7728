"""A node that is told to end, and the signals that its ranks get."""

import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from moe_ft.cluster import job_store, law, node
from moe_ft.cluster.node import PlannedEnd
from moe_ft.cluster.roster import OVER
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.engine.memory.job_directory import entered_job, own_directory
from moe_ft.recovery.job_memory import alive_lock
from tests.unit.moe_ft.cluster.node_job import Job

SAVING = ("train.py", "--exit-signal-handler", "--exit-signal", "SIGUSR1")


def test_ranks_get_the_exit_signal_and_sigterm_in_time_to_leave_breakpoints() -> None:
    now = 0.0
    end = PlannedEnd(SAVING, 100, lambda: now)
    assert end.due_signal(False) is None and not end.is_new()
    end.tell()
    assert end.is_new() and not end.is_new()
    assert end.due_signal(False) is None  # a spare may take over
    assert end.due_signal(True) is signal.SIGUSR1
    assert end.due_signal(True) is None
    now = 60.0
    assert end.due_signal(True) is signal.SIGUSR1, "again: ranks that were starting have ignored it"
    now = 71.0
    assert [end.due_signal(True) for _ in range(2)] == [signal.SIGTERM, None]


@pytest.mark.parametrize(
    ("words", "grace_s", "why", "at_sigterm"),
    [
        (SAVING, 30, "30 s (--grace) are not enough: ", "what they have in memory stays"),
        (SAVING[:1], 100, "without --exit-signal-handler: ", "what they have in memory stays"),
        (SAVING[:2], 100, "all ranks have 100 s (--grace) to bring", "save and end"),
        (SAVING[:2], 20, "all ranks have 20 s (--grace) to bring", "save and end"),
    ],
)
def test_ranks_without_another_signal_get_sigterm_at_once(
    words: tuple[str, ...], grace_s: float, why: str, at_sigterm: str
) -> None:
    end = PlannedEnd(words, grace_s, lambda: 0.0)
    end.tell()
    assert why in end.describe() and at_sigterm in end.describe_sigterm()
    assert end.due_signal(True) is signal.SIGTERM


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return and set the variables of node 2, which is a spare."""
    found = {
        "MOE_FT_NODE_ID": "host2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "host0",
        "MOE_FT_KEEP_STORE_ON": "0",
        "MOE_FT_KEEP_LOST_AFTER_S": "100",
        "MOE_FT_KEEP_GRACE_S": "100",
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


class Cut:
    """A store that does not answer, once."""

    def __init__(self, store: SignedStore) -> None:
        self._store, self.is_cut = store, False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut:
            raise TimeoutError("cut off")
        return getattr(self._store, name)


@pytest.mark.parametrize(("store_on", "code"), [("0", 0), ("2", 1)], ids=["node", "of the store"])
def test_node_that_is_told_to_end_and_cut_off_does_not_come_again(
    store_on: str,
    code: int,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(node, "_LINGER_S", 0.0)
    environment["MOE_FT_KEEP_STORE_ON"] = store_on
    job = Job()
    store: Any = Cut(job.store)
    member = node.Node(environment, SAVING, lambda limit_s: store)
    member.on_signal(signal.SIGTERM)
    store.is_cut = True
    assert member.run() == code, "the job ends with the node of its store, and is not done"
    assert job.store.length("nodes/arrived") == 1
    assert "node host2 ends: it is told to end, and is cut off" in capsys.readouterr().err


@pytest.mark.parametrize("is_cut", [False, True], ids=["told", "told when cut off"])
def test_node_says_under_its_newest_name_that_it_is_told_to_end(
    is_cut: bool,
    environment: dict[str, str],
    advance: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job()
    store: Any = Cut(job.store)
    member: node.Node

    def reach(limit_s: float) -> Any:
        if store.is_cut:
            store.is_cut = False
            member.on_signal(signal.SIGTERM)
        return store

    def decide(self: node.Node, timeout_s: float) -> None:
        job.coordinator.step()
        advance(law.GATHER_S)

    member = node.Node(environment, SAVING, reach)
    monkeypatch.setattr(node.Node, "_hear", decide)
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
    code: int, is_alive: bool, stays: bool, environment: dict[str, str], tmp_path: Path
) -> None:
    with entered_job(tmp_path / "job", timeout_s=100):
        kept = own_directory(tmp_path / "job" / "host2", 3)
        kept.mkdir(parents=True)
    words = (*SAVING, "--moe-ft-memory-dir", str(tmp_path), "--moe-ft-job-id=job")
    job = Job()
    member = node.Node(environment, words, lambda limit_s: job.store)
    job.store.set(OVER, {"code": code, "why": "it failed" * code})
    with alive_lock(kept.parent, 3) if is_alive else nullcontext():
        assert member.run() == code
    assert kept.exists() == stays
    assert (tmp_path / "job").exists() == stays


def test_ranks_are_ended_once(environment: dict[str, str]) -> None:
    job = Job()
    member = node.Node(environment, SAVING, lambda limit_s: job.store)
    rank, zygote = socket.socketpair()
    found = node._Rank(0, rank, None)
    member._ranks.append(found)
    member._selector.register(rank, selectors.EVENT_READ, found)
    zygote.close()  # the zygote has ended
    for _ in range(2):
        member._end_ranks(signal.SIGKILL)
    assert rank.fileno() == -1


def test_node_has_its_name_once_it_has_joined(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def connect(*_: object) -> None:
        assert names == ["moe_ft_joins"]
        raise OSError("nobody listens")

    monkeypatch.setattr(node, "set_process_name", names.append)
    monkeypatch.setattr(job_store, "connect", connect)
    with pytest.raises(SystemExit):
        node.main(SAVING)
    assert names == ["moe_ft_joins"]
