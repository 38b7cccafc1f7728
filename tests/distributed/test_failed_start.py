"""A start of checkpointing that fails leaves nothing behind in its process, so that another one can follow.

Each rank builds the model as Megatron does and opens checkpointing, which fails. The files that a refused
start may leave are the subject of test_checkpoint_bad_input.py.
"""

import gc
import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from megatron.training import training

import pretrain_gpt_moe
from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.config.config import MemoryConfig, MoeFtConfig, RecoveryConfig, StorageConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.recovery.start import start
from tests.demo_model import layout_flags, model_flags
from tests.harness import run_ranks
from tests.shares import share_of

NUM_RANKS = 2
LARGEST_FILE_BYTES = 1 << 16  # far too small for a region, large enough for any other file
SETTLING_S = 5.0  # threads and connections may take a moment to end
Built = tuple[Any, Any, Any]
Held = dict[str, Counter[str]]
# Flags that make a start fail, in the order of the steps in which they do.
FLAWS = ("replication-factor", "persist-dir", "host-memory-limit", "recover-from", "memory-dir")


def open_checkpointing(config: MoeFtConfig, built: Built) -> None:
    """Recover and start checkpointing, as the training loop does once its state is built."""
    facts = MegatronLoop().job_facts("")
    start(config, facts, built, lambda phase, iteration: None)


def held_by_process(folders: tuple[str, ...]) -> Held:
    """Return what this process holds: by kind and name, the number of each.

    Args:
        folders: whose mapped files count; a library that is loaded late is no leak.
    """
    gc.collect()
    own = psutil.Process()
    mapped = (each.path for each in own.memory_maps() if each.path.startswith(folders))
    return {
        "threads": Counter(each.name for each in threading.enumerate()),
        "processes": Counter(each.name() for each in own.children(recursive=True)),
        "descriptors": Counter(_descriptors()),
        "mapped files": Counter(mapped),
        "process groups": Counter(groups=len(dist.distributed_c10d._world.pg_map)),
    }


def _descriptors() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # the descriptor of this very directory
            continue
        yield target.partition(":")[0]  # "socket:[123]", or a path


def left_after(act: Callable[[], None], folders: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Return what a process holds after an act and did not before; empty if there is nothing."""
    before, deadline = held_by_process(folders), time.monotonic() + SETTLING_S
    act()
    while True:
        now = held_by_process(folders)
        left = {kind: dict(now[kind] - before[kind]) for kind in now if now[kind] - before[kind]}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@contextmanager
def small_files() -> Iterator[None]:
    """Let this process write small files only."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def config_of(folder: Path, memory_dir: Path, job_id: str, flaw: str) -> MoeFtConfig:
    """Return the settings of a start that fails because of a flag; with memory-dir they are sound."""
    storage = folder / f"storage-{job_id}"
    if flaw == "persist-dir":
        storage.touch()
    return MoeFtConfig(
        strategy=StrategyConfig(strategy="dense"),
        memory=MemoryConfig(
            memory_dir=str(memory_dir),
            job_id=job_id,
            host_memory_limit="4kB" if flaw == "host-memory-limit" else None,
            replication_factor="5" if flaw == "replication-factor" else "auto",
        ),
        storage=StorageConfig(persist_dir=str(storage)),
        recovery=RecoveryConfig(recover_from="iter_7" if flaw == "recover-from" else "auto"),
    )


def fail_twice(flags: list[str], folder: Path, memory_dir: Path, flaw: str) -> None:
    """Build a job, start its checkpointing twice, and note what the second failure leaves.

    The first one makes whatever a process makes only once. Runs on every rank.
    """
    setup, rank = training.setup_model_and_optimizer, int(os.environ["RANK"])

    def fail(job_id: str, built: Built) -> None:
        config = config_of(folder, memory_dir, job_id, flaw)
        is_short_of_memory = flaw == "memory-dir" and rank == NUM_RANKS - 1
        with (
            pytest.raises((ConfigError, UnrecoverableError), match=f"--moe-ft-{flaw}"),
            small_files() if is_short_of_memory else nullcontext(),
        ):
            open_checkpointing(config, built)

    def build_and_start(*args: Any, **kwargs: Any) -> None:
        built = setup(*args, **kwargs)
        fail("first", built)
        left = left_after(lambda: fail("second", built), (str(folder), str(memory_dir)))
        (folder / f"left_{rank}.json").write_text(json.dumps(left))
        dist.barrier()
        raise SystemExit(0)

    training.setup_model_and_optimizer = build_and_start
    pretrain_gpt_moe.main(flags)


@pytest.mark.parametrize("flaw", share_of(FLAWS, "memory-dir"))
def test_start_that_fails_leaves_nothing_in_its_process(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, flaw: str
) -> None:
    flags = [*model_flags(), *layout_flags({"ep": 2}), *dataset_flags]
    result = run_ranks(
        fail_twice, NUM_RANKS, flags, tmp_path, memory_dir, flaw, log_dir=tmp_path / "logs"
    )
    if any(result.exit_codes):  # not an expected failure: the start did not fail as it should
        raise RuntimeError(result.output(0)[-3000:] + result.output(1)[-3000:])
    left = [json.loads((tmp_path / f"left_{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    assert left == [{}] * NUM_RANKS
    if flaw != "memory-dir":  # regions were there then
        assert not [*memory_dir.rglob("*.alive")]
