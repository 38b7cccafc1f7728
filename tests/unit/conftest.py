"""Settings of unit tests. No claim of theirs is one on time: cores may be slow or busy."""

import pytest
from hypothesis import HealthCheck, settings

from moe_ft import saying

settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _unstamped_lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the time and the rank of lines of moe_ft, but where lines are tested."""
    if request.module.__name__ != "tests.unit.moe_ft.test_saying":
        monkeypatch.setattr(saying, "stamp", lambda record: "")
