"""Parsing of --moe-ft-inject-fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import ConfigError
from moe_ft.faults import FAULT_PHASES, FaultKind, FaultSpec, FlipTarget, Phase, parse_fault

FAULTS = st.builds(
    FaultSpec,
    kind=st.sampled_from([each for each in FaultKind if each is not FaultKind.FLIP]),
    rank=st.integers(0, 10_000),
    iteration=st.integers(0, 10**9),
    phase=st.sampled_from(FAULT_PHASES),
) | st.builds(
    FaultSpec,
    kind=st.just(FaultKind.FLIP),
    rank=st.integers(0, 10_000),
    iteration=st.integers(1, 10**9),
    phase=st.just(Phase.FORWARD),
    target=st.sampled_from(FlipTarget),
    bit=st.none() | st.integers(0, 63),
)


@given(FAULTS)
def test_every_fault_parses_back_from_its_text(fault: FaultSpec) -> None:
    assert parse_fault(str(fault)) == fault


def test_phase_defaults_to_forward() -> None:
    assert parse_fault("kill:3@20") == FaultSpec(
        kind=FaultKind.KILL, rank=3, iteration=20, phase=Phase.FORWARD
    )


@pytest.mark.parametrize(
    "text", ["", "kill", "kill:3", "kill@3:20", "kill:-1@2", "kill:1@2:", "kill:x@2"]
)
def test_other_forms_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must have the form KIND:RANK@ITERATION\[:PHASE\]"):
        parse_fault(text)


@pytest.mark.parametrize("phase", ["setup", "between", "lunch"])
def test_phase_that_takes_no_faults_is_refused(phase: str) -> None:
    with pytest.raises(ConfigError, match=f"phase '{phase}' must be one of forward, backward"):
        parse_fault(f"kill:0@1:{phase}")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("flip:0@1", "the target '' of a flip must be one of weights, gradients"),
        ("flip:0@1:backward", "the target 'backward' of a flip must be one of"),
        ("flip:0@0:moment", "iteration 0 must be at least 1 for a moment"),
        ("kill:0@1:backward:3", "bit 3 must be one of a flip. Leave it out."),
    ],
)
def test_flip_without_something_to_flip_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"--moe-ft-inject-fault {text}: {rule}"):
        parse_fault(text)
