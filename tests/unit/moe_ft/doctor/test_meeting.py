"""Values are collected from the processes that answer, and waiting for others ends."""

import time

import pytest

from moe_ft.doctor.meeting import OwnMeeting, StoreMeeting
from moe_ft.doctor.place import Place
from moe_ft.errors import ConfigError
from tests.ports import free_port


def test_lone_process_collects_what_it_has_shown() -> None:
    meeting = OwnMeeting()
    meeting.show("word", ("a", 1))
    assert meeting.collect("word", [0], 0.0) == {0: ["a", 1]}
    assert meeting.collect("other", [0], 0.0) == {}


def test_values_are_collected_from_those_that_have_shown_some() -> None:
    place = Place(world_size=3, master=("127.0.0.1", free_port()))
    deadline_s = time.monotonic() + 120
    first = StoreMeeting(place, deadline_s)
    second = StoreMeeting(Place(rank=1, world_size=3, master=place.master), deadline_s)
    first.show("word", "a")
    second.show("word", "b")
    assert first.collect("word", [0, 1], deadline_s) == {0: "a", 1: "b"}
    assert second.collect("word", range(3), time.monotonic()) == {0: "a", 1: "b"}


def test_restarted_processes_do_not_see_what_dead_ones_have_shown() -> None:
    place = Place(world_size=2, master=("127.0.0.1", free_port()))
    deadline_s = time.monotonic() + 120
    dead = StoreMeeting(place, deadline_s)
    dead.show("word", "a")
    later = Place(world_size=2, master=place.master, has_agent_store=True, attempt="1")
    assert StoreMeeting(later, deadline_s).collect("word", [0], 0.0) == {}


def test_place_where_nobody_listens_is_given_up() -> None:
    place = Place(rank=1, world_size=2, master=("127.0.0.1", free_port()))
    with pytest.raises(RuntimeError):
        StoreMeeting(place, time.monotonic())


def test_place_with_a_name_that_leads_nowhere_is_refused_with_the_variable_to_set() -> None:
    place = Place(rank=1, world_size=2, master=("node1.invalid", free_port()))
    with pytest.raises(
        ConfigError, match=r"MASTER_ADDR=node1.invalid must be .* Set it to the address"
    ):
        StoreMeeting(place, time.monotonic() + 1)
