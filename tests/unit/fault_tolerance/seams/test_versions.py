"""Versions of Megatron: seams that fit, those that do not, and versions that are too old."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from megatron.training import training

from megatron.fault_tolerance.seams import versions
from megatron.fault_tolerance.seams.stack import Seam
from moe_ft.errors import ConfigError

ROOT = Path(__file__).parents[4]
THERE = "megatron.training.training"


@pytest.mark.versions
def test_every_seam_fits_the_installed_version() -> None:
    assert versions.installed_version() in versions.TESTED
    assert versions.check_seams() == []


@pytest.mark.parametrize(
    ("seam", "misfit"),
    [
        (Seam(module="megatron.nowhere", name="f"), "megatron.nowhere.f is not there"),
        (Seam(module=THERE, name="no_such_step"), f"{THERE}.no_such_step is not there"),
        (
            Seam(module=THERE, name="train_step", first=("data_iterator",)),
            "train_step begins with (forward_step_func) instead of (data_iterator)",
        ),
        (
            Seam(module=THERE, name="train_step", named=("iteration", "batch")),
            "train_step has no parameter batch",
        ),
        (Seam(module=THERE, name="train_step", named=("iteration",)), None),
    ],
)
def test_seam_says_what_does_not_fit(seam: Seam, misfit: str | None) -> None:
    assert seam.misfit() == misfit


def test_unknown_version_whose_seams_fit_is_accepted_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "TESTED", ("0.18.2",))
    (line,) = versions.check_seams()
    assert "is not one of 0.18.2, with which moe_ft is tested" in line


def test_version_whose_seams_do_not_fit_is_refused_with_all_of_them_unless_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(training, "dummy_train_step")
    monkeypatch.delattr(training, "evaluate")
    with pytest.raises(ConfigError) as refusal:
        versions.check_seams()
    (line,) = versions.check_seams(allow_misfit=True)
    for text in (str(refusal.value), line):
        assert f"{THERE}.dummy_train_step is not there; {THERE}.evaluate is not there" in text
    assert f"Install a tested version ({', '.join(versions.TESTED)})" in str(refusal.value)


def test_setting_that_a_version_lacks_has_its_meaning_and_no_other_name_has_one() -> None:
    assert versions.setting(Namespace(), "gtp_weight_remat_size") == 1
    assert versions.setting(Namespace(gtp_weight_remat_size=2), "gtp_weight_remat_size") == 2
    with pytest.raises(KeyError):
        versions.setting(Namespace(), "micro_batch_size")


def test_what_only_a_newer_version_has_is_none() -> None:
    assert versions.later("megatron.training.nowhere", "f") is None
    assert versions.later(THERE, "no_such_step") is None
    assert versions.later(THERE, "train_step") is training.train_step
    assert versions.later("megatron.training.training") is training


def test_name_of_a_parameter_is_the_first_that_the_function_has() -> None:
    assert versions.name_of_parameter(training.train_step, "step", "iteration") == "iteration"
    with pytest.raises(ConfigError, match="train_step has no parameter step or batch"):
        versions.name_of_parameter(training.train_step, "step", "batch")


@pytest.mark.parametrize("words", [("pretrain.py",), ("pretrain.py", "--moe-ft-strategy", "dense")])
def test_older_version_in_front_is_refused_in_one_line_before_it_is_imported(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    older = tmp_path / "older" / "megatron" / "core"
    older.mkdir(parents=True)
    (older / "__init__.py").write_text("raise AssertionError('imported')\n")
    (older / "package_info.py").write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\n")
    (tmp_path / "pretrain.py").write_text("raise AssertionError('run')\n")
    command = [sys.executable, "-m", "moe_ft", "run", str(tmp_path / words[0]), *words[1:]]
    paths = f"{tmp_path / 'older'}{os.pathsep}{ROOT}"
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "error: megatron-core 0.17.1 is used, and moe_ft needs 0.18 or newer. Install" in line


def test_module_that_is_there_and_lacks_something_else_is_not_taken_for_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        versions.later("broken_module")
