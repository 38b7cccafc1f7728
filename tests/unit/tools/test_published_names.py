"""Transformer Engine and Apex have the names that moe_ft reads from them, and stand-ins have theirs."""

import inspect
import json
import subprocess
from pathlib import Path

import pytest

from moe_ft.state import fp8_state, slices
from tests.few_bits_adam import FewBitsAdam
from tests.unit.moe_ft.state.test_fp8_state import Linear
from tests.unit.source import ROOT
from tools.published_names import (
    APEX,
    APEX_COMMIT,
    RELIANCES,
    TRANSFORMER_ENGINE,
    VERSIONS,
    download,
    facts,
    known_facts,
    problems,
    read,
)

KNOWN = known_facts()
NEWEST = f"{TRANSFORMER_ENGINE} {VERSIONS[-1]}"


def found(where: str, pattern: str = "parameters", of: str = NEWEST) -> list[str]:
    fact = KNOWN[of][f"{where}: {pattern}"]
    assert fact is not None
    return fact[1]


@pytest.mark.parametrize("name", KNOWN)
def test_published_source_has_what_we_rely_on(name: str) -> None:
    assert problems(KNOWN[name]) == []


def test_facts_are_of_the_named_versions_and_of_all_that_we_rely_on() -> None:
    named = [f"{TRANSFORMER_ENGINE} {version}" for version in VERSIONS]
    assert set(KNOWN) == {*named, f"{APEX} {APEX_COMMIT}"}
    of_newest = [*KNOWN[NEWEST], *KNOWN[f"{APEX} {APEX_COMMIT}"]]
    assert of_newest == [each.name for each in RELIANCES]


def test_product_and_stand_ins_use_the_names_of_the_newest_version() -> None:
    made = inspect.signature(FewBitsAdam.initialize_state).parameters
    assert [*made] == found("FusedAdam.initialize_state")
    made = inspect.signature(Linear.init_fp8_meta_tensors).parameters
    assert [*made] == found("TransformerEngineBaseModule.init_fp8_meta_tensors")
    states = ("exp_avg", "exp_avg_sq", "master_param")
    (keys,) = (each for each in KNOWN[NEWEST] if "zero_buffer" in each)
    assert [*map(repr, states)] == found(*keys.split(": ", 1))
    assert {*slices._STATE_KEYS["adam"], slices.MASTER_KEYS[1]} == set(states)
    (keys,) = (
        each for each in KNOWN[NEWEST] if each.startswith("DelayedScalingRecipeState.__init")
    )
    made_tensors = {
        each.split(" ")[0].removeprefix("self.") for each in found(*keys.split(": ", 1))
    }
    assert (
        set(fp8_state._TENSORS) - {"scale_inv"} == made_tensors
    )  # older versions kept the inverse
    (keys,) = (each for each in KNOWN[NEWEST] if "scaling_" in each)
    assert {*map(repr, fp8_state._METAS)} <= set(found(*keys.split(": ", 1)))


def test_files_that_rely_on_something_exist() -> None:
    for each in RELIANCES:
        words = [word.strip(",.()") for word in each.used_by.split()]
        paths = [word for word in words if word.endswith(".py")]
        assert paths, each.used_by
        assert all((ROOT / path).is_file() for path in paths), paths


CHANGED = {
    "a further argument": ("(self, param, store", "(self, param, state_name, store"),
    "other names": ("store_param_remainders):", "keep_remainders):"),
    "no such function": ("def initialize_state", "def _initialize_all"),
    "another key": ("'exp_avg_sq', zero", "'exp_avg_square', zero"),
    "a further key": (
        "self.x(param, 'exp_avg', zero",
        "self.x(param, 'ema', zero_buffer=True)\n  self.x(param, 'exp_avg', zero",
    ),
}
ADAM = """
class FusedAdam:
 def initialize_state(self, param, store_param_remainders):
  self.x(param, 'exp_avg', zero_buffer=True)
  self.x(param, 'exp_avg_sq', zero_buffer=True)
  self.x(param, 'master_param', zero_buffer=False)
"""


@pytest.mark.parametrize("change", [None, *CHANGED])
def test_difference_says_what_to_change(change: str | None) -> None:
    text = ADAM.replace(*CHANGED[change]) if change else ADAM
    assert change is None or text != ADAM
    of_adam = [each for each in RELIANCES if each.places[0][1] == "FusedAdam.initialize_state"]
    told = [
        each.problem(read(each, lambda file: text if file.endswith("fused_adam.py") else None))
        for each in of_adam
    ]
    assert len(told) == 2
    assert any(told) == bool(change), told
    if change:
        assert any("moe_ft/state/slices.py relies on it" in each for each in told)


@pytest.mark.rest
@pytest.mark.parametrize("version", [*VERSIONS, None], ids=lambda version: version or "newest")
def test_registry_has_the_source_that_was_read(version: str | None, tmp_path: Path) -> None:
    try:
        name, source = download(tmp_path, version)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the package registry does not answer: {error.stderr[-300:]}")
    of_now = facts(TRANSFORMER_ENGINE, name, source)
    assert problems(of_now) == []
    if version:
        known = KNOWN[f"{TRANSFORMER_ENGINE} {version}"]
        assert json.loads(json.dumps(of_now)) == known
