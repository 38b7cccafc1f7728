"""Rules of the seams; program/test_validation.py tests them with those of the program, flag by flag."""

import pytest

from megatron.fault_tolerance.seams.refusals import SEAM_REFUSALS, check_refusals, check_yaml
from moe_ft.errors import ConfigError
from tests.unit.fault_tolerance.parsing import parse


@pytest.mark.parametrize("flag", ["--inprocess-restart", "--perform-rl-step"])
def test_feature_that_leaves_no_run_to_follow_is_refused_in_every_program(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is not supported: .* Leave it out"):
        check_refusals(parse("--mock-data", flag))


@pytest.mark.parametrize(
    "flag", ["--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"]
)
def test_iterations_are_not_skipped_with_virtual_stages(flag: str) -> None:
    skips = ("--mock-data", "--iterations-to-skip", "7")
    check_refusals(parse(*skips))
    with pytest.raises(ConfigError, match="--iterations-to-skip with virtual .* fails"):
        check_refusals(parse(*skips, flag, "2"))


def test_rules_of_the_seams_do_not_speak_of_a_program() -> None:
    texts = [f"{rule.reason} {rule.remedy}" for rule in SEAM_REFUSALS]
    assert [text for text in texts if "pretrain_gpt" in text] == []


@pytest.mark.parametrize("flags", [("--yaml-cfg", "x.yaml"), ("--yaml-cfg=x.yaml",)])
def test_settings_in_a_yaml_file_are_refused_because_no_flag_is_read(flags: tuple[str]) -> None:
    with pytest.raises(
        ConfigError, match="--yaml-cfg=x.yaml is not supported: Megatron then reads"
    ):
        check_yaml(["--lr", "1", *flags])
    check_yaml(["--lr", "1"])
