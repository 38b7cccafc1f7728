"""Rules on the flags that say in which precision state is kept."""

import pytest

from moe_ft.config.strategy import PARTS, PrecisionConfig
from moe_ft.errors import ConfigError
from moe_ft.format.packings import Packing

MIB = 1 << 20
LOSSY = [each for each in Packing if each.is_lossy]


def refusal(config: PrecisionConfig) -> str:
    """Return why settings are refused."""
    with pytest.raises(ConfigError) as raised:
        config.validate(world_size=4)
    return str(raised.value)


# Formats


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, {}),
        ("master=split", {"master": Packing.SPLIT}),
        ("exp_avg=bf16,exp_avg_sq=fp16", {"exp_avg": Packing.BF16, "exp_avg_sq": Packing.FP16}),
        (" exp_avg_sq=fp8-e5m2 , master=exact ", {"exp_avg_sq": Packing.E5M2}),
    ],
)
def test_parts_that_are_not_named_are_exact(text: str | None, named: dict[str, Packing]) -> None:
    exact = dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), Packing.EXACT)
    assert PrecisionConfig(state_dtype=text).packings == exact | named


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("", ""),
        ("bf16", "bf16"),
        ("exp_avg", "exp_avg"),
        ("exp_avg=", "exp_avg="),
        ("=bf16", "=bf16"),
        ("exp_avg=bf16,", ""),
        ("exp_avg=bf16,,master=split", ""),
        ("exp_avg=bf17", "exp_avg=bf17"),
        ("exp_avg=BF16", "exp_avg=BF16"),
        ("exp_avg = bf16", "exp_avg = bf16"),
        ("exp_avg=bf16=fp16", "exp_avg=bf16=fp16"),
        ("momentum=bf16", "momentum=bf16"),
        ("exp_avg:bf16", "exp_avg:bf16"),
        ("exp_avg=bf16,exp_avg=fp16", "exp_avg=fp16"),
        ("exp_avg=exact,exp_avg=exact", "exp_avg=exact"),
    ],
)
def test_list_that_cannot_be_read_is_refused_with_what_is_odd(text: str, odd: str) -> None:
    message = refusal(PrecisionConfig(state_dtype=text))
    assert message.startswith(
        f"--moe-ft-state-dtype={text}: '{odd}' must be PART=FORMAT, each part once"
    )


@pytest.mark.parametrize("part", ["exp_avg", "exp_avg_sq"])
def test_moments_cannot_be_split(part: str) -> None:
    message = refusal(PrecisionConfig(state_dtype=f"master=split,{part}=split"))
    assert message == (
        f"--moe-ft-state-dtype=master=split,{part}=split: only masters can be split, {part} has no "
        "bf16 weights to go with it. Choose another format for it."
    )


# Staging


@pytest.mark.parametrize(
    ("text", "staging"),
    [
        (None, 0),
        ("master=exact,exp_avg=exact", 0),
        ("master=split", 64 * MIB),
        ("exp_avg_sq=fp8-e4m3-block", 64 * MIB),
    ],
)
def test_state_is_packed_by_default_where_a_format_changes_it(
    text: str | None, staging: int
) -> None:
    assert PrecisionConfig(state_dtype=text).staging == staging


@pytest.mark.parametrize("state_dtype", [None, "master=split"])
@pytest.mark.parametrize(
    ("text", "staging"),
    [("1MiB", MIB), ("1048576", MIB), ("2.5MiB", 5 * MIB // 2), ("8GB", 8 * 10**9)],
)
def test_staging_that_is_given_is_used_for_exact_state_too(
    text: str, staging: int, state_dtype: str | None
) -> None:
    config = PrecisionConfig(state_dtype=state_dtype, staging_bytes=text)
    config.validate(world_size=4)
    assert config.staging == staging


@pytest.mark.parametrize("text", ["0", "1048575", "1000KiB", "1MB"])
def test_staging_of_less_than_a_mebibyte_is_refused(text: str) -> None:
    assert refusal(PrecisionConfig(staging_bytes=text)) == (
        f"--moe-ft-staging-bytes={text} must be at least 1MiB. Give more, or leave it out."
    )


# What is lost


def test_lossy_parts_are_named_with_their_formats() -> None:
    config = PrecisionConfig(state_dtype="master=split,exp_avg=bf16,exp_avg_sq=fp8-e4m3-block-pow2")
    assert config.lossy_parts == {"exp_avg": "bf16", "exp_avg_sq": "fp8-e4m3-block-pow2"}


@pytest.mark.parametrize("packing", LOSSY)
@pytest.mark.parametrize("part", PARTS)
def test_every_lossy_format_breaks_the_promise_of_an_exact_strategy(
    part: str, packing: Packing
) -> None:
    config = PrecisionConfig(state_dtype=f"{part}={packing.value}")
    with pytest.raises(ConfigError) as raised:
        config.check_is_exact("dense")
    assert str(raised.value) == (
        f"--moe-ft-state-dtype={part}={packing.value} loses precision, and --moe-ft-strategy=dense "
        "promises recoveries that are exact. Add --moe-ft-allow-lossy to give that up, or use exact or "
        "(for masters) split."
    )


# As a part of all settings


@pytest.mark.parametrize("packing", list(Packing))
def test_second_moments_without_range_or_scales_are_called_ruinous(packing: Packing) -> None:
    config = PrecisionConfig(state_dtype=f"exp_avg_sq={packing}")
    few = (Packing.FP16, Packing.E4M3, Packing.E5M2)
    assert config.is_ruinous == (packing in few)
    assert not PrecisionConfig(state_dtype=f"exp_avg={packing}").is_ruinous
