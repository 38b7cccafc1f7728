"""Model files for the batch script: sizes as published, flags that exist, comments that are true."""

import argparse
import contextlib
import io
import math
import os
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.program.arguments import REFUSALS, add_flags
from megatron.fault_tolerance.seams.refusals import check_refusals
from megatron.fault_tolerance.seams.settings import checked_config
from moe_ft.convert.huggingface.config_file import FAMILIES
from moe_ft.convert.huggingface.mapping import flags_of
from moe_ft.planning.report import megabytes
from moe_ft.strategies import registry
from moe_ft.units import UnitId, UnitKind
from tests.shares import share_of
from tests.unit.examples.model_files import (
    FOLDER,
    MODELS,
    ROOT,
    STRATEGIES,
    comment_of,
    gpu_memory,
    plan_of,
    read_model,
)
from tests.unit.moe_ft.convert.huggingface.models import PUBLISHED_V3
from tests.unit.moe_ft.convert.huggingface.test_settings import COMMON, PUBLISHED

GPU_BYTES = 80e9
TMPFS_BYTES = 1e12  # half of a node's 2 TB, as Linux makes /dev/shm
# In all and for a token, as their authors say; of DeepSeek-V3 without the layer for the second token.
SIZES = {
    "mixtral_8x7b": (46.7e9, 12.9e9),
    "deepseek_moe_16b": (16.4e9, 2.8e9),
    "qwen3_30b_a3b": (30.5e9, 3.3e9),
    "deepseek_v3": (671e9, 37e9),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral_8x7b": COMMON | PUBLISHED["mistralai/Mixtral-8x7B-v0.1"][0],
    "qwen3_30b_a3b": COMMON | PUBLISHED["Qwen/Qwen3-30B-A3B"][0],
    "deepseek_v3": PUBLISHED_V3,
}
# config.json has the balance of a model that is trained no more.
_OF_TRAINING = {"moe_router_load_balancing_type", "moe_aux_loss_coeff", "vocab_size"}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    plain = argparse.ArgumentParser(allow_abbrev=False)
    return add_flags(megatron_arguments.add_megatron_arguments(plain))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer Megatron's question about the kind of GPU."""
    kind = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: kind)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.parametrize("name", share_of(MODELS, "deepseek_moe_16b"))
def test_model_has_the_published_parameters(name: str) -> None:
    job = plan_of(name, "dense").job
    units: dict[UnitId, int] = {}
    for stage in job.stages:
        for shift in (number - stage.numbers[0] for number in stage.numbers):
            of_stage = ((unit, shift, count) for unit, count in stage.elements.items())
            units |= {
                replace(unit, layer=unit.layer + 1000 * each): count
                for unit, each, count in of_stage
                if unit.block != "mtp"
            }
    total = sum(units.values())
    experts = sum(count for unit, count in units.items() if unit.kind is UnitKind.EXPERT)
    expected, active = SIZES[name]
    assert total == pytest.approx(expected, rel=0.01)
    assert total - experts * (1 - job.model.active_share) == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize("name", CONFIGS)
def test_flags_are_those_of_the_published_model(name: str, parser: argparse.ArgumentParser) -> None:
    config = CONFIGS[name]
    published = parser.parse_args(flags_of(FAMILIES[config["model_type"]].settings(config)))
    ours = parser.parse_args(read_model(name).flags)
    default = parser.parse_args([])
    names = {
        key for key, value in vars(published).items() if value != getattr(default, key)
    } - _OF_TRAINING
    assert len(names) > 12
    assert {key: _same(getattr(ours, key)) for key in names} == {
        key: _same(getattr(published, key)) for key in names
    }


def _same(value: Any) -> Any:
    """Return a pattern of layers that are all alike as the number that says so."""
    return 1 if isinstance(value, list) and all(value) else value


@pytest.mark.parametrize("strategy", registry.names())
@pytest.mark.parametrize("name", MODELS)
def test_megatron_and_moe_ft_accept_the_flags(
    name: str, strategy: str, parser: argparse.ArgumentParser, hopper: None
) -> None:
    model = read_model(name, strategy)
    own = ("--moe-ft-persist-dir", "/persist") if strategy != "none" else ()  # as the batch script
    words = [*model.flags, "--data-path", "corpus", "--moe-ft-job-id", "test", *own]
    args = parser.parse_args(words)
    args.world_size, args.rank = model.world_size, 0
    checked_config(args, REFUSALS)
    with contextlib.redirect_stdout(io.StringIO()):
        megatron_arguments.validate_args(args)
    check_refusals(args, REFUSALS)
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0


@pytest.mark.parametrize("name", share_of(MODELS, "deepseek_moe_16b"))
def test_comment_says_what_plan_says(name: str) -> None:
    assert comment_of(name) in (FOLDER / f"{name}.sh").read_text()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", share_of(MODELS, "deepseek_moe_16b"))
def test_checkpoints_fit_into_a_node(name: str, strategy: str) -> None:
    plan = plan_of(name, strategy)
    assert megabytes(math.ceil(plan.node_bytes / 1e5) * 1e5) in plan.text
    assert plan.node_bytes < TMPFS_BYTES


@pytest.mark.parametrize("name", share_of(MODELS, "deepseek_moe_16b"))
def test_model_fits_into_a_gpu(name: str) -> None:
    assert (
        sum(gpu_memory(name)) < 0.75 * GPU_BYTES
    )  # NCCL, fragments, and routers out of balance need the rest


@pytest.mark.parametrize("strategy", ["dense", "sparse"])
@pytest.mark.parametrize("name", share_of(MODELS, "deepseek_moe_16b"))
def test_snapshots_cost_no_time_at_the_planned_bandwidths(name: str, strategy: str) -> None:
    text = plan_of(name, strategy).text
    assert "does NOT fit" not in text
    assert "too short" not in text
    assert "stall 0.000 s" in text or "stall: 0.000 s" in text


def test_values_from_outside_win() -> None:
    model = read_model("qwen3_30b_a3b", "partial", "NODES=8 K_SNAPSHOT=5 SEQ_LENGTH=128")
    assert model.num_nodes == 8
    assert "--moe-ft-k-snapshot 5" in " ".join(model.flags)
    assert "--seq-length 128" in " ".join(model.flags)


def test_unknown_strategy_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        read_model("mixtral_8x7b", "all")
    assert raised.value.returncode == 2
    assert "STRATEGY=all must be none, dense, sparse, partial or selective" in raised.value.stderr


@pytest.mark.parametrize("strategy", share_of(STRATEGIES, "sparse"))
def test_plan_of_a_model_file_is_printed(strategy: str) -> None:
    done = subprocess.run(
        [FOLDER / "plan.sh", "deepseek_moe_16b"],
        env={**os.environ, "STRATEGY": strategy, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = plan_of("deepseek_moe_16b", strategy).text.splitlines()
    assert set(expected) <= set(done.stdout.splitlines())
