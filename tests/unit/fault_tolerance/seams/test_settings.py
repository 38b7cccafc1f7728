"""Flags become settings; no flag means that moe_ft is off."""

import argparse
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.seams.refusals import SEAM_REFUSALS, check_refusals, check_yaml
from megatron.fault_tolerance.seams.settings import (
    add_moe_ft_flags,
    check_arguments,
    check_experts,
    check_model,
    check_state_dtype,
    checked_config,
    config_from_arguments,
    is_off,
    lines_on_gpus,
    planned_iterations,
    void_settings,
)
from megatron.fault_tolerance.seams.stack import Seam
from moe_ft.cluster import member
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.strategy import PrecisionConfig
from moe_ft.config.untested import FEATURES
from moe_ft.errors import ConfigError
from moe_ft.strategies import registry
from moe_ft.strategies.registry import kind_of, option_types
from tests.unit.fault_tolerance.parsing import parse

PARTIAL = ("--moe-ft-strategy", "partial")
PRESETS = Path(__file__).parents[4] / "examples" / "presets"


def test_flags_without_values_give_the_default_config() -> None:
    options = {name: type_() for name, type_ in option_types().items()}
    assert config_from_arguments(parse("--mock-data")) == MoeFtConfig(options=options)


@pytest.mark.parametrize("preset", ["checkfreq", "gemini", "moc", "moevement", "symi", "lazarus"])
def test_preset_has_no_flag_without_effect(preset: str) -> None:
    command = [str(PRESETS / f"{preset}.sh")]
    variables = {**os.environ, "PERSIST_DIR": "/somewhere"}
    printed = subprocess.run(command, env=variables, capture_output=True, check=True, text=True)
    flags = printed.stdout.split()
    args = parse(*flags)
    args.train_iters = 1000
    assert void_settings(args, config_from_arguments(args), flags) == []


def test_moe_ft_is_off_without_flags_and_with_their_defaults() -> None:
    assert is_off(argparse.Namespace())
    assert is_off(parse("--mock-data"))
    assert is_off(parse("--mock-data", "--moe-ft-strategy", "none", "--moe-ft-keep", "2"))
    assert not is_off(parse("--mock-data", "--moe-ft-event-log", "DIR"))
    assert not is_off(parse("--mock-data", "--moe-ft-strategy", "dense"))


def test_settings_are_checked_without_the_model_and_then_with_it() -> None:
    flags = ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "5", "--moe-ft-job-id", "job")
    args = parse("--mock-data", *flags)
    config = checked_config(args)
    with pytest.raises(ConfigError, match="--moe-ft-k-snapshot=5 must be at most --num-experts=4"):
        check_model(args, config)
    args.num_experts = 8  # as a script may set it
    check_model(args, config)


@pytest.mark.parametrize(
    ("iterations", "samples", "batch", "planned"),
    [(7, None, None, 7), (None, 33, 16, 2), (None, 33, None, 0), (None, None, 16, 0)],
)
def test_length_of_the_run_is_known_from_iterations_or_samples(
    iterations: int | None, samples: int | None, batch: int | None, planned: int
) -> None:
    args = argparse.Namespace(
        train_iters=iterations, train_samples=samples, global_batch_size=batch
    )
    assert planned_iterations(args) == planned


def test_help_can_be_printed_whatever_percent_signs_other_flags_have() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", help="between 0% (none) and 100%")
    parser.add_argument("--rate", default=0.5, help="a rate, by default %(default)s")
    add_moe_ft_flags(parser)
    text = parser.format_help()
    assert "between 0% (none) and 100%" in text
    assert "by default 0.5" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "needs --moe-expert-capacity-factor: without one no token is dropped.*Leave it out"),
        (
            ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"),
            "cannot be used with --moe-pad-expert-input-to-capacity: all inputs.*Leave one",
        ),
    ],
)
def test_capacity_that_no_expert_may_exceed_is_not_raised(
    flags: tuple[str, ...], message: str
) -> None:
    job = ("--mock-data", "--moe-ft-strategy", "partial", "--moe-ft-job-id", "test", *flags)
    with pytest.raises(ConfigError, match=f"--moe-ft-capacity-boost=0.1 {message}"):
        checked_config(parse(*job, "--moe-ft-capacity-boost", "0.1"))
    checked_config(parse(*job))


def test_log_of_what_crosses_stages_needs_stages() -> None:
    flags = (
        "--mock-data",
        "--moe-ft-upstream-log",
        "--moe-ft-strategy",
        "dense",
        "--moe-ft-job-id",
        "test",
    )
    with pytest.raises(
        ConfigError,
        match="--moe-ft-upstream-log needs pipeline stages: with --pipeline-model-parallel-size=1 nothing",
    ):
        checked_config(parse(*flags))
    args = parse(*flags, "--pipeline-model-parallel-size", "2")
    args.world_size = 2
    assert checked_config(args).memory.upstream_log


