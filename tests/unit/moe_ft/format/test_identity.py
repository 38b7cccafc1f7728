"""Identities: their settings are compared."""

from moe_ft.format.identity import changed_settings, differing_settings, incomparable_settings


def test_settings_that_differ_are_described_and_those_that_one_side_lacks_are_named() -> None:
    ours, theirs = {"--a": 1, "--b": 2, "--d": 4}, {"--a": 1, "--b": 3, "--c": None}
    assert differing_settings(ours, theirs) == ["--b: 3 there, 2 now"]
    assert incomparable_settings(ours, theirs) == ["--c", "--d"]


def test_settings_that_were_changed_added_or_left_out_are_described() -> None:
    ours, theirs = {"--a": "1", "--b": "2", "--d": "4"}, {"--a": "1", "--b": "3", "--c": "None"}
    assert changed_settings(ours, theirs) == [
        "--b: 3 there, 2 now",
        "--c: None there, not given now",
        "--d: not given there, 4 now",
    ]
    assert changed_settings(ours, dict(ours)) == []
