"""The place of a process is that of torchrun's or SLURM's variables; a lone process has nobody to meet."""

import pytest

from moe_ft.doctor.place import find_place
from moe_ft.errors import ConfigError

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