@pytest.mark.parametrize(
    "flags",
    [
        ("--use-megatron-fsdp",),
        ("--fp8-param-gather", "--fp8-recipe", "custom", "--moe-ft-strategy", "dense"),
    ],
)
def test_unsupported_value_or_combination_is_refused_by_its_flag(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]}.* is not supported"):
        check_arguments(parse("--mock-data", *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--cuda-graph-impl", "full_iteration", "--moe-ft-allow-untested", "cuda-graphs"),
            "--cuda-graph-impl full_iteration is not supported with --moe-ft-strategy=sparse: .* as it was "
            "captured. Use graphs of layers .*, or dense, partial or selective",
        ),
        (
            ("--qk-clip",),
            "--qk-clip is not supported with --moe-ft-strategy=sparse: .* Leave it out, or use dense",
        ),
        (
            ("--phase-transition-iterations", "2,4"),
            "--phase-transition-iterations=2,4 is not supported with --moe-ft-strategy=sparse: .* Use "
            "--moe-ft-strategy dense, partial or selective",
        ),
    ],
)
def test_feature_that_a_replay_could_not_repeat_is_refused_with_sparse_windows(
    flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_arguments(parse("--mock-data", "--moe-ft-strategy", "sparse", *flags))


GRAPHS = ("--moe-ft-allow-untested", "cuda-graphs", "--cuda-graph-impl")


@pytest.mark.parametrize("strategy", ["dense", "partial", "selective", "sparse"])
@pytest.mark.parametrize("graphs", ["local", "transformer_engine", "full_iteration"])
def test_graphs_are_used_with_the_permission_but_for_those_of_whole_iterations_where_some_run_again(
    strategy: str, graphs: str
) -> None:
    args = parse("--mock-data", "--moe-ft-strategy", strategy, *GRAPHS, graphs)
    if (strategy, graphs) == ("sparse", "full_iteration"):
        with pytest.raises(ConfigError, match="full_iteration is not supported"):
            check_refusals(args)
    else:
        check_refusals(args)
    args.moe_ft_allow_untested = None
    with pytest.raises(ConfigError, match="--cuda-graph-impl"):
        check_refusals(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--moe-ft-strategy", "partial", *GRAPHS, "local", "--moe-ft-capacity-boost", "0.1"),
            "--cuda-graph-impl with --moe-ft-capacity-boost .* the capacity that it was captured with",
        ),
        (
            (
                *("--moe-ft-strategy", "dense", *GRAPHS, "transformer_engine"),
                *("--fp8-format", "hybrid", "--cuda-graph-warmup-steps", "0"),
            ),
            "--fp8-recipe delayed .* Give --cuda-graph-warmup-steps 1, or another recipe",
        ),
    ],
)
def test_graph_that_would_keep_what_a_recovery_changes_is_refused(
    flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_refusals(parse("--mock-data", *flags))


BF16_MOMENTS = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--fp8-recipe", "custom"), "--fp8-recipe custom is not supported"),
        (("--fp16",), "--fp16 is not supported .* Use --bf16"),
        (BF16_MOMENTS, "Transformer Engine's optimizer then keeps the masters"),
        (
            (*BF16_MOMENTS, "--fp8-recipe", "mxfp8", "--main-params-dtype", "fp16"),
            "Transformer Engine's optimizer then keeps the masters",
        ),
    ],
)
def test_fp8_parameters_are_refused_where_masters_alone_do_not_make_them(
    flags: tuple[str, ...], message: str
) -> None:
    fp8 = ("--mock-data", "--moe-ft-strategy", "sparse", "--fp8-param-gather")
    for others in ((), ("--fp8-recipe", "blockwise", *BF16_MOMENTS)):
        check_refusals(parse(*fp8, *others))
    with pytest.raises(ConfigError, match=f"--fp8-param-gather with .*{message}"):
        check_refusals(parse(*fp8, *flags))


def test_masters_of_fp8_parameters_are_not_split() -> None:
    args = parse("--mock-data", "--bf16", "--fp8-param-gather", "--fp8-recipe", "mxfp8")
    with pytest.raises(ConfigError, match="forward uses no BF16 weights"):
        check_state_dtype(args, PrecisionConfig(state_dtype="master=split"))


@pytest.mark.parametrize(
    "flag", ["--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"]
)
def test_iterations_are_not_skipped_with_virtual_stages(flag: str) -> None:
    skips = ("--mock-data", "--iterations-to-skip", "7")
    check_refusals(parse(*skips))
    with pytest.raises(ConfigError, match="--iterations-to-skip with virtual .* fails"):
        check_refusals(parse(*skips, flag, "2"))


def test_rules_of_the_seams_do_not_speak_of_a_program() -> None:
    texts = [f"{rule.reason} {rule.remedy}" for rule in SEAM_REFUSALS]
    assert [text for text in texts if "pretrain_gpt" in text] == []


@pytest.mark.parametrize("flags", [("--yaml-cfg", "x.yaml"), ("--yaml-cfg=x.yaml",)])
def test_settings_in_a_yaml_file_are_refused_because_no_flag_is_read(flags: tuple[str]) -> None:
    with pytest.raises(
        ConfigError, match="--yaml-cfg=x.yaml is not supported: Megatron then reads"
    ):
        check_yaml(["--lr", "1", *flags])
    check_yaml(["--lr", "1"])


