"""Server and client of the job's store: who is let in, how many, and what strangers can do."""

import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron.fault_tolerance.repair.store import TorchStore
from moe_ft.cluster import job_store, store_client, store_server
from moe_ft.cluster.store_client import JobStore
from moe_ft.cluster.store_wire import (
    ANSWER_BYTES,
    GREETING_BYTES,
    HEADER_BYTES,
    PROOF_BYTES,
    StoreReply,
)
from moe_ft.errors import JobStoreError, RepairError
from tests.unit.moe_ft.cluster.test_job_store import DEADLINE_S, TOKEN

NUM_RANKS = 1000
SOFT_LIMIT = 1024  # of open files, as login shells and SLURM give it

Address = tuple[str, int]


@contextmanager
def served(num_ranks: int = 2) -> Iterator[Address]:
    """Keep a store in a process with the limit of login shells."""
    listener = job_store.listen_at(("127.0.0.1", 0))
    server = os.fork()
    if server == 0:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
        job_store.serve(listener, "a", TOKEN, num_ranks)
    address: Address = listener.getsockname()[:2]
    listener.close()
    try:
        yield address
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


@pytest.fixture
def address() -> Iterator[Address]:
    with served() as found:
        yield found


@pytest.fixture
def store(address: Address) -> JobStore:
    return JobStore(address, "a", TOKEN)


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes, or fewer if the other side closes."""
    found = b""
    with suppress(OSError):
        while len(found) < num_bytes and (more := connection.recv(num_bytes - len(found))):
            found += more
    return found


def connected(address: Address) -> socket.socket:
    """Return a connection of a stranger, which does not wait for ever."""
    return socket.create_connection(address, timeout=DEADLINE_S)


@pytest.mark.usefixtures("many_files")
def test_thousand_ranks_with_two_connections_each_get_in_under_the_limit_of_login_shells() -> None:
    with served(NUM_RANKS) as address:
        stores = [JobStore(address, "a", TOKEN) for _ in range(2 * NUM_RANKS)]
        assert [each.add("ranks", 1) for each in stores] == list(range(1, 2 * NUM_RANKS + 1))


@pytest.mark.usefixtures("many_files")
def test_rank_gets_in_beside_strangers_who_fill_all_places(address: Address) -> None:
    with ExitStack() as strangers:
        for _ in range(2 * store_server.MAX_STRANGERS):
            strangers.enter_context(connected(address))
        assert JobStore(address, "a", TOKEN).num_keys() == 0


def test_stranger_who_proves_nothing_is_cut_off(address: Address) -> None:
    with connected(address) as stranger:
        assert len(receive(stranger, GREETING_BYTES)) == GREETING_BYTES
        assert receive(stranger, 1) == b""


@pytest.mark.parametrize("num_bytes", [ANSWER_BYTES, 1 << 20])
def test_garbage_of_a_stranger_is_neither_answered_nor_kept(
    store: JobStore, address: Address, num_bytes: int
) -> None:
    with connected(address) as stranger:
        receive(stranger, GREETING_BYTES)
        with suppress(ConnectionError):
            stranger.sendall(np.random.default_rng(1).bytes(num_bytes))
        assert receive(stranger, 1) == b""
    assert store.num_keys() == 0


class Wire:
    """A network between one client and the server, which can change what the client sends."""

    def __init__(self, address: Address, change: Callable[[bytes], bytes]) -> None:
        self.recorded, self._change = b"", change
        self._listener, self._server = socket.create_server(("127.0.0.1", 0)), connected(address)
        self.address: Address = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        client = self._listener.accept()[0]
        threading.Thread(target=self._answer, args=(client,), daemon=True).start()
        self._pass_on(client, receive(client, ANSWER_BYTES), lambda sent: sent)
        while header := receive(client, HEADER_BYTES):
            body = receive(client, int.from_bytes(header[:4]))
            self._pass_on(client, header + body, self._change)

    def _pass_on(
        self, client: socket.socket, sent: bytes, change: Callable[[bytes], bytes]
    ) -> None:
        self.recorded += sent
        with suppress(OSError):
            self._server.sendall(change(sent))

    def _answer(self, client: socket.socket) -> None:
        with suppress(OSError):
            while sent := self._server.recv(1 << 16):
                client.sendall(sent)
            client.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: sent[:-1] + bytes([sent[-1] ^ 1]),
        lambda sent: sent + sent,
    ],
    ids=["flipped", "repeated"],
)
def test_message_that_the_network_changes_ends_the_connection_and_does_nothing(
    store: JobStore, address: Address, change: Callable[[bytes], bytes]
) -> None:
    wire = Wire(address, change)
    client = JobStore(wire.address, "a", TOKEN)
    with suppress(JobStoreError):  # the first of two that are the same is answered
        client.append("key", "value")
    with pytest.raises(JobStoreError, match="does not answer"):
        client.num_keys()
    assert store.wait(["key"], 0.0) in (None, [b"value"])


def test_conversation_that_is_played_again_is_refused(store: JobStore, address: Address) -> None:
    wire = Wire(address, lambda sent: sent)
    JobStore(wire.address, "a", TOKEN).append("key", "value")
    with connected(address) as stranger:
        receive(stranger, GREETING_BYTES)
        stranger.sendall(wire.recorded)
        assert receive(stranger, PROOF_BYTES) == b""
    assert store.wait(["key"], 0.0) == [b"value"]


def test_server_that_does_not_know_the_token_is_refused() -> None:
    with job_store.listen_at(("127.0.0.1", 0)) as listener:
        server = store_server.StoreServer("another token, of a stranger....", "a")
        server.start(listener)
        with pytest.raises(RepairError, match="is not the one of this start"):
            job_store.reach(listener.getsockname(), "a", TOKEN, 0, DEADLINE_S)


def test_operations_do_what_those_of_torch_do(store: JobStore) -> None:
    ours, theirs = TorchStore(store), dist.HashStore()
    stores: list[Any] = [ours, theirs]
    for each in stores:
        each.set("text", "a")
        each.append("text", "b")
    asked: list[Callable[[dist.Store], object]] = [
        lambda each: bytes(each.get("text")),
        lambda each: [each.add("number", 2), each.add("number", -1)],
        lambda each: bytes(each.get("number")),
        lambda each: bytes(each.compare_set("text", "other", "c")),
        lambda each: bytes(each.compare_set("text", "ab", "c")),
        lambda each: bytes(each.compare_set("new", "", "d")),
        lambda each: bytes(each.compare_set("absent", "e", "f")),
        lambda each: [each.check(["text", "number"]), each.check(["text", "absent"])],
        lambda each: [each.delete_key("number"), each.delete_key("number")],
        lambda each: [bytes(value) for value in each.multi_get(["text", "new"])],
    ]
    assert [ask(ours) for ask in asked] == [ask(theirs) for ask in asked]


@pytest.mark.parametrize("waits_with", [TorchStore.wait, dist.PrefixStore.wait])
def test_wait_ends_when_the_last_value_is_there_and_delays_no_other_thread(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, waits_with: Callable[..., None]
) -> None:
    monkeypatch.setattr(store_client, "_SLICE_S", 0.01)
    ours = TorchStore(store)
    view = ours if waits_with is TorchStore.wait else dist.PrefixStore("of/torch", ours)
    waiting = threading.Thread(target=lambda: waits_with(view, ["one", "two"]))
    waiting.start()
    for key in ("one", "two"):
        assert waiting.is_alive()
        view.set(key, "value")
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()


def test_wait_for_a_value_that_does_not_come_ends_with_its_name(store: JobStore) -> None:
    ours = TorchStore(store)
    with pytest.raises(dist.DistStoreError, match="absent not in the job's store within 0 s"):
        ours.wait(["absent"], timedelta(seconds=0.01))
    ours.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match="absent not in"):
        ours.get("absent")


def test_client_that_goes_while_it_waits_leaves_nothing(store: JobStore, address: Address) -> None:
    gone = os.fork()
    if gone == 0:
        JobStore(address, "a", TOKEN).wait(["key"], 0.01)
        os._exit(0)
    assert os.waitpid(gone, 0)[1] == 0
    store.set("key", "value")
    assert store.wait(["key"], 0.0) == [b"value"]


def test_request_that_is_none_ends_only_its_own_connection(
    store: JobStore, address: Address
) -> None:
    wrong = JobStore(address, "a", TOKEN)
    wrong._socket.sendall(wrong._outgoing.seal(StoreReply()))
    with pytest.raises(JobStoreError):
        wrong.num_keys()
    assert store.num_keys() == 0
