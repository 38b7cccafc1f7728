"""The command that `plan` prints is the one that was given, with what protects the job."""

import shlex
from argparse import Namespace
from typing import Any

import pytest

from moe_ft.commands.command_line import read_command
from moe_ft.commands.plan_advice import SPEEDS
from moe_ft.commands.plan_command import StartCommand, start_command
from moe_ft.commands.plan_inputs import SECONDS, Values, read_cluster

OF_TORCHRUN = "--max-restarts=20 --rdzv-backend=c10d --rdzv-id=my_job"
REPAIR = "--moe-ft-repair=auto"


def begun(words: str, *own: str) -> StartCommand:
    command = read_command(shlex.split(words))
    return start_command(command, own, world_size=16, ranks_per_node=8)


@pytest.mark.parametrize(
    ("given", "own", "launcher"),
    [
        (
            "--mock-data",
            (),
            f"torchrun --nnodes=2 --nproc-per-node=8 {OF_TORCHRUN} --rdzv-endpoint=NODE_0:29500",
        ),
        (
            "torchrun --standalone --nproc-per-node 16 x.py",
            (),
            f"torchrun --nproc-per-node 16 {OF_TORCHRUN} --rdzv-endpoint=localhost:29500",
        ),
        (
            "torchrun --nnodes 2 --max-restarts 5 --rdzv-id a --master-addr b -m moe_ft run x.py",
            (REPAIR,),
            "torchrun --nnodes 2 --max-restarts 5 --rdzv-id a --master-addr b "
            "--nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=b:29500 -m moe_ft keep "
            "--ranks-per-node=8 -- -m moe_ft run",
        ),
        (
            "torchrun --max-restarts=0 -m moe_ft keep -- x.py --moe-ft-repair auto",
            (),
            f"torchrun --max-restarts=0 {OF_TORCHRUN} --rdzv-endpoint=localhost:29500 -m moe_ft keep --",
        ),
        ("srun -N 2 -n 16 python x.py", (), "srun -N 2 -n 16 python"),
    ],
)
def test_launcher_gets_what_it_lacks(given: str, own: tuple[str, ...], launcher: str) -> None:
    found = begun(given, *own)
    assert " ".join(found.launcher) == launcher
    assert found.is_kept == ("keep" in launcher)
    assert bool(found.variables) == launcher.startswith("torchrun")
    read_again = shlex.split(found.text.replace("\\\n", ""))
    assert tuple(read_again[len(found.variables) :]) == found.words


def test_words_that_only_the_user_knows_are_named() -> None:
    stored = "--moe-ft-persist-dir=PERSIST_DIR"
    assert begun("--bf16", stored).placeholders == [
        *("NODE_0", "PERSIST_DIR", "DATA_PREFIX", "TOKENIZER")
    ]
    assert begun("torchrun --nproc-per-node 2 x.py --bf16").placeholders == []


def test_values_that_nobody_has_measured_are_marked_as_assumed() -> None:
    typed: dict[str, Any] = {"mtbf_s": 600.0, "bandwidth": "20GB"}
    options = Namespace(from_run=None, **dict.fromkeys((*SECONDS, *SPEEDS)) | typed)
    found = Values(options, read_cluster("dgx-h100"), 4, 1)
    sources = {name: source for name, _, source in found.assumptions}
    assert {name for name, source in sources.items() if source.startswith("assumed: ")} == {
        *("storage_bandwidth", "restart_s", "repair_s")
    }
    assert sources["bandwidth"] == sources["mtbf_s"] == "given"
    assert sources["network_bandwidth"].startswith("measured on a loopback")
    assert found.found["bandwidth"] == 20e9


@pytest.mark.parametrize(
    ("minutes", "flags", "saves", "source"),
    [
        (None, [], ("every 30 min", 60), "assumed: default"),
        (45.0, ["--save-interval", "500"], ("every 45 min", 90), "given"),
        (None, ["--save-interval", "500"], ("every 500 iterations", 500), "--save-interval"),
        (0.001, [], ("every 0.001 min", 1), "given"),
    ],
)
def test_interval_of_what_the_user_does_now_is_given_or_that_of_training_or_30_minutes(
    minutes: float | None, flags: list[str], saves: tuple[str, int], source: str
) -> None:
    options = Namespace(from_run=None, **dict.fromkeys((*SECONDS, *SPEEDS)) | {"iteration_s": 30.0})
    found = Values(options, None, 4, 1)
    assert found.saves(minutes, read_command(flags)) == saves
    sources = {name: source for name, _, source in found.assumptions}
    assert (sources["save_minutes"], sources["restart_s"]) == (source, "assumed: default")
