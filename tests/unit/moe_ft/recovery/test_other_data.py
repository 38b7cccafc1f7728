"""State that has seen other data is refused; a flag allows it where no iteration runs again."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_ft.errors import ConfigError
from moe_ft.format.identity import CONTENTS, Identity
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.look import Found
from moe_ft.recovery.meet import Met
from moe_ft.recovery.notices import Notices
from moe_ft.recovery.plan import check_plan
from tests.unit.moe_ft.builders import make_identity
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, initialized, met_alone
from tests.unit.moe_ft.recovery.starts import plans_of, site, start, versions_of, wish

BEFORE, OTHER = "7 documents, 900 tokens of uint16", "8 documents, 950 tokens of uint16"


def reading(name: str, content: str, **flags: list[str]) -> dict[str, Any]:
    """Return the settings of a run with one data set; of a version that knows no contents without."""
    words = {"--data-path": [f"{name}: {content}"], **flags}
    return {"--data-path": [name]} | ({CONTENTS: words} if content else {})


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Met]:
    with initialized(), ExitStack() as opened:
        yield met_alone(config_of(tmp_path), facts_of(), opened)


def check(met: Met, there: dict[str, Any], now: dict[str, Any], data: str, window: int = 1) -> None:
    """Check a start on state of another one."""
    met = replace(
        met,
        fingerprint=now,
        config=replace(met.config, recovery=replace(met.config.recovery, data=data)),
    )
    history = (start(0, 0),)
    identity: Identity = msgspec.structs.replace(
        make_identity(), history=history, fingerprint=there
    )
    inventory = Inventory()
    inventory.add_identity("storage", identity)
    inventory.versions += versions_of(history, 7, window=window, replay_settings="{}")
    (plan,), _ = plans_of(inventory.versions)
    found = Found(inventory=inventory, wish=wish(), failed={})
    check_plan(plan, found, met, Notices(site(), wish(), None))


def test_other_text_of_the_same_name_is_refused_and_allowed_by_a_flag_and_said(
    met: Met, capsys: pytest.CaptureFixture[str]
) -> None:
    there, now = reading("text", BEFORE), reading("text", OTHER)
    with pytest.raises(
        ConfigError, match="--data-path text: 7 documents.* there, .*8 doc"
    ) as found:
        check(met, there, now, "same")
    assert "add --moe-ft-data any" in str(found.value)
    check(met, there, now, "any")
    line = f"continuing with other data: --data-path text: {BEFORE} there, text: {OTHER} now"
    assert line in capsys.readouterr().err


def test_other_data_are_not_put_under_iterations_that_run_again(met: Met) -> None:
    there, now = reading("text", BEFORE), reading("text", OTHER)
    with pytest.raises(ConfigError, match="runs iterations again.*--data-path text") as found:
        check(met, there, now, "any", window=3)
    assert "--exit-interval" in str(found.value)
    check(met, there, there, "any", window=3)


def test_other_model_is_not_allowed_by_the_flag_for_data(met: Met) -> None:
    there, now = reading("text", BEFORE), reading("text", OTHER)
    with pytest.raises(ConfigError, match="--hidden-size: 64 there, 32 now") as found:
        check(met, there | {"--hidden-size": 64}, now | {"--hidden-size": 32}, "any")
    assert "--moe-ft-data" not in str(found.value)


def test_state_of_a_version_that_knew_no_contents_is_taken_with_a_line(
    met: Met, capsys: pytest.CaptureFixture[str]
) -> None:
    check(met, reading("text", ""), reading("text", BEFORE), "same")
    assert f"must be the same for an exact recovery: {CONTENTS}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--data-path"):  # names are compared as before
        check(met, reading("text", ""), reading("code", BEFORE), "same")


def test_data_of_evaluations_may_change_and_that_is_said(
    met: Met, capsys: pytest.CaptureFixture[str]
) -> None:
    there = reading("text", BEFORE, **{"--valid-data-path": ["a: 1 documents"]})
    now = reading("moved", BEFORE, **{"--valid-data-path": ["a: 2 documents"]})
    check(met, there, now, "same", window=3)
    line = "other data: --valid-data-path a: 1 documents there, a: 2 documents now"
    assert line in capsys.readouterr().err


def test_contents_that_are_no_words_are_those_of_nobody(met: Met) -> None:
    now = reading("text", BEFORE)
    for strange in (7, ["text"], {"--data-path": {"a": 1}}, {"--data-path": [b"x"]}):
        check(met, {"--data-path": ["text"], CONTENTS: strange}, now, "same")
