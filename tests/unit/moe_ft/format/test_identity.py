"""Identities: their settings are compared."""

from moe_ft.format.identity import differing_settings, incomparable_settings


def test_settings_that_differ_are_described_and_those_that_one_side_lacks_are_named() -> None:
    ours, theirs = {"--a": 1, "--b": 2, "--d": 4}, {"--a": 1, "--b": 3, "--c": None}
    assert differing_settings(ours, theirs) == ["--b: 3 there, 2 now"]
    assert incomparable_settings(ours, theirs) == ["--c", "--d"]
