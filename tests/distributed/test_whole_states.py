"""Whole states on storage while training runs (--moe-ft-persist-dense-interval)."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_ft.cli import main
from moe_ft.convert.conversion import ConversionRequest, convert
from tests.harness import digests
from tests.jobs import NUM_RANKS, CheckpointJob
from tests.ports import free_port
from tests.references import Digests

PROGRAM = Path(__file__).resolve().parent.parent.parent / "pretrain_gpt_moe.py"

NUM_ITERATIONS, WHOLE = 8, 3
LENGTH = ("--train-iters", str(NUM_ITERATIONS), "--moe-ft-keep", "9")
ONLY_WHOLE = ("--moe-ft-persist-interval", "0", "--moe-ft-persist-dense-interval")
CASES = {
    # A window takes two iterations: from 3 on one may begin.
    "sparse": ("--moe-ft-window", "2", *ONLY_WHOLE, "2"),
    "partial": ("--moe-ft-k-snapshot", "1", *ONLY_WHOLE, "3"),
}


def contents(storage: Path, folder: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of a state after a conversion, masters and moments included."""
    convert(
        ConversionRequest(
            source=str(storage), destination=str(folder), to="safetensors", iteration=WHOLE
        )
    )
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    return {name: each.view(torch.uint8).numpy().tobytes() for name, each in tensors.items()}


def test_last_state_alone_goes_to_storage_without_intervals_and_memory_is_let_go(
    job: CheckpointJob,
) -> None:
    job.run("--moe-ft-persist-interval", "0", storage=True).check()
    assert job.stored() == [job.num_iterations]
    assert not (job.memory_dir / "test").exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
@pytest.mark.parametrize("strategy", CASES)
def test_whole_state_is_converted_and_continued_exactly_from_storage_alone(
    strategy: str, job: CheckpointJob
) -> None:
    undisturbed, log = job.folder / "undisturbed", job.folder / "log"
    places = ("--moe-ft-persist-dir", str(undisturbed), "--moe-ft-event-log", str(log))
    job.run(*LENGTH, *places, "--moe-ft-persist-interval", str(WHOLE), "--moe-ft-job-id", "other")
    flags = (*LENGTH, "--moe-ft-strategy", strategy, *CASES[strategy])
    kill = ("--moe-ft-inject-fault", "kill:1@6:backward")
    job.run(*flags, *kill, storage=True)
    assert job.stored()[0] == WHOLE
    for each in job.storage.glob("iter_*"):
        if each.name != f"iter_{WHOLE:07d}":
            shutil.rmtree(each)
    expected = contents(undisturbed, job.folder / "expected")
    assert expected
    assert contents(job.storage, job.folder / "converted") == expected
    shutil.rmtree(job.memory_dir / "test")
    job.resume(*flags, *kill, storage=True)
    assert job.recovered() == [(WHOLE, WHOLE)]
    (recovery,) = job.events("recovery")
    assert recovery["lost_tokens"] == 0
    assert job.digests() == digests(log, NUM_RANKS)


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_window_is_densified_by_its_job_and_the_run_continues_exactly(
    job: CheckpointJob, expected: Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2")
    kill = ("--moe-ft-inject-fault", "kill:1@4:backward")
    job.run(*flags, "--moe-ft-persist-interval", "1", *kill, storage=True)
    assert job.stored() == [2]
    shutil.rmtree(job.memory_dir / "test")
    convert_to = ["convert", str(job.storage), str(job.folder / "converted"), "--to", "torch_dist"]
    options = ("--nproc-per-node", str(NUM_RANKS), "--master-port", str(free_port()))
    launch = [sys.executable, "-m", "torch.distributed.run", *options, str(PROGRAM)]
    assert main([*convert_to, "--densify", "--", *launch, *job.flags(*flags, storage=True)]) == 0
    assert (job.folder / "converted" / "iter_0000003").is_dir()
    assert job.recovered() == [(1, 2)]
    job.resume(*flags, storage=True)
    assert job.recovered()[1:] == [(3, 3)]
    assert job.digests() == expected


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_newest_whole_state_stays_while_others_push_each_other_out(job: CheckpointJob) -> None:
    flags = ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "1", "--moe-ft-keep", "1")
    often = ("--moe-ft-persist-interval", "1", "--moe-ft-persist-dense-interval", "20")
    kill = ("--moe-ft-inject-fault", "kill:1@36:backward")
    job.run("--train-iters", "40", *flags, *often, *kill, storage=True)
    whole, *newer = job.stored()
    assert 20 <= whole < 30 < newer[-1]
    assert len(newer) <= 2  # the one that is kept, and one that not all ranks have read back yet
