"""Rules on Megatron's arguments that need no job to be checked."""

import argparse
import importlib.metadata
import os
import subprocess
from pathlib import Path

import pytest
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.program.arguments import add_flags, config_from_arguments
from megatron.fault_tolerance.program.validation import check_arguments, settings_without_effect
from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.strategies.registry import option_types
from moe_ft.strategies.sparse.config import SparseConfig
from tests.demo_model import model_flags

PRESETS = Path(__file__).parents[4] / "examples" / "presets"


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = add_flags(megatron_arguments.add_megatron_arguments(parser))
    args = parser.parse_args([*model_flags(), "--transformer-impl", "local", *flags])
    args.world_size = 8
    return args


def test_flags_without_values_give_the_default_config() -> None:
    options = {name: type_() for name, type_ in option_types().items()}
    assert config_from_arguments(parse("--mock-data")) == MoeFtConfig(options=options)


def test_every_kind_of_flag_reaches_the_config() -> None:
    config = config_from_arguments(
        parse(
            *("--moe-ft-event-log", "DIR", "--moe-ft-state-digest"),
            *("--moe-ft-state-digest-interval", "3", "--moe-ft-fault-report-grace-s", "1.5"),
            *("--moe-ft-inject-fault", "kill:1@2", "--moe-ft-inject-fault", "hang:0@3"),
        )
    )
    assert config.observability.event_log == "DIR"
    assert config.observability.state_digest
    assert config.observability.state_digest_interval == 3
    assert config.fault.fault_report_grace_s == 1.5
    assert config.fault.inject_fault == ("kill:1@2", "hang:0@3")


@pytest.mark.parametrize(
    "flags",
    [
        ("--cuda-graph-impl", "full_iteration"),
        ("--optimizer-cuda-graph",),
        ("--use-megatron-fsdp",),
        ("--use-torch-fsdp2",),
        ("--optimizer", "muon"),
        ("--optimizer", "soap"),
        ("--optimizer-cpu-offload",),
        ("--num-distributed-optimizer-instances", "2"),
        ("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
        ("--moe-single-grouped-weight",),
        ("--hybrid-context-parallel",),
    ],
)
def test_unsupported_megatron_feature_is_refused_by_its_flag(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]}.* is not supported"):
        check_arguments(parse("--mock-data", *flags))


def test_untested_megatron_is_refused_with_the_tested_ones_and_the_override(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.0")
    with pytest.raises(ConfigError) as refusal:
        check_arguments(parse("--mock-data"))
    for words in (
        "megatron-core 0.20.0 is installed",
        "0.19.2",
        "--moe-ft-allow-untested-megatron",
    ):
        assert words in str(refusal.value)
    check_arguments(parse("--mock-data", "--moe-ft-allow-untested-megatron"))


def test_blend_of_weights_and_prefixes_is_checked_prefix_by_prefix(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="/nowhere/b: /nowhere/b.idx does not exist"):
        check_arguments(parse("--data-path", "0.3", "/nowhere/b"))


def test_local_experts_with_a_bias_are_refused() -> None:
    args = parse("--mock-data")
    args.add_bias_linear = True
    with pytest.raises(ConfigError, match="--transformer-impl=local needs --disable-bias-linear"):
        check_arguments(args)


def test_recomputing_layernorm_needs_transformer_engine() -> None:
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm")
    with pytest.raises(ConfigError, match="--recompute-modules layernorm needs the package"):
        check_arguments(parse("--mock-data", *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--cuda-graph-impl", "local"),
            "--cuda-graph-impl=local is not supported with --moe-ft-strategy=sparse: .* frozen units "
            "or not. Use --cuda-graph-impl none",
        ),
        (
            ("--qk-clip",),
            "--qk-clip is not supported with --moe-ft-strategy=sparse: .* Leave it out, or use dense",
        ),
        (
            ("--phase-transition-iterations", "2,4"),
            "--phase-transition-iterations=2,4 is not supported with --moe-ft-strategy=sparse: .* Use "
            "--moe-ft-strategy dense or partial",
        ),
    ],
)
def test_feature_that_a_replay_could_not_repeat_is_refused_with_sparse_windows(
    flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_arguments(parse("--mock-data", "--moe-ft-strategy", "sparse", *flags))


def test_graphs_that_hide_the_tokens_of_experts_are_refused_with_partial_snapshots() -> None:
    flags = ("--mock-data", "--moe-ft-strategy", "partial", "--cuda-graph-impl", "local")
    with pytest.raises(ConfigError, match="the tokens that a failure loses could not be counted"):
        check_arguments(parse(*flags))


def test_settings_of_sparse_windows_reach_the_config() -> None:
    config = config_from_arguments(
        parse(
            *("--mock-data", "--moe-ft-strategy", "sparse", "--moe-ft-window", "3"),
            *("--moe-ft-max-window", "5", "--moe-ft-unit-order", "soft-count"),
            *("--moe-ft-popularity-decay", "0.5", "--moe-ft-reorder-change", "0.2"),
            *("--moe-ft-reorder-fraction", "0.4"),
        )
    )
    assert config.strategy.strategy == "sparse"
    assert config.options["sparse"] == SparseConfig(
        window="3",
        max_window=5,
        unit_order="soft-count",
        popularity_decay=0.5,
        reorder_change=0.2,
        reorder_fraction=0.4,
    )


PARTIAL = ("--moe-ft-strategy", "partial")


@pytest.mark.parametrize(
    "given",
    [("--moe-ft-sharding", "adaptive"), ("--moe-ft-sharding=equal",), ("--moe-ft-sharding=none",)],
)
def test_sharding_that_the_distributed_optimizer_makes_void_is_warned_about(
    given: tuple[str, ...],
) -> None:
    flags = (*PARTIAL, *given)
    (line,) = settings_without_effect(parse(*flags), flags)
    sharding = given[-1].rpartition("=")[2]
    assert f"--moe-ft-sharding={sharding} changes nothing with --use-distributed-optimizer" in line


def test_sharding_that_was_not_given_or_is_used_is_not_warned_about() -> None:
    assert settings_without_effect(parse(*PARTIAL), PARTIAL) == []
    flags = (*PARTIAL, "--moe-ft-sharding", "adaptive")
    args = parse(*flags)
    args.use_distributed_optimizer = False
    assert settings_without_effect(args, flags) == []
    flags = ("--moe-ft-sharding", "equal")  # nothing is saved
    assert settings_without_effect(parse(*flags), flags) == []


@pytest.mark.parametrize("preset", ["checkfreq", "gemini", "moc", "moevement"])
def test_preset_has_no_flag_without_effect(preset: str) -> None:
    command = [str(PRESETS / f"{preset}.sh")]
    variables = {**os.environ, "PERSIST_DIR": "/somewhere"}
    printed = subprocess.run(command, env=variables, capture_output=True, check=True, text=True)
    flags = printed.stdout.split()
    args = parse(*flags)
    assert config_from_arguments(args).warnings(None) == []
    assert settings_without_effect(args, flags) == []
