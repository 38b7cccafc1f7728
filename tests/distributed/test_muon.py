"""Muon and SOAP in the training loop: replicated, and with the layer-wise distributed optimizer.

The program of this repository gives Megatron 0.19 a configuration of the model, and then the layer-wise
optimizer gathers whole parameters. A script that builds its model lets it use buffers, with Adam's parameters
in a distributed optimizer of its own.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pretrain_gpt_moe
from moe_ft.config.stock_defects import lines_on_load, read_saves
from tests.demo_model import model_flags
from tests.harness import Train
from tests.jobs import CheckpointJob, RepairedJob, refusal
from tests.own_scripts import run_own
from tests.stock import run_program

SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


def run_adaptive(flags: list[str]) -> None:
    """Train with what the adaptive kind of emerging-optimizers 0.3 reads, and Megatron's does not set."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon

    TensorParallelAdaptiveMuon.scale_mode = "spectral"
    TensorParallelAdaptiveMuon.extra_scale_factor = 1.0
    pretrain_gpt_moe.main(flags)


class Case(NamedTuple):
    """A job whose rank is killed; `layout` is of all its ranks."""

    optimizer: str = "muon"
    layout: dict[str, int] = {}
    num_ranks: int = 2
    is_distributed: bool = True
    flags: tuple[str, ...] = ()
    megatron: tuple[str, ...] = ()
    train: Train | None = None
    changes: dict[str, Any] = {}


PARTIAL = ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "4")
SELECTIVE = (
    "--moe-ft-strategy",
    "selective",
    "--moe-ft-local-budget",
    "1GB",
    "--moe-ft-interval",
    "1",
)
CASES = {
    "buffers-sparse": Case(flags=SPARSE, train=run_own, megatron=OVERLAP),
}
REST = {
    "buffers-dense-ep2": Case(layout={"ep": 2}, train=run_own),
    "buffers-partial-ep2-dp2": Case(layout={"ep": 2}, num_ranks=4, flags=PARTIAL, train=run_own),
    "gathered-dense": Case(),
    "gathered-sparse-pp2-ep2": Case(layout={"pp": 2, "ep": 2}, num_ranks=4, flags=SPARSE),
    "gathered-selective-ep2": Case(layout={"ep": 2}, flags=SELECTIVE),
    "replicated-sparse-dp2": Case(flags=SPARSE, is_distributed=False),
    "replicated-dense-tp2-fp32": Case(
        layout={"tp": 2}, changes={"bf16": False, "sequence_parallel": True}, is_distributed=False
    ),
    "soap-gathered-sparse": Case(flags=SPARSE, changes={"optimizer": "soap"}),
    "soap-replicated-dense-ep2-dp2": Case(
        "soap", layout={"ep": 2}, num_ranks=4, is_distributed=False
    ),
    "adaptive-gathered-sparse": Case("adaptive_muon", flags=SPARSE, train=run_adaptive),
}
ALL = [*CASES, *(pytest.param(name, marks=pytest.mark.rest) for name in REST)]


@pytest.mark.parametrize("name", ALL)
def test_killed_rank_is_recovered_bitwise(job: CheckpointJob, name: str) -> None:
    case = (CASES | REST)[name]
    own = {"optimizer": case.optimizer, "use_distributed_optimizer": case.is_distributed}
    changes = {**own, "num_layers": 2, **case.changes}
    job.set_model(case.num_ranks, case.layout, *case.megatron, **changes)
    job.train = case.train
    expected = job.reference()
    job.run_with_faults("kill:1@4:backward", flags=case.flags)
    assert job.recovered()
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.parametrize(("optimizer", "strategy"), [("muon", SPARSE[1:]), ("soap", ("dense",))])
def test_killed_rank_is_repaired_in_place(
    repaired: RepairedJob, optimizer: str, strategy: tuple[str, ...]
) -> None:
    changes = {"optimizer": optimizer, "num_layers": 2}
    repaired.run("kill:1@4:backward", strategy=strategy, changes=changes)
    repaired.check([1], [4], [{2, 3, 4}])


@pytest.mark.rest
def test_factors_of_soap_are_not_divided_again_for_another_layout(job: CheckpointJob) -> None:
    job.set_model(2, {}, optimizer="soap", num_layers=2)
    job.run("--exit-interval", "2", storage=True).check()
    job.set_model(2, {"ep": 2}, optimizer="soap", num_layers=2)
    line = refusal(job.run("--moe-ft-layout", "any", storage=True))
    assert "an optimizer that keeps more for" in line


@pytest.mark.rest
@pytest.mark.parametrize("flags", [(), ("--no-use-layer-wise-param-layout",)])
def test_installed_megatron_continues_muon_from_its_own_checkpoint_exactly(
    dataset_flags: list[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """It gathers weights after a load, or needs not to: `lines_on_load` says nothing of it."""
    job = [*model_flags(num_layers=2, optimizer="muon", train_iters=8), *dataset_flags, *flags]
    save, load = ("--save", str(tmp_path / "save")), ("--load", str(tmp_path / "save"))
    whole = run_program([*job, *save, "--save-interval", "4"], 2, is_stock=True, folder=tmp_path)
    again = [*job, *load, "--ckpt-step", "4"]
    assert run_program(again, 2, is_stock=True, folder=tmp_path / "again").ends == whole.ends
    assert lines_on_load(read_saves(["pretrain_gpt.py", *again])) == []
