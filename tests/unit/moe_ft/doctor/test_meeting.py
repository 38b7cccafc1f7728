"""Processes meet where their launcher says, collect what others show, and do not wait for ever."""

import socket
import time
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from torch.distributed import TCPStore

from moe_ft.doctor.meeting import Meeting, MeetingPlace, find_place
from moe_ft.errors import ConfigError, CorruptStateError
from tests.ports import free_port

WORD = msgspec.json.Decoder(str)


def test_lone_process_collects_what_it_has_shown() -> None:
    meeting = Meeting(MeetingPlace(), 0.0)
    meeting.show("word", "a")
    assert meeting.collect("word", [0], 0.0, WORD) == {0: "a"}
    assert meeting.collect("other", [0], 0.0, WORD) == {}


def test_values_are_collected_from_those_that_have_shown_some() -> None:
    place = MeetingPlace(world_size=3, master=("127.0.0.1", free_port()))
    deadline_s = time.monotonic() + 120
    first = Meeting(place, deadline_s)
    second = Meeting(MeetingPlace(rank=1, world_size=3, master=place.master), deadline_s)
    first.show("word", "a")
    second.show("word", "b")
    assert first.collect("word", [0, 1], deadline_s, WORD) == {0: "a", 1: "b"}
    assert second.collect("word", range(3), time.monotonic(), WORD) == {0: "a", 1: "b"}


class Open:
    """A meeting with a token, and a stranger at its store."""

    def __init__(self, token: str) -> None:
        master = ("127.0.0.1", free_port())
        self.meeting = Meeting(
            MeetingPlace(world_size=2, master=master, token=token), time.monotonic() + 120
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
    place = MeetingPlace(world_size=2, master=("127.0.0.2", free_port()))
    _meeting = Meeting(place, time.monotonic() + 120)
    socket.create_connection(place.master, timeout=120).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", place.master[1]), timeout=120)


def test_place_where_nobody_listens_is_given_up() -> None:
    place = MeetingPlace(rank=1, world_size=2, master=("127.0.0.1", free_port()))
    with pytest.raises(RuntimeError):
        Meeting(place, time.monotonic())


def test_place_with_a_name_that_leads_nowhere_is_refused_with_the_variable_to_set() -> None:
    place = MeetingPlace(rank=1, world_size=2, master=("node1.invalid", free_port()))
    with pytest.raises(
        ConfigError, match=r"MASTER_ADDR=node1.invalid must be .* Set it to the address"
    ):
        Meeting(place, time.monotonic() + 1)


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MOE_FT_DOCTOR_TOKEN": "0123456789abcdef",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[003-007,9]b,login",
    "SLURM_JOB_ID": "1234567",
}


def test_place_under_torchrun() -> None:
    place = find_place(TORCHRUN)
    assert (place.rank, place.world_size, place.local_world_size) == (3, 8, 4)
    assert place.master == ("head", 29500)
    assert (place.has_agent_store, place.token) == (True, "0123456789abcdef")


def test_place_in_a_step_of_slurm() -> None:
    place = find_place(SLURM)
    assert (place.rank, place.world_size, place.local_world_size) == (9, 10, 2)
    assert place.master == ("gpu003b", 24567)
    assert not place.has_agent_store


def test_master_that_is_given_wins_over_the_nodes_of_slurm() -> None:
    given = {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1"}
    assert find_place(given).master == ("head", 1)


FIRST_NODES = {  # the last three as Cray's machines have them
    "a1": "a1",
    "a1,a2": "a1",
    "r[8,9]": "r8",
    "n[001,003],m": "n001",
    "jean-zay-ia8": "jean-zay-ia8",
    "on-demand-dy-[1-4]": "on-demand-dy-1",
    "b24-[1-3,5-9],b25-[1,4]": "b24-1",
    "q1-p5[1-2]-h100": "q1-p51-h100",
    "rack[0-1]_blade[0-3]": "rack0_blade0",
    "cray[0-1]c[2-3]s0": "cray0c2s0",
    "x[1000-1001]c[0-7]s0b0n[0-1]": "x1000c0s0b0n0",
}


@pytest.mark.parametrize(("nodes", "first"), FIRST_NODES.items())
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert find_place({**SLURM, "SLURM_STEP_NODELIST": nodes}).master[0] == first


@pytest.mark.parametrize(
    "environment",
    [{}, {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}],
    ids=["nothing", "one rank", "batch script"],
)
def test_process_without_others_is_alone(environment: dict[str, str]) -> None:
    assert find_place(environment).is_alone


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "8"}, "RANK=8 must be a number below WORLD_SIZE=8. Start doctor with"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR=head and MASTER_PORT= must say where"),
        (
            {"TORCHELASTIC_RESTART_COUNT": "1"},
            "TORCHELASTIC_RESTART_COUNT=1 must be 0: .* --max-restarts 0",
        ),
        (
            {"MOE_FT_DOCTOR_TOKEN": "short"},
            "MOE_FT_DOCTOR_TOKEN has 5 characters and must have at least 16.*openssl",
        ),
    ],
)
def test_launch_that_cannot_meet_is_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place({**TORCHRUN, **changed})
