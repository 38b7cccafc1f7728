"""Settings of Bridge that a start refuses, in the words of its configuration."""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import starmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
from megatron.bridge.models.t5_provider import T5ModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import (
    ConfigContainer,
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
    TensorInspectConfig,
)
from megatron.bridge.training.state import TrainState

from megatron.fault_tolerance.bridge.refusals import (
    check_bridge,
    check_overrides,
    in_words_of_bridge,
    problems,
)
from megatron.fault_tolerance.bridge.view import BridgeArgs
from megatron.fault_tolerance.degraded import rules as played
from megatron.fault_tolerance.repair import renewals
from megatron.fault_tolerance.repair import rules as repair
from megatron.fault_tolerance.seams.refusals import SCRIPT_REFUSALS, refused
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.errors import ConfigError
from tests.bridge.tiny_job import tiny_config

Change = Callable[[ConfigContainer], object]


def _set(path: str, value: Any) -> Change:
    """Return a function that sets a field."""
    *sections, name = path.split(".")

    def change(config: Any) -> None:
        for each in sections:
            config = getattr(config, each)
        setattr(config, name, value)

    return change


def _view(config: ConfigContainer, *words: str) -> BridgeArgs:
    state = SimpleNamespace(train_state=TrainState())
    return BridgeArgs(config, state, ["--moe-ft-strategy", "dense", *words])


@pytest.fixture
def config() -> ConfigContainer:
    return tiny_config()


def test_job_without_such_settings_is_accepted(config: ConfigContainer) -> None:
    check_bridge(config, _view(config, "--moe-ft-without-spare", "crowd"))


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (_set("model", object.__new__(Qwen3VLModelProvider)), "model=Qwen3VLModelProvider"),
        (_set("model", object.__new__(T5ModelProvider)), "model=T5ModelProvider"),
        (_set("model.restore_modelopt_state", True), "model.restore_modelopt_state"),
        (_set("peft", LoRA()), "peft=LoRA"),
        (_set("dist.use_decentralized_pg", True), "dist.use_decentralized_pg"),
        (_set("dist.eval_context_parallel_size", 2), "dist.eval_context_parallel_size=2"),
        (_set("train.num_epochs", 1.5), "train.num_epochs=1.5"),
        (_set("dataset.dataloader_type", "external"), "dataset.dataloader_type=external"),
        (
            _set("checkpoint.non_persistent_ckpt_type", "local"),
            "checkpoint.non_persistent_ckpt_type=local",
        ),
    ],
)
def test_setting_of_bridge_is_refused_by_its_name_and_value(
    change: Change, given: str, config: ConfigContainer
) -> None:
    change(config)

    (problem,) = problems(config, _view(config))

    assert problem.startswith(f"{given} is not supported under Megatron-Bridge: ")
    with pytest.raises(ConfigError, match=given):
        check_bridge(config, _view(config))


@pytest.mark.parametrize(
    "words",
    [("--moe-ft-elastic",), *(("--moe-ft-without-spare", each) for each in ("share", "reroute"))],
    ids=lambda each: each[0],
)
def test_feature_that_needs_the_loop_of_megatron_lm_is_refused(
    words: tuple[str, ...], config: ConfigContainer
) -> None:
    with pytest.raises(ConfigError, match=f"{'='.join(words)} is not supported"):
        check_bridge(config, _view(config, *words))


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (
            _set("inprocess_restart", InProcessRestartConfig(enabled=True)),
            "inprocess_restart.enabled=true",
        ),
        (_set("ddp.use_megatron_fsdp", True), "ddp.use_megatron_fsdp=true"),
        (_set("model.cuda_graph_impl", "full_iteration"), "model.cuda_graph_impl=full_iteration"),
        (_set("optimizer.optimizer_cuda_graph", True), "optimizer.optimizer_cuda_graph=true"),
    ],
)
def test_rule_on_a_flag_of_megatron_names_the_field(
    change: Change, given: str, config: ConfigContainer
) -> None:
    change(config)

    messages = [
        in_words_of_bridge(each, config) for each in refused(_view(config), SCRIPT_REFUSALS)
    ]

    assert [each for each in messages if each.startswith(given)], messages


