"""The wheel in an environment of its own, and another version of Megatron in front of the tested one.

Both run the example whose script knows nothing of moe_ft. A rank is killed, and the job continues.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import megatron.core
import pytest

from megatron.fault_tolerance.seams.versions import RECOMMENDED

ROOT = Path(__file__).resolve().parents[2]
# tools/make_venv.sh installs it.
OTHER_VERSION = ROOT / ".venv" / "megatron" / "0.18.2"
_IN_THE_WHEEL = ("moe_ft", "megatron", "examples", "tools")
_FILES = ("pretrain_gpt_moe.py", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def run_example(script: Path, folder: Path, env: Mapping[str, str]) -> str:
    """Run examples/own_script.sh with a killed rank to its end; return what it printed.

    Args:
        folder: for its files.
        env: variables besides those of this process.
    """
    memory = folder / "memory"
    memory.mkdir()
    flags = [
        "--train-iters",
        "24",
        "--moe-ft-memory-dir",
        str(memory),
        "--moe-ft-repair",
        "off",
    ]
    variables = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "STRATEGY": "dense",
        "RUN_DIR": str(folder / "run"),
        "CUDA_VISIBLE_DEVICES": "",
        **env,
    }
    result = subprocess.run(
        [str(script), *flags],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


def check_recovered(output: str, folder: Path, version: str) -> None:
    """Check that the job ran on a version of Megatron, was killed, continued from memory and ended."""
    found = re.search(
        r"training continues after iteration (\d+), whose state comes from memory", output
    )
    assert found is not None and found[1] in ("19", "20"), output[-4000:]
    lines = (folder / "run" / "events" / "rank_00000.jsonl").read_text().splitlines()
    starts = [line for line in map(json.loads, lines) if line["event"] == "start"]
    assert [line["megatron"] for line in starts] == [version, version]


def test_job_on_another_version_of_megatron_recovers(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(OTHER_VERSION)}
    output = run_example(ROOT / "examples" / "own_script.sh", tmp_path, env)
    check_recovered(output, tmp_path, OTHER_VERSION.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """An environment with the wheel, next to a folder of Megatron-LM."""

    python: Path
    packages: Path
    megatron: Path

    def run(self, *words: str, folder: Path) -> str:
        """Run moe_ft; return what it printed."""
        return subprocess.run(
            [str(self.python), "-W", "ignore", "-m", "moe_ft", *words],
            env={**os.environ, "PYTHONPATH": str(self.megatron)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install a wheel as docs/install.md says: without what it requires, which is there already."""
    folder = tmp_path_factory.mktemp("installed")
    source, environment, megatron_lm = folder / "source", folder / "venv", folder / "Megatron-LM"
    source.mkdir()
    for name in _IN_THE_WHEEL:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # It takes a checkout on PYTHONPATH for an installation.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], env=env, check=True, timeout=300)
    shutil.rmtree(source)
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    install = ["--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], env=env, check=True, timeout=300)
    # The dependencies, but not moe_ft, which is there as an editable installation.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    torchrun = environment / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    (core,) = megatron.core.__path__
    megatron_lm.mkdir()
    (megatron_lm / "megatron").symlink_to(Path(core).parent)
    return Installed(python=python, packages=packages, megatron=megatron_lm)


def test_wheel_next_to_a_checkout_of_megatron_finds_both_and_starts_a_script(
    installed: Installed, tmp_path: Path
) -> None:
    versions = installed.run("--version", folder=tmp_path)
    assert f"({installed.packages / 'moe_ft'})" in versions
    assert f"megatron-core {RECOMMENDED} ({installed.megatron / 'megatron' / 'core'})" in versions
    where = "import moe_ft, megatron.core as m; print(moe_ft.__file__, m.__file__, sep='\\n')"
    (tmp_path / "train.py").write_text(where)
    *_, ours, core = installed.run("run", "train.py", folder=tmp_path).splitlines()
    assert Path(ours).is_relative_to(installed.packages)
    assert Path(core).is_relative_to(installed.megatron)


@pytest.mark.rest
def test_wheel_next_to_a_checkout_of_megatron_trains_and_recovers_outside_the_source_tree(
    installed: Installed, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    installed.run("examples", "--copy", str(copy), folder=tmp_path)
    # A Megatron in the folder of the script comes first, for all ranks and commands.
    shutil.copytree(installed.megatron / "megatron", copy / "examples" / "megatron", symlinks=True)
    path = f"{installed.python.parent}{os.pathsep}{os.environ['PATH']}"
    output = run_example(copy / "examples" / "own_script.sh", tmp_path, {"PATH": path})
    check_recovered(output, tmp_path, RECOMMENDED)
