"""Windows are replayed only with the settings that they were made with."""

import pytest

from moe_ft.errors import ConfigError
from moe_ft.planning.recovery import Plan
from moe_ft.recovery.plan import check_replay
from moe_ft.recovery.verdict import Verdict
from tests.unit.moe_ft.recovery.starts import plans_of, site, start, versions_of, wish

SETTINGS = {"--clip-grad": 1.0, "--global-batch-size": 8}


def verdict() -> Verdict:
    return Verdict(site(), wish(), None)


def plan(window: int, replay_settings: str) -> Plan:
    history = (start(0, 0),)
    versions = versions_of(history, 7, window=window, replay_settings=replay_settings)
    (found,), _ = plans_of(versions)
    return found


MADE_WITH = '{"--clip-grad": 0.5, "--global-batch-size": 8}'


def test_window_of_a_run_with_other_settings_is_refused_with_them_and_both_remedies() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_replay(plan(3, MADE_WITH), SETTINGS, verdict())
    message = str(refusal.value)
    assert "iteration 7 is in a window of 3 snapshots" in message
    assert "--clip-grad: 0.5 there, 1.0 now" in message
    assert "--global-batch-size" not in message
    assert "--exit-interval" in message
    assert "--moe-ft-recover-from load" in message


def test_single_snapshot_is_recovered_with_any_settings() -> None:
    check_replay(plan(1, MADE_WITH), SETTINGS, verdict())


def test_window_is_recovered_with_the_settings_that_it_was_made_with() -> None:
    settings = {"--clip-grad": 0.5, "--global-batch-size": 8}
    check_replay(plan(3, MADE_WITH), settings, verdict())


def test_window_of_a_version_that_noted_fewer_settings_is_recovered_and_the_gap_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"--clip-grad": 0.5, "--global-batch-size": 8, "--moe-z-loss-coeff": 0.1}
    speaker = verdict()
    for _ in range(2):
        check_replay(plan(3, MADE_WITH), settings, speaker)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moe_ft: warning: the window of iteration 7 comes from another version")
    assert line.endswith("must be the same for an exact recovery: --moe-z-loss-coeff")
