"""Building blocks of the settings: ranges in words, sizes, names of flags."""

import pytest

from moe_ft.config.fields import Bounds, parse_size, size_text
from moe_ft.config.strategy import StrategyConfig
from moe_ft.errors import ConfigError

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "rule"),
    [
        (Bounds(at_least=1), (1, 9, INFINITY), (0, -1, NAN), "must be at least 1"),
        (
            Bounds(above=0, below=1),
            (0.1, 0.9),
            (0, 1, NAN),
            "must be a fraction between 0 and 1",
        ),
        (
            Bounds(at_least=0, at_most=600),
            (0, 600),
            (-0.1, 601, NAN, INFINITY),
            "must be between 0 and 600",
        ),
        (
            Bounds(at_least=0, below=1),
            (0, 0.99),
            (-0.1, 1, NAN),
            "must be at least 0 and less than 1",
        ),
    ],
)
def test_range_contains_its_own_numbers_only_and_says_so_in_words(
    bounds: Bounds, inside: tuple[float, ...], outside: tuple[float, ...], rule: str
) -> None:
    assert all(bounds.contain(each) for each in inside)
    assert not any(bounds.contain(each) for each in outside)
    assert bounds.rule == rule


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("200GB", 200 * 10**9),
        ("512GiB", 512 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        (" 2KiB ", 2048),
        ("1TB", 10**12),
    ],
)
def test_size_is_read_in_powers_of_ten_or_two(text: str, num_bytes: int) -> None:
    assert parse_size("--size", text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.GiB", "1e9", "1 2", "0x10", "1PiB", "1iB"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--size=.* must be a size in bytes"):
        parse_size("--size", text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (300_000, "292.97 KiB"),
        (3 << 20, "3.00 MiB"),
        ((1 << 30) - 1, "1024.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 40, "1.00 TiB"),
        (1 << 52, "4096.00 TiB"),
    ],
)
def test_size_for_people_is_in_a_unit_that_fits(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(("text", "interval"), [("auto", None), ("1", 1), ("250", 250)])
def test_interval_is_a_number_or_automatic(text: str, interval: int | None) -> None:
    assert StrategyConfig(interval=text).interval_iterations == interval
