"""Signed values in the job's store: those of a stranger are not there, and break nothing."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moe_ft.cluster.signed_store import MAX_VALUE_BYTES, SignedStore, StoreMeeting, poll_s
from moe_ft.cluster.store_client import JobStore
from moe_ft.errors import RepairError
from tests.unit.moe_ft.cluster.test_job_store import TOKEN
from tests.unit.moe_ft.cluster.test_store import served
from tests.unit.moe_ft.together import run_together

VALUES: tuple[Any, ...] = (
    {"rank": 3, "facts": {"a": 1.5, "b": [None, True, "\n"]}},
    [],
    0,
    "text",
    1e308,
)


@pytest.fixture
def store() -> Iterator[JobStore]:
    with served() as address:
        yield JobStore(address, "a", TOKEN)


@pytest.fixture
def said() -> list[str]:
    return []


def written(store: JobStore, key: str) -> bytes:
    """Return what is there, as it was written."""
    return store.compare_set(key, "-", "-")


@pytest.fixture
def signed(store: JobStore, said: list[str]) -> SignedStore:
    return signed_with("the token", store, said)


def signed_with(token: str, store: JobStore, said: list[str]) -> SignedStore:
    return SignedStore(store, lambda: token, lambda key, reason: said.append(f"{key}: {reason}"))


def test_values_come_back_as_they_were_written(signed: SignedStore, said: list[str]) -> None:
    for number, value in enumerate(VALUES):
        assert signed.get(f"key_{number}") is None
        signed.set(f"key_{number}", value)
        assert signed.get(f"key_{number}") == value
        signed.append("list", value)
    assert signed.values("list") == list(VALUES)
    assert signed.length("list") == len(VALUES)
    assert signed.values("no list") == [] and signed.length("no list") == 0
    assert said == []


def test_nothing_is_there_before_the_token_is_known(store: JobStore, said: list[str]) -> None:
    token = ""
    signed = SignedStore(store, lambda: token, lambda key, reason: said.append(key))
    signed.set("key", "of a stranger, who can sign as well with no token")
    signed.append("list", 1)
    assert signed.get("key") is None and signed.values("list") == []
    token = "the token"
    assert signed.get("key") is None and signed.values("list") == []
    assert len(said) == 2


@pytest.mark.parametrize(
    "planted",
    [
        b"",
        b"1",
        b'{"rank": 0}',
        b"\xff\xfe",
        b"\0" * 100,
        b"0" * 64 + b" 1",
        b"[" * 100_000,
        b"x" * (MAX_VALUE_BYTES + 1),
    ],
    ids=lambda planted: repr(planted[:12]),
)
def test_value_of_a_stranger_is_not_there_and_this_is_said_once(
    store: Any, signed: SignedStore, said: list[str], planted: bytes
) -> None:
    signed.set("key", "ours")
    store.set("key", planted)
    assert signed.get("key") is None and signed.get("key") is None
    assert len(said) == 1 and said[0].startswith("key: it ")
    signed.set("key", "ours")
    assert signed.get("key") == "ours"


def test_first_value_replaces_that_of_a_stranger_for_one_of_two_who_find_it(
    store: Any, signed: SignedStore, said: list[str]
) -> None:
    class Late(SignedStore):
        """Reads a stranger's value, and writes when another one has replaced it."""

        def _checked(self, key: str, line: bytes) -> Any:
            if line == b"of a stranger":
                signed.set_first(key, "of the other")
            return super()._checked(key, line)

    store.set("key", b"of a stranger")
    late = Late(store, lambda: "the token", lambda key, reason: None)
    assert late.set_first("key", "of the late one") == "of the other"
    assert signed.get("key") == "of the other"


def test_value_that_is_moved_to_another_key_or_start_is_not_there(
    store: Any, signed: SignedStore, said: list[str]
) -> None:
    signed.set("key", "ours")
    signed.append("list", "ours")
    store.set("other", written(store, "key"))
    store.set("other list", written(store, "list"))
    assert signed.get("other") is None
    assert signed.values("other list") == []
    later = signed_with("another token", store, said)
    assert later.get("key") is None and later.values("list") == []
    assert len(said) == 4


def test_list_keeps_its_values_whatever_a_stranger_appends(store: Any, signed: SignedStore) -> None:
    signed.append("list", 1)
    store.append("list", "no end of a line")
    signed.append("list", 2)
    store.append("list", "\n\n" + "x" * 1000 + "\n")
    store.add("list/count", -100)
    signed.append("list", 3)
    assert signed.values("list") == [1, 2, 3]


def test_value_that_is_too_long_or_is_no_json_is_not_written(signed: SignedStore) -> None:
    with pytest.raises(RepairError, match="key would have 4194\\d+ bytes in the job's store"):
        signed.set("key", "x" * MAX_VALUE_BYTES)
    with pytest.raises(ValueError, match="not JSON compliant"):
        signed.set("key", float("nan"))
    assert signed.get("key") is None


def test_nothing_is_parsed_before_its_code_is_checked(
    store: Any, signed: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed.set("key", "ours")
    monkeypatch.setattr(json, "loads", lambda body: pytest.fail("parsed"))
    store.set("key", written(store, "key")[:-1] + b"!")
    assert signed.get("key") is None


def meeting(store: SignedStore, rank: int, world_size: int) -> StoreMeeting:
    return StoreMeeting(store, rank, world_size, least_poll_s=0.001)


def never(seconds: float) -> bool:
    return threading.Event().wait(seconds)


def test_all_learn_what_all_have_said(signed: SignedStore) -> None:

    def say(rank: int, gather: object) -> Any:
        return meeting(signed, rank, 3).exchange("list", 10 * rank, 120.0, never)

    assert run_together(3, say) == [{0: 0, 1: 10, 2: 20}] * 3


def test_rank_that_nobody_joins_learns_what_there_is_in_time_and_nothing_if_it_gives_up(
    signed: SignedStore,
) -> None:
    assert meeting(signed, 1, 3).exchange("list", "a", 0.0, never) == {1: "a"}
    assert meeting(signed, 2, 3).exchange("list", "b", 120.0, lambda seconds: True) is None
    assert meeting(signed, 0, 3).said("list") == {1: "a", 2: "b"}


def test_counter_that_a_stranger_has_raised_ends_no_wait(signed: SignedStore) -> None:
    signed._store.add("list/count", 100)
    looks: list[float] = []

    def look_twice(seconds: float) -> bool:
        looks.append(seconds)
        return len(looks) == 2

    assert meeting(signed, 0, 2).exchange("list", 1, 120.0, look_twice) is None
    assert looks == [0.001] * 2


def test_many_ranks_ask_the_store_less_often() -> None:
    assert (poll_s(8, 0.01), poll_s(10_000, 0.01)) == (0.01, 2.0)


def test_store_that_does_not_answer_is_given_up_in_time(signed: SignedStore) -> None:
    end = threading.Event()
    slow = StoreMeeting(signed, 0, 1, least_poll_s=0.001, answer_s=0.01)
    with pytest.raises(TimeoutError, match="the job's store did not return"):
        slow.ask(lambda store: end.wait(120.0))
    end.set()
