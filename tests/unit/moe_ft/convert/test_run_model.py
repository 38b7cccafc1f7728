"""The model of a run: settings, facts, arguments, optimizer groups, random numbers as Megatron reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_ft.convert.run_model import (
    common_state,
    model_of_run,
    rng_states,
    uses_distributed_optimizer,
)
from moe_ft.convert.source import RunState, open_source
from moe_ft.errors import ConfigError
from moe_ft.files.storage import Storage
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.format.records import OptimizerRecord
from tests.unit.moe_ft.convert.models import ITERATION, OBJECT, identity, persist_model


def opened(folder: Path, who: Identity) -> RunState:
    """Return a checkpoint of a run with other settings."""
    persist_model(Storage(str(folder)), who=who)
    return open_source(str(folder))


def test_arguments_are_the_settings_of_the_run(source: RunState) -> None:
    args = common_state(source, with_optimizer=True)["args"]
    assert (args.num_layers, args.tensor_model_parallel_size) == (1, 2)
    assert (args.world_size, args.data_parallel_size) == (4, 2)
    assert (args.iteration, args.consumed_train_samples) == (ITERATION, 8 * ITERATION)
    assert not args.no_save_optim


def test_path_of_which_the_last_part_is_known_is_no_argument(tmp_path: Path) -> None:
    who = identity(**{"--tokenizer-model": "tokenizer.json", "--tokenizer-type": "Tik"})
    args = common_state(opened(tmp_path, who), with_optimizer=True)["args"]
    assert (args.tokenizer_type, hasattr(args, "tokenizer_model")) == ("Tik", False)


def test_distributed_optimizer_has_every_group_once_with_its_step(source: RunState) -> None:
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


def group(is_expert: bool, wd_mult: float = 1.0) -> dict[str, Any]:
    return {"is_expert_parallel": is_expert, "wd_mult": wd_mult}


def grouped(
    folder: Path, by_rank: Mapping[int, tuple[list[dict[str, Any]], ...]], ep: int
) -> RunState:
    """Return a run whose ranks have optimizers with these groups."""

    def change(index: Index) -> Index:
        (record,) = index.records
        found = by_rank.get(index.rank, by_rank[0])
        optimizers = tuple(
            OptimizerRecord(groups=tuple(groups), steps={"*": 4.0}) for groups in found
        )
        record = msgspec.structs.replace(record, optimizers=optimizers)
        return msgspec.structs.replace(index, records=(record,))

    who = identity(**{"--num-experts": 2, "--expert-model-parallel-size": ep})
    persist_model(Storage(str(folder)), who=who, change=change)
    return open_source(str(folder))


def groups_of(state: Mapping[str, Any]) -> list[tuple[bool, float]]:
    return [
        (each["is_expert_parallel"], each["wd_mult"]) for each in state["optimizer"]["param_groups"]
    ]


CHAINED = ([group(False), group(False, 0.0)], [group(True)])


def test_chained_optimizers_have_the_groups_of_all_stages(tmp_path: Path) -> None:
    # The first stage has no experts, and so only one optimizer.
    by_rank = {0: ([group(False)],), 3: CHAINED}
    found = common_state(grouped(tmp_path, by_rank, 2), with_optimizer=True)["optimizer"]
    assert groups_of(found[0]) == [(False, 1.0), (False, 0.0)]
    assert groups_of(found[1]) == [(True, 1.0)]


def test_one_optimizer_has_the_groups_of_both(tmp_path: Path) -> None:
    source = grouped(tmp_path, {0: CHAINED}, 2)
    found = common_state(source, with_optimizer=True, for_ep=1)["optimizer"]
    assert groups_of(found) == [(False, 1.0), (False, 0.0)]


def test_one_optimizer_becomes_two(tmp_path: Path) -> None:
    source = grouped(tmp_path, {0: CHAINED[:1]}, 1)
    found = common_state(source, with_optimizer=True, for_ep=4)["optimizer"]
    assert groups_of(found[0]) == [(False, 1.0), (False, 0.0)]
    assert groups_of(found[1]) == [(True, 1.0), (True, 0.0)]


def test_plain_optimizer_does_not_become_two(tmp_path: Path) -> None:
    source = opened(
        tmp_path, identity(**{"--use-distributed-optimizer": False, "--num-experts": 2})
    )
    with pytest.raises(ConfigError, match="--for-ep=2: the run had --expert-model-parallel-size 1"):
        common_state(source, with_optimizer=True, for_ep=2)


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


def test_settings_and_facts_are_those_of_the_run(source: RunState) -> None:
    model = model_of_run(source)
    assert model.settings["--num-layers"] == 1
    assert (model.facts["iteration"], model.facts["job_id"]) == (4, source.identity.job_id)


def test_random_numbers_belong_to_the_optimizer(source: RunState) -> None:
    model = model_of_run(source)
    whole = model.megatron_state(with_optimizer=True, for_ep=None)
    weights = model.megatron_state(with_optimizer=False, for_ep=None)
    assert (len(whole.rng), len(weights.rng), whole.master) == (2, 0, "param")
    assert OBJECT in weights.modules
