"""Launchers say how many ranks there are; flags are read as training reads them."""

import pytest

from moe_ft.commands.command_line import read_command, read_launch
from moe_ft.errors import ConfigError
from moe_ft.strategies.partial.selection import PartialConfig


@pytest.mark.parametrize(
    ("words", "world_size", "per_node"),
    [
        ("torchrun --nproc-per-node 8 --nnodes 4", 32, 8),
        ("torchrun --nproc_per_node=8 --nnodes=2 --max-restarts 3 --rdzv-id x", 16, 8),
        ("torchrun --nnodes 1:4 --nproc-per-node 8", 32, 8),
        ("/env/bin/torchrun --nproc-per-node 4", 4, 4),
        ("torchrun", 1, 1),
        ("python3 -m torch.distributed.run --nproc-per-node 2", 2, 2),
        ("srun --kill-on-bad-exit=1 /env/bin/torchrun --nnodes 3 --nproc-per-node 8", 24, 8),
        ("srun -N 4 --ntasks-per-node 8 python", 32, 8),
        ("srun -N4 -n32 python", 32, 8),
        ("srun --ntasks=16 --ntasks-per-node=4", 16, 4),
        ("srun --ntasks=16", 16, None),
        ("python", 1, 1),
        ("/env/bin/moe_ft run", 1, 1),
        ("torchrun --nproc-per-node 2 -m moe_ft run", 2, 2),
        ("torchrun --nnodes 2 -m moe_ft keep --ranks-per-node 4 --", 8, 4),
        ("python -m moe_ft keep --nodes 4 --ranks-per-node 8 --meet a:1 --", 32, 8),
        ("python -m moe_ft keep --nodes=4 --ranks-per-node=8 --meet=a:1 --", 32, 8),
        ("moe_ft launch --ranks-per-node 8", 8, 8),
        ("torchrun --nnodes 2 -m moe_ft launch --ranks-per-node 4", 8, 4),
        ("python -m torch.distributed.launch --use-env --nproc_per_node=2", 2, 2),
        ("torchrun --nproc-per 4 -r 3", 4, 4),
        ("A=1 torchrun --nproc-per-node 2", 2, 2),
    ],
)
def test_ranks_are_those_that_the_launcher_starts(
    words: str, world_size: int, per_node: int | None
) -> None:
    launch = read_launch(words.split())
    assert (launch.world_size, launch.ranks_per_node) == (world_size, per_node)


@pytest.mark.parametrize(
    ("words", "restarts", "backend"),
    [
        ("torchrun --max-restarts 3 --rdzv_backend=c10d --nnodes 2", True, "c10d"),
        ("torchrun --standalone --max-restarts 3 --nproc-per-node 8", True, "c10d"),
        ("torchrun --max-restarts=0 --nnodes 1:4", False, "static"),
        ("torchrun --max-restarts 1 -m moe_ft launch --ranks-per-node 2", True, "static"),
        ("srun --ntasks 4", False, None),
    ],
)
def test_restarts_are_those_of_torchrun(words: str, restarts: bool, backend: str | None) -> None:
    launch = read_launch(words.split())
    assert (launch.restarts, launch.backend) == (restarts, backend)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("torchrun --nproc-per-node gpu", "--nproc-per-node=gpu must be from 1 to 999,999,999"),
        ("torchrun --nnodes " + "9" * 4400, "999 --nproc-per-node=1 must be from 1 to 999,999,999"),
        ("python -m moe_ft keep --nodes x", "keep --nodes=x --ranks-per-node=1 "),
        ("python -m moe_ft launch", "launch --nodes=1 --ranks-per-node=one for each GPU "),
        ("srun -N 4", "srun has neither --ntasks nor"),
        ("mpirun -np 4", "mpirun is no launcher that plan knows"),
        ("", "no launcher"),
    ],
)
def test_ranks_that_a_launcher_does_not_name_are_not_guessed(words: str, reason: str) -> None:
    launch = read_launch(words.split())
    assert launch.world_size is None
    assert reason in launch.reason


def test_flags_follow_the_program() -> None:
    words = "torchrun --nproc-per-node 2 pretrain_gpt_moe.py --num-layers 3 --moe-ft-k-persist 2 --lr 1e-3"
    words += " --moe-ft-strategy partial --moe-ft-state-digest --fp8-format hybrid"
    command = read_command(words.split())
    assert command.launch.world_size == 2
    assert command.flags[:2] == ("--num-layers", "3")
    assert not command.runs_script
    assert command.config.strategy.strategy == "partial"
    assert command.config.observability.state_digest
    options = command.config.options["partial"]
    assert isinstance(options, PartialConfig)
    assert options.k_persist == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("examples/quickstart.sh --num-layers 4", "examples/quickstart.sh starts no .py program"),
        (
            "moe_ft launch --nodes 2 --moe-ft-keep 3 -- run_recipe.py",
            "--moe-ft-keep in front of a script means a job of Megatron-Bridge",
        ),
        (
            "torchrun --max-restart=x y.py",
            "argument --max-restarts/--max_restarts: invalid int value: 'x'",
        ),
        ("torchrun --zproc-per-node=2 y.py", "--zproc-per-node=2. Did you mean --nproc-per-node"),
        ("--moe-ft-windows 3", "arguments: --moe-ft-windows. Did you mean --moe-ft-window\\? "),
        ("--num-layers 3 --help", "--help starts no training"),
        ("--moe-ft-strategy foo", "--moe-ft-strategy=foo must be one of none, dense, "),
        ("--moe-ft-strategy sparce", "partial, sparse, selective. Did you mean sparse\\? "),
    ],
)
def test_words_that_cannot_be_read_are_named(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_command(words.split())


@pytest.mark.parametrize(
    "launcher", ["torchrun -m moe_ft run", "/env/bin/moe_ft run", "moe_ft launch"]
)
def test_script_of_ones_own_is_seen_and_flags_of_moe_ft_must_exist(launcher: str) -> None:
    words = f"{launcher} train.py --num-layers 3 --corpus a b --moe-ft-strategy dense"
    assert read_command(words.split()).runs_script
    with pytest.raises(ConfigError, match="unrecognized arguments: --moe-ft-strateg"):
        read_command(f"{launcher} train.py --moe-ft-strateg dense".split())
