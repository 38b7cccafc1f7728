"""Values in a store of torch: those of a stranger are not there, and break nothing."""

import json
from typing import Any

import pytest
import torch.distributed as dist

from moe_ft.engine.links.signed_store import MAX_VALUE_BYTES, SignedStore
from moe_ft.errors import RepairError

VALUES: tuple[Any, ...] = (
    {"rank": 3, "facts": {"a": 1.5, "b": [None, True, "\n"]}},
    [],
    0,
    "text",
    1e308,
)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def signed(store: dist.Store, said: list[str]) -> SignedStore:
    return signed_with("the token", store, said)


def signed_with(token: str, store: dist.Store, said: list[str]) -> SignedStore:
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


def test_nothing_is_there_before_the_token_is_known(store: dist.Store, said: list[str]) -> None:
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


def test_value_that_is_moved_to_another_key_or_start_is_not_there(
    store: Any, signed: SignedStore, said: list[str]
) -> None:
    signed.set("key", "ours")
    signed.append("list", "ours")
    store.set("other", store.get("key"))
    store.set("other list", store.get("list"))
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
    store.set("key", store.get("key")[:-1] + b"!")
    assert signed.get("key") is None