def test_whole_batches_are_refused_where_iterations_run_again(config: ConfigContainer) -> None:
    _set("dataset.dataloader_type", "batch")(config)
    assert not [*problems(config, _view(config))]

    (message,) = problems(config, _view(config, "--moe-ft-strategy", "sparse"))

    assert message.startswith("dataset.dataloader_type=batch is not supported with")


def _member() -> Member:
    return Member(Assignment(rank=0, local_rank=0, world_size=2, node=""))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("ft", FaultToleranceConfig(enable_ft_package=True)), "ft.enable_ft_package"),
        (
            _set("nvrx_straggler", NVRxStragglerDetectionConfig(enabled=True)),
            "nvrx_straggler.enabled",
        ),
        (_set("tensor_inspect", TensorInspectConfig(enabled=True)), "tensor_inspect.enabled"),
        (_set("checkpoint.async_save", True), "checkpoint.async_save=true"),
        (_set("dataset.dataloader_type", "batch"), "dataset.dataloader_type batch"),
    ],
)
def test_setting_that_no_repair_allows_is_refused_with_repairs(
    change: Change, named: str, config: ConfigContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    repair.check_job_is_repairable(_view(config), _member(), "asked", on_gpus=True)
    change(config)

    with pytest.raises(ConfigError) as caught:
        repair.check_job_is_repairable(_view(config), _member(), "asked", on_gpus=True)

    assert f"asked does not work with {named}: " in in_words_of_bridge(str(caught.value), config)


def test_script_that_has_made_process_groups_gets_no_repairs(
    config: ConfigContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = _view(config)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="process groups of the script's own"):
        repair.check_job_is_repairable(args, _member(), "asked", on_gpus=False)


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("moe_ft.strategy=dense", "--moe-ft-strategy"),
        ("+moe_ft.persist_dir=/data", "--moe-ft-persist-dir"),
        ("++moe_ft=dense", "--moe-ft-strategy"),
    ],
)
def test_override_that_bridge_would_ignore_is_refused(word: str, flag: str) -> None:
    check_overrides(["train.py", "model.num_layers=2", "logger.tag=moe_ft", "--moe-ft-strategy"])
    with pytest.raises(ConfigError, match=f"would be ignored.*{flag} as a flag"):
        check_overrides(["train.py", word])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Add --bf16, or use", "Add mixed_precision=bf16_mixed, or use"),
        ("--optimizer=soap with --save=/x", "optimizer.optimizer=soap with checkpoint.save=/x"),
        ("Use --optimizer adam with", "Use optimizer.optimizer=adam with"),
        ("Give --eval-iters 0.", "Give validation.eval_iters=0."),
        ("add --disable-gloo-process-groups", "add dist.use_gloo_process_groups=false"),
        ("--num-experts=3 must be", "model.num_moe_experts=3 must be"),
        (
            "save: --exit-signal-handler --exit-signal SIGUSR1",
            "save: train.exit_signal_handler=true train.exit_signal=10",
        ),
        (
            "--moe-ft-interval 4 and --ranks-per-node 8",
            "--moe-ft-interval 4 and --ranks-per-node 8",
        ),
    ],
)
def test_flags_of_megatron_become_fields(text: str, expected: str, config: ConfigContainer) -> None:
    assert in_words_of_bridge(text, config) == expected


_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*\w")
# Flags that no field stands for: no configuration of Bridge breaks a rule on them, but with newer Megatrons.
_WITHOUT_FIELD = {
    *("--chunked-optimizer-state-offload", "--offload-optimizer-states"),
    *("--disable-param-buffers-cpu-backup", "--dynamic-context-parallel"),
    *("--fake-process-group", "--perform-rl-step", "--phase-transition-iterations", "--yaml-cfg"),
    "--max-restarts",  # of torchrun
}


def _texts() -> Iterator[str]:
    for rule in (*SCRIPT_REFUSALS, *played._RULES):
        yield rule.message(Namespace())
    yield from starmap(repair.flag_in, (*repair._RULES, *repair._RULES_ON_GPUS))
    yield from (each.what for each in renewals.RENEWALS)


def test_texts_of_all_rules_name_fields(config: ConfigContainer) -> None:
    texts = [in_words_of_bridge(text, config) for text in _texts()]
    found = {flag for text in texts for flag in _FLAG.findall(text)}

    left = {flag for flag in found if not flag.startswith("--moe-ft-")}
    assert left == _WITHOUT_FIELD