def void(*flags: str, **changes: object) -> list[str]:
    """Return the lines about settings that change nothing."""
    args = parse(*flags)
    vars(args).update(changes)
    return void_settings(args, config_from_arguments(args), flags)


def test_sharding_that_was_given_and_that_the_distributed_optimizer_makes_void_is_warned_about() -> (
    None
):
    for sharding in ("adaptive", "none"):
        (line,) = void(*PARTIAL, f"--moe-ft-sharding={sharding}")
        assert f"--moe-ft-sharding={sharding} changes nothing with --use-distributed-opt" in line
    assert void(*PARTIAL) == []
    assert void(*PARTIAL, "--moe-ft-sharding", "adaptive", use_distributed_optimizer=False) == []


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: False)
    monkeypatch.setattr(member, "_own", None)


DENSE = ("--mock-data", "--moe-ft-strategy", "dense", "--moe-ft-job-id", "job")
REPAIRED = ("--moe-ft-repair", "auto")
SHARED = (*REPAIRED, "--moe-ft-without-spare", "share")


@pytest.mark.parametrize(
    ("flags", "value", "given"),
    [
        (REPAIRED, "repair", "--moe-ft-repair=auto"),
        (SHARED, "repair,sharing", "--moe-ft-without-s"),
    ],
)
@pytest.mark.usefixtures("on_gpus")
def test_what_has_not_run_on_gpus_is_refused_there_unless_it_is_allowed(
    flags: tuple[str, ...], value: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, _, last = value.rpartition(",")
    few = ("--moe-ft-allow-untested", allowed) if allowed else ()
    message = (
        f"^{given}.* is refused on GPUs: it has never run on one. Leave .*untested {last} .docs/"
    )
    with pytest.raises(ConfigError, match=message):
        checked_config(parse(*DENSE, *flags, *few))
    checked_config(parse(*DENSE, *flags, "--moe-ft-allow-untested", value))
    monkeypatch.setattr(cpu_device, "is_active", lambda: True)
    checked_config(parse(*DENSE, *flags))


@pytest.mark.usefixtures("on_gpus")
def test_leave_that_changes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = "--moe-ft-allow-untested=repair,sharing,cuda-graphs"
    args = parse(*DENSE, *SHARED, "--cuda-graph-impl", "local", allowed)
    config = config_from_arguments(args)
    assert void_settings(args, config, ()) == []
    monkeypatch.setattr(cpu_device, "is_active", lambda: True)
    lines = void_settings(args, config, ())
    assert [line.split(":")[0] for line in lines] == [
        f"--moe-ft-allow-untested={value} changes nothing" for value in ("repair", "sharing")
    ]
    assert len(void("--mock-data", allowed)) == 3
    monkeypatch.setattr(Seam, "misfit", lambda seam: "it is not there")
    assert void("--mock-data", "--moe-ft-allow-untested=megatron") == []


@pytest.mark.usefixtures("on_gpus")
def test_start_on_gpus_says_what_of_the_run_has_been_seen_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def line(*flags: str, num_local: int) -> list[str]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local))
        args = parse("--mock-data", "--distributed-backend", "gloo", *flags)
        return lines_on_gpus(config_from_arguments(args), args, args.world_size)

    written = "on GPUs, written and never seen on one: "
    alone = ("--moe-ft-strategy", "dense", "--moe-ft-state-dtype", "master=split")
    stock = ("--distributed-backend", "nccl", "--moe-token-dispatcher-type", "flex")
    assert line(*alone, *stock, num_local=8) == [
        f"{written}strategy dense, packed snapshots, NCCL, flex dispatcher (docs/gpus.md)"
    ]
    sparse = (*DENSE, "--moe-ft-strategy", "sparse", *REPAIRED, "--moe-ft-breakpoints")
    (found,) = line(*sparse, num_local=4)
    assert found == (
        f"{written}strategy sparse, replicas, breakpoints, repair in place (docs/gpus.md)"
    )
    assert line(num_local=4) == [], "nothing of moe_ft is used"
    kind: Any = kind_of("dense")
    dense = replace(kind, seen_on_gpu="2027-01-01, H100")
    monkeypatch.setattr(registry, "kind_of", lambda name: dense)
    (found,) = line(*alone, num_local=8)
    assert found == (
        "on GPUs, seen on one: strategy dense; written and never seen on one: packed snapshots (docs/gpus.md)"
    )
    monkeypatch.setattr(cpu_device, "is_active", lambda: True)
    assert line(*sparse, num_local=4) == []


def test_features_have_settings_that_exist() -> None:
    facts = {"has_replicas", "is_packed", "is_kept"}
    assert {each.setting for each in FEATURES} <= {*vars(parse("--mock-data"))} | facts


def test_expert_parallelism_without_experts_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--expert-model-parallel-size=2 needs a model with expe.*Add"
    ):
        check_experts(None, 2, 1)
    check_experts(None, 1, 2)
