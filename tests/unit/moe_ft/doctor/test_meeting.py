"""Values are collected from the processes that answer, and waiting for others ends."""

import socket
import time
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from torch.distributed import TCPStore

from moe_ft.doctor.meeting import Meeting
from moe_ft.doctor.place import Place
from moe_ft.errors import ConfigError, CorruptStateError
from tests.ports import free_port

WORD = msgspec.json.Decoder(str)


def test_lone_process_collects_what_it_has_shown() -> None:
    meeting = Meeting(Place(), 0.0)
    meeting.show("word", "a")
    assert meeting.collect("word", [0], 0.0, WORD) == {0: "a"}
    assert meeting.collect("other", [0], 0.0, WORD) == {}


def test_values_are_collected_from_those_that_have_shown_some() -> None:
    place = Place(world_size=3, master=("127.0.0.1", free_port()))
    deadline_s = time.monotonic() + 120
    first = Meeting(place, deadline_s)
    second = Meeting(Place(rank=1, world_size=3, master=place.master), deadline_s)
    first.show("word", "a")
    second.show("word", "b")
    assert first.collect("word", [0, 1], deadline_s, WORD) == {0: "a", 1: "b"}
    assert second.collect("word", range(3), time.monotonic(), WORD) == {0: "a", 1: "b"}


class Open:
    """A meeting with a token, and a stranger at its store."""

    def __init__(self, token: str) -> None:
        master = ("127.0.0.1", free_port())
        self.meeting = Meeting(
            Place(world_size=2, master=master, token=token), time.monotonic() + 120
        )
        self.stranger: Any = TCPStore(
            *master, is_master=False, timeout=timedelta(seconds=120), wait_for_workers=False
        )

    def read(self, name: str = "word") -> dict[int, str]:
        """Return what rank 1 has shown."""
        return self.meeting.collect(name, [1], 0.0, WORD)


@pytest.mark.parametrize("proof", ["", "0" * 64], ids=["none", "wrong"])
@pytest.mark.parametrize("token", ["", "secret"])
def test_value_without_a_proof_of_the_token_is_refused(token: str, proof: str) -> None:
    opened = Open(token)
    opened.stranger.set("moe_ft_doctor/word/1", f'{proof}"a"')
    with pytest.raises(CorruptStateError, match="'moe_ft_doctor/word/1' has no proof"):
        opened.read()


def test_value_of_another_kind_is_refused() -> None:
    opened = Open("secret")
    opened.meeting.show("word", 1)
    with pytest.raises(
        CorruptStateError, match="is not a value that doctor wrote: Expected `str`, got `int`"
    ):
        opened.meeting.collect("word", [0], 0.0, WORD)


def test_store_listens_at_its_master_alone() -> None:
    place = Place(world_size=2, master=("127.0.0.2", free_port()))
    _meeting = Meeting(place, time.monotonic() + 120)
    socket.create_connection(place.master, timeout=120).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", place.master[1]), timeout=120)


def test_place_where_nobody_listens_is_given_up() -> None:
    place = Place(rank=1, world_size=2, master=("127.0.0.1", free_port()))
    with pytest.raises(RuntimeError):
        Meeting(place, time.monotonic())


def test_place_with_a_name_that_leads_nowhere_is_refused_with_the_variable_to_set() -> None:
    place = Place(rank=1, world_size=2, master=("node1.invalid", free_port()))
    with pytest.raises(
        ConfigError, match=r"MASTER_ADDR=node1.invalid must be .* Set it to the address"
    ):
        Meeting(place, time.monotonic() + 1)
