"""The store of a job in a process of its own, which other jobs and other hosts do not get to."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from moe_ft import addresses
from moe_ft.cluster import job_store, store_client
from moe_ft.errors import RepairError
from moe_ft.saying import say
from tests.ports import free_port

TOKEN = "the token of this start: 32 bytes"[:32]
DEADLINE_S = 60.0

Environment = dict[str, str]


def environment(rank: int = 1, run: str = "a", host: str = "127.0.0.1") -> Environment:
    """Return the variables of a rank of two whose job's port is free."""
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": run,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }


def listen(given: Environment, *, is_alone: bool = True) -> socket.socket:
    address = given["MASTER_ADDR"], int(given["MASTER_PORT"])
    return job_store.listen_at(address, is_alone=is_alone)


@contextmanager
def served(given: Environment, *, is_alone: bool = True) -> Iterator[None]:
    """Keep the store of a start, as an agent has it kept."""
    listener = listen(given, is_alone=is_alone)
    server = os.fork()
    if server == 0:
        job_store.serve(listener, given["TORCHELASTIC_RUN_ID"], TOKEN, 2)
    listener.close()
    try:
        yield
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


@pytest.fixture
def given() -> Iterator[Environment]:
    with served(found := environment()):
        yield found


def test_store_outlives_the_processes_that_use_it(given: Environment) -> None:
    writer = os.fork()
    if writer == 0:
        job_store.connect(given, TOKEN, DEADLINE_S).set("key", "value")
        os._exit(0)
    assert os.waitpid(writer, 0)[1] == 0
    assert job_store.connect(given, TOKEN, DEADLINE_S).wait(["key"], 0.0) == [b"value"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_store_listens_on_the_interface_of_master_addr_alone(host: str, num_nodes: int) -> None:
    given = environment(host=host)
    with served(given, is_alone=num_nodes == 1):
        job_store.connect(given, TOKEN, DEADLINE_S)
        with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
            stranger.connect(("127.0.0.3", int(given["MASTER_PORT"])))


@pytest.mark.parametrize(
    ("found", "num_nodes", "is_everywhere"),
    [
        (["127.0.1.1"], 1, False),
        (["127.0.1.1"], 2, True),  # the name of a host in its own /etc/hosts
        (["192.0.2.1"], 1, True),  # of a service that leads here
        (["192.0.2.1", "127.0.1.1"], 1, False),
    ],
)
def test_store_listens_everywhere_only_if_other_nodes_could_not_reach_it_otherwise(
    found: list[str],
    num_nodes: int,
    is_everywhere: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = environment(host="node7")
    port = int(given["MASTER_PORT"])
    monkeypatch.setattr(
        addresses, "_resolve", lambda host: [(socket.AF_INET, each) for each in found]
    )
    with listen(given, is_alone=num_nodes == 1), socket.socket() as other:
        assert (other.connect_ex(("127.0.0.3", port)) == 0) == is_everywhere


def test_port_that_is_taken_is_noticed_before_anything_is_forked(given: Environment) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        listen(given)


@pytest.mark.parametrize(
    ("changes", "token", "message"),
    [
        ({"TORCHELASTIC_RUN_ID": "b"}, TOKEN, "is of another job than 'b'"),
        ({}, "of another start", "is not the one of this start: another job has taken the port"),
    ],
)
def test_rank_of_another_job_does_not_use_the_store(
    given: Environment, changes: Environment, token: str, message: str
) -> None:
    with pytest.raises(RepairError, match=message):
        job_store.connect({**given, **changes}, token, DEADLINE_S)


def test_store_that_is_not_one_of_repairs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "_ANSWER_S", 0.1)
    given = environment()
    port = int(given["MASTER_PORT"])
    _stock = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(RepairError, match="the store of this job does not answer"):
        job_store.connect(given, TOKEN, DEADLINE_S)


def test_rank_waits_for_the_node_of_the_store_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_store, "_PATIENCE_S", 0.0)
    given = environment()
    found: list[object] = []
    has_said = threading.Event()

    def say_and_note(line: str) -> None:
        say(line)
        has_said.set()

    monkeypatch.setattr(job_store, "say", say_and_note)
    rank = threading.Thread(
        target=lambda: found.append(job_store.connect(given, TOKEN, DEADLINE_S))
    )
    rank.start()
    assert has_said.wait(DEADLINE_S)
    with served(given):
        rank.join(DEADLINE_S)
    assert len(found) == 1
    line = "waiting up to 60 s for the node of the job's store to listen at 127.0.0.1:"
    assert capsys.readouterr().err.count(line + given["MASTER_PORT"]) == 1


def test_wait_for_a_store_that_nobody_keeps_has_an_end() -> None:
    with pytest.raises(RepairError, match="nothing has listened at 127.0.0.1:.* within 0 s"):
        job_store.connect(environment(), TOKEN, 0.0)
