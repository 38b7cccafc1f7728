"""Ranks decode by type what they exchange: bytes of anything else are refused, and nothing of them runs."""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from moe_ft.engine import exchange
from moe_ft.engine.agreement import Agreement, _Level
from moe_ft.errors import ExchangeError
from moe_ft.recovery.attempts import RankError

TIMEOUT = timedelta(seconds=60)
FAILURE = msgspec.msgpack.Decoder(RankError)


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._folder,)


class Pair:
    """A group of gloo of two ranks, in two threads: an agreement, and a stranger who is its other rank."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self._pool = ThreadPoolExecutor(2)
        self.groups = self.together(
            *(lambda rank=rank: dist.ProcessGroupGloo(store, rank, 2, TIMEOUT) for rank in range(2))
        )

    def together(self, *acts: Callable[[], Any]) -> list[Any]:
        """Return what each rank's act returns."""
        return [each.result() for each in [self._pool.submit(act) for act in acts]]

    def agreement(self, rank: int) -> Agreement:
        found = Agreement(TIMEOUT.total_seconds())
        level = _Level(group=self.groups[rank], members=(0, 1), is_top=True)
        found._levels = [level]
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found._pool.shutdown()


def pickled(folder: Path) -> list[bytes]:
    """Return pickles: bare, and where leaders expect the contents of the ranks below them."""
    content = pickle.dumps({1: Payload(folder)})
    return [content, exchange.encode([content]), exchange.encode({1: content})]


Act = Callable[[Agreement], Any]
TO_LEADER: dict[str, Act] = {
    "gather": lambda agreement: agreement.gather(1, exchange.INT),
    "collect": lambda agreement: agreement.collect(1, exchange.INT),
    "fold": lambda agreement: agreement.fold(1, sum, exchange.INT),
}
FROM_LEADER: dict[str, Act] = {
    "gather": TO_LEADER["gather"],
    "broadcast": lambda agreement: agreement.broadcast(1, exchange.INT),
    "hand_out": lambda agreement: agreement.hand_out((), exchange.INT),
}


@pytest.mark.parametrize("name", TO_LEADER)
@pytest.mark.parametrize("number", range(3))
def test_pickle_of_a_stranger_that_speaks_for_a_rank_is_refused_and_does_not_run(
    pair: Pair, tmp_path: Path, name: str, number: int
) -> None:
    ran = tmp_path / "ran"

    def lead() -> None:
        with pytest.raises(ExchangeError, match="what is no .*another process has connected"):
            TO_LEADER[name](pair.agreement(0))

    def follow() -> None:
        exchange.gather(pair.groups[1], pickled(ran)[number])
        if name == "gather" and number == 1:  # a leader passes on what it does not decode
            exchange.scatter(pair.groups[1], ())

    pair.together(lead, follow)
    assert not ran.exists()


@pytest.mark.parametrize("name", FROM_LEADER)
@pytest.mark.parametrize("number", range(3))
def test_pickle_of_a_stranger_that_leads_is_refused_and_does_not_run(
    pair: Pair, tmp_path: Path, name: str, number: int
) -> None:
    ran = tmp_path / "ran"

    def lead() -> None:
        if name == "gather":
            exchange.gather(pair.groups[0], b"")
        exchange.scatter(pair.groups[0], [b"", pickled(ran)[number]])

    def follow() -> None:
        with pytest.raises(ExchangeError, match="what is no .*another process has connected"):
            FROM_LEADER[name](pair.agreement(1))

    pair.together(lead, follow)
    assert not ran.exists()


@pytest.mark.parametrize("size", [0, exchange._MOST_BYTES + 1, 1 << 62])
def test_size_that_no_message_has_is_refused_before_there_is_room_for_it(
    pair: Pair, size: int
) -> None:
    def lead() -> None:
        with pytest.raises(ExchangeError, match=f"a message of {size} bytes"):
            exchange.gather(pair.groups[0], b"own")

    first = bytearray(size.to_bytes(8).ljust(512))
    sent = [torch.frombuffer(first, dtype=torch.uint8)]
    pair.together(lead, lambda: pair.groups[1].send(sent, 0, 0).wait())


@pytest.mark.parametrize("num_bytes", [1, 503, 504, 505, 100_000])
def test_content_of_any_size_arrives_as_it_was_sent(pair: Pair, num_bytes: int) -> None:
    content = bytes(number % 251 for number in range(num_bytes))
    arrived: list[bytes] = []

    def lead() -> None:
        arrived.extend(exchange.gather(pair.groups[0], b"own") or ())
        exchange.scatter(pair.groups[0], [b"own", arrived[1]])

    def follow() -> None:
        exchange.gather(pair.groups[1], content)
        arrived.append(exchange.scatter(pair.groups[1], ()))

    pair.together(lead, follow)
    assert arrived == [b"own", content, content]


def test_lists_that_are_nested_without_end_are_refused() -> None:
    with pytest.raises(ExchangeError, match="what is no list"):
        exchange.decode(b"\x91" * 1_000_000, msgspec.msgpack.Decoder(list))


def test_pickle_in_the_meeting_of_all_ranks_is_refused_and_does_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = pickle.dumps(Payload(tmp_path / "ran"), protocol=0).ljust(exchange._MET_BYTES)

    def all_gather(everyone: torch.Tensor, own: torch.Tensor) -> None:
        everyone[-exchange._MET_BYTES :] = torch.tensor(list(content), dtype=torch.uint8)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(dist.distributed_c10d, "_get_object_coll_device", lambda: "cpu")
    with pytest.raises(ExchangeError, match="what is no tuple"):
        exchange.meet(("mine", 1), msgspec.json.Decoder(tuple[str, int]))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["eval", "exit", "SystemExit", "say", "builtins", "os.system"])
def test_error_of_a_kind_that_is_none_is_a_plain_one_with_its_text(kind: str) -> None:
    sent = exchange.decode(exchange.encode({"kind": kind, "text": "1/0"}), FAILURE)
    assert type(sent.error) is RuntimeError and str(sent.error) == "1/0"
