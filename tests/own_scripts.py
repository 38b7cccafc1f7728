"""Runs pretraining scripts on a rank, with `moe_ft run` and as Python would.

They are examples/pretrain_own.py, and those of tests/distributed/scripts, which use parts of it.
"""

import json
import os
import sys
from pathlib import Path

from megatron.core.datasets import utils as dataset_utils
from megatron.training import get_args

from megatron.fault_tolerance.cpu import device as cpu_device
from moe_ft.cluster.forked_rank import run_script
from moe_ft.commands import run
from moe_ft.state.digest import digest_state
from tests.stock import recorded_build
from tests.stock_program import CPU_FLAGS

OWN_SCRIPT = Path(__file__).parents[1] / "examples" / "pretrain_own.py"
SCRIPTS = Path(__file__).parent / "distributed" / "scripts"
sys.path.append(str(OWN_SCRIPT.parent))
BASE_FLAGS = ("--base", "16")
HYBRID_FLAGS = ("--hybrid-layer-pattern", "*E-*E*E")


def run_own(flags: list[str]) -> None:
    """Run a script with its own data, loss and arguments under `moe_ft run`."""
    run.run_script([str(OWN_SCRIPT), *BASE_FLAGS, *flags])


def run_program(flags: list[str]) -> None:
    """Run the program that installs the seams itself, which needs no `moe_ft run`, under `moe_ft run`."""
    run.run_script([str(OWN_SCRIPT.parents[1] / "pretrain_gpt_moe.py"), *flags])


def run_hybrid(flags: list[str]) -> None:
    """Run a script with a hybrid model under `moe_ft run`."""
    script = SCRIPTS / "pretrain_hybrid_layers.py"
    run.run_script([str(script), *BASE_FLAGS, *HYBRID_FLAGS, *flags])


def run_older(flags: list[str]) -> None:
    """Run a script with an older call of `pretrain` under `moe_ft run`."""
    run.run_script([str(SCRIPTS / "pretrain_older.py"), *flags])


def run_own_parser(flags: list[str]) -> None:
    """Run a script with a parser of its own under `moe_ft run`."""
    run.run_script([str(SCRIPTS / "pretrain_own_parser.py"), *flags])


def run_library(flags: list[str]) -> None:
    """Run a script that imports moe_ft, as Python does."""
    _run_as_python(SCRIPTS / "pretrain_library.py", [*BASE_FLAGS, *flags])


def run_and_digest(flags: list[str], is_plain: bool, folder: str) -> None:
    """Run the script with its own data without moe_ft's flags, and write the digests of its last state.

    Args:
        is_plain: run it as Python does, on the CPU device alone.
        folder: for the digests of all ranks.
    """
    with recorded_build() as built:
        if is_plain:
            cpu_device.install()
            dataset_utils.compile_helpers = lambda: None
            _run_as_python(OWN_SCRIPT, [*BASE_FLAGS, *CPU_FLAGS, *flags])
        else:
            run_own(flags)
    args = get_args()
    counters = {"train": args.consumed_train_samples, "valid": args.consumed_valid_samples}
    model, optimizer, scheduler = built["state"]
    digest = digest_state(model, optimizer, scheduler, counters)
    path = Path(folder) / f"digests_{args.rank}.json"
    path.write_text(json.dumps([digest.sha256, digest.sha256_all]))


def _run_as_python(script: Path, flags: list[str]) -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    sys.argv = [str(script), *flags]
    sys.path.insert(0, str(script.parent))
    run_script(sys.argv[0])
