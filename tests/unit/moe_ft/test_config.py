"""Rules on --moe-ft-* values."""

from dataclasses import fields

import pytest

from moe_ft.config import FaultConfig, MoeFtConfig, ObservabilityConfig, StrategyConfig
from moe_ft.errors import ConfigError

LOG = ObservabilityConfig(event_log="events")


def test_defaults_are_valid() -> None:
    MoeFtConfig().validate(world_size=1)


def test_every_setting_has_a_default_and_a_help_text() -> None:
    for part in fields(MoeFtConfig):
        for setting in fields(type(getattr(MoeFtConfig(), part.name))):
            assert setting.metadata["help"]
            assert hasattr(getattr(MoeFtConfig(), part.name), setting.name)


def test_setting_names_are_unique_because_flags_are_made_from_them() -> None:
    names = [
        s.name for part in fields(MoeFtConfig) for s in fields(getattr(MoeFtConfig(), part.name))
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MoeFtConfig(observability=ObservabilityConfig(state_digest=True)),
            "--moe-ft-state-digest writes to the event log, and there is none",
        ),
        (
            MoeFtConfig(observability=ObservabilityConfig(state_digest_interval=5)),
            "--moe-ft-state-digest-interval writes to the event log",
        ),
        (
            MoeFtConfig(observability=ObservabilityConfig(state_digest_interval=-1)),
            "--moe-ft-state-digest-interval=-1 must be at least 0",
        ),
        (
            MoeFtConfig(fault=FaultConfig(inject_fault=("kill:0@1",))),
            "--moe-ft-inject-fault kill:0@1 needs the event log",
        ),
        (
            MoeFtConfig(fault=FaultConfig(inject_fault=("kill:4@1",)), observability=LOG),
            "rank 4 must be less than the world size 4. Name one of the ranks 0 to 3",
        ),
        (
            MoeFtConfig(fault=FaultConfig(fault_report_grace_s=-1.0)),
            "--moe-ft-fault-report-grace-s=-1.0 must be between 0 and 600",
        ),
        (
            MoeFtConfig(strategy=StrategyConfig(strategy="hope")),
            "--moe-ft-strategy=hope must be one of none",
        ),
    ],
)
def test_wrong_value_is_named_with_its_rule(config: MoeFtConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        config.validate(world_size=4)
