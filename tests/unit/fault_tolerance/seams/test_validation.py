"""Flags that the seams cannot work with are refused by flag, value, rule and remedy."""

import pytest
from megatron.core import package_info

from megatron.fault_tolerance.seams.validation import check_arguments, settings_without_effect
from moe_ft.errors import ConfigError
from tests.unit.fault_tolerance.parsing import parse

PARTIAL = ("--moe-ft-strategy", "partial")


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
    monkeypatch.setattr(package_info, "__shortversion__", "0.20.0")
    with pytest.raises(ConfigError) as refusal:
        check_arguments(parse("--mock-data"))
    for words in (
        "megatron-core 0.20.0 is used",
        "0.19.2",
        "--moe-ft-allow-untested-megatron",
    ):
        assert words in str(refusal.value)
    check_arguments(parse("--mock-data", "--moe-ft-allow-untested-megatron"))


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
