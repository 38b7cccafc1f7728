"""Arguments, optimizer groups and random numbers, as Megatron reads them."""

from pathlib import Path

import msgspec
import pytest

from moe_ft.convert.common_state import common_state, rng_states, uses_distributed_optimizer
from moe_ft.convert.source import Source, open_source
from moe_ft.engine.persist.storage import Storage
from moe_ft.errors import ConfigError
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from tests.unit.moe_ft.convert.models import ITERATION, identity, persist_model


def opened(folder: Path, who: Identity) -> Source:
    """Return a checkpoint of a run with other settings."""
    persist_model(Storage(str(folder)), who=who)
    return open_source(str(folder))


def test_arguments_are_the_settings_of_the_run(source: Source) -> None:
    args = common_state(source, with_optimizer=True)["args"]
    assert (args.num_layers, args.tensor_model_parallel_size) == (1, 2)
    assert (args.world_size, args.data_parallel_size) == (4, 2)
    assert (args.iteration, args.consumed_train_samples) == (ITERATION, 8 * ITERATION)
    assert not args.no_save_optim


def test_distributed_optimizer_has_every_group_once_with_its_step(source: Source) -> None:
    state = common_state(source, with_optimizer=True)
    assert uses_distributed_optimizer(source)
    assert state["optimizer"] == {
        "optimizer": {
            "param_groups": [{"step": 4.0, "lr": 1e-3, "wd_mult": 1.0, "betas": (0.9, 0.95)}]
        },
        "param_state_sharding_type": "fully_reshardable",
    }
    assert state["opt_param_scheduler"] == {"num_steps": 12}


def test_plain_optimizer_has_a_common_step(tmp_path: Path) -> None:
    source = opened(tmp_path, identity(**{"--use-distributed-optimizer": False}))
    state = common_state(source, with_optimizer=True)
    assert state["optimizer"]["optimizer"]["state"] == {"common_step": 4.0}
    assert "distrib_optim_sharding_type" not in state["content_metadata"]


def test_plain_optimizer_of_fp32_has_no_masters_around_it(tmp_path: Path) -> None:
    settings = {"--use-distributed-optimizer": False, "--bf16": False}
    state = common_state(opened(tmp_path, identity(**settings)), with_optimizer=True)
    assert set(state["optimizer"]) == {"param_groups", "state"}


def test_release_has_no_optimizer(source: Source) -> None:
    state = common_state(source, with_optimizer=False)
    assert "optimizer" not in state
    assert state["args"].no_save_optim
    assert state["args"].no_save_rng


def test_stages_with_different_optimizers_are_refused(tmp_path: Path) -> None:
    def change(index: Index) -> Index:
        (record,) = index.records
        twice = msgspec.structs.replace(record, optimizers=record.optimizers * 2)
        return msgspec.structs.replace(index, records=(twice,)) if index.rank == 3 else index

    persist_model(Storage(str(tmp_path)), change=change)
    with pytest.raises(ConfigError, match="rank 0 has 1 optimizers and rank 3 2"):
        common_state(open_source(str(tmp_path)), with_optimizer=True)


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, [(0, 0), (0, 1)]),
        ({"--pipeline-model-parallel-size": 2}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (
            {"--pipeline-model-parallel-size": 2, "--tensor-model-parallel-size": 1},
            [(0, 0), (1, 0)],
        ),
    ],
)
def test_random_numbers_are_those_of_each_model_parallel_rank(
    settings: dict[str, int], places: list[tuple[int, int]], tmp_path: Path
) -> None:
    found = list(rng_states(opened(tmp_path, identity(**settings))))
    assert [place for place, _, _ in found] == places
    assert set(found[0][2][0]) == {
        *("random_rng_state", "np_rng_state", "torch_rng_state"),
        *("cuda_rng_state", "rng_tracker_states"),
    }
