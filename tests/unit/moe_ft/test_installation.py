"""Packages that are absent are named in one line, with the command that installs them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moe_ft
from megatron.fault_tolerance.seams.versions import check_oldest
from moe_ft import installation
from moe_ft.errors import ConfigError
from moe_ft.installation import MODULES, describe, missing_packages, remedy_for

ROOT = Path(__file__).parents[3]


def run_bare(*words: str, folder: Path) -> tuple[int, str]:
    """Run moe_ft with a Python that has no packages; return the exit code and what it printed."""
    found = subprocess.run(
        [sys.executable, "-S", "-m", "moe_ft", *words],
        env={"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return found.returncode, found.stdout + found.stderr


def test_packages_are_those_that_the_project_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[<>=\[]", each)[0] for each in project["dependencies"]}
    assert {*MODULES} == required


def test_page_on_installing_names_all_of_them_and_pins_versions_that_are_tested() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    assert [name for name in MODULES if f"`{name}`" not in page and f" {name}==" not in page] == [
        *("torch", "megatron-core")
    ]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert {*re.findall(r"[\w-]+==[\d.]*\d", page)} <= {*pinned}


def test_version_is_that_of_the_changelog_and_of_the_citation() -> None:
    assert f"\n## {moe_ft.__version__}, " in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {moe_ft.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_nothing_is_missing_where_the_tests_run() -> None:
    assert missing_packages() == []


def test_version_says_what_is_installed_and_where() -> None:
    first, python, torch, megatron, *_ = describe().splitlines()
    assert first == f"moe_ft {moe_ft.__version__} ({ROOT / 'moe_ft'})"
    assert sys.executable in python
    assert re.fullmatch(r"torch [\d.+a-z]+ \(.*/torch\)", torch)
    assert re.fullmatch(r"megatron-core \d+\.\d+\.\d+ \(.*/megatron/core\)", megatron)


@pytest.mark.parametrize("words", [["--version"], ["run", "train.py"], ["keep", "x"], ["report"]])
def test_python_without_packages_is_told_to_install_them(words: list[str], tmp_path: Path) -> None:
    code, said = run_bare(*words, folder=tmp_path)
    assert code == 2
    assert f"{sys.executable} -m pip install torch" in said
    assert "Put a checkout of Megatron-LM on PYTHONPATH" in said
    assert "Traceback" not in said


def test_package_that_is_missing_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "absent-package", "absent_package")
    assert missing_packages() == ["absent-package"]
    assert remedy_for(["absent-package"]).endswith("pip install absent-package.")


def test_folder_that_hides_megatron_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "megatron").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installation.hidden_megatron() == ""  # nothing is hidden by a folder without that file
    (tmp_path / "megatron" / "__init__.py").touch()
    for name in [each for each in sys.modules if each.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="megatron/__init__.py hides Megatron-LM: .*Rename it"):
        check_oldest()
