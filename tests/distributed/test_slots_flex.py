"""Slots of experts whose tokens a flex dispatcher brings, over a stand-in (tests/deep_ep_on_cpus.py)."""

from pathlib import Path

import pytest

from tests import deep_ep_on_cpus, slotted
from tests.demo_model import layout_flags, model_flags
from tests.jobs import CheckpointJob

pytestmark = pytest.mark.rest
BACKENDS = ["deepep", "hybridep"]


def flex(backend: str) -> list[str]:
    return ["--moe-flex-dispatcher-backend", backend, "--moe-router-dtype", "fp32"]


def train_slotted(flags: list[str], is_stock: bool, folder: str) -> None:
    """Train with the stand-in, and write what tests/slotted.py compares."""
    deep_ep_on_cpus.install()
    slotted.train(flags, is_stock, folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_megatrons_table_gives_the_bits_of_stock_megatron(
    backend: str, tmp_path: Path, dataset_flags: list[str]
) -> None:
    model = model_flags(moe_token_dispatcher_type="flex", expert_tensor_parallel_size=1)
    found = []
    for name, own in (
        ("stock", layout_flags({"ep": 2})),
        ("slots", ["--moe-ft-expert-slots", "2"]),
    ):
        (tmp_path / name).mkdir()
        flags = [*model, *dataset_flags, *flex(backend), *own]
        trained = slotted.run(
            flags, 2, tmp_path / name, is_stock=name == "stock", target=train_slotted
        )
        found.append(trained)
    assert found[1].differing(found[0]) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_that_follow_the_load_are_recovered_after_a_kill(
    backend: str, job: CheckpointJob
) -> None:
    job.set_model(
        2,
        {},
        *("--moe-ft-expert-slots", "3", "--moe-ft-rebalance-interval", "2", *flex(backend)),
        moe_token_dispatcher_type="flex",
        expert_tensor_parallel_size=1,
    )
    job.train = deep_ep_on_cpus.train_with_flex
    job.run_with_faults("kill:1@4:backward")
    assert job.digests() == job.reference() and job.events("slot_table")
