"""Failure domains of nodes, as a file or SLURM gives them."""

import stat
from pathlib import Path

import pytest

from moe_ft.errors import ConfigError
from moe_ft.failure_domains import SLURM, expand, find_domains, read_domains

FLAG = "--moe-ft-failure-domain"
TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=gpu[01-02]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=gpu[03-04]
SwitchName=top Level=1 LinkSpeed=1 Nodes=gpu[01-04] Switches=s[0-1]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=gpu[01,03] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=gpu[02,04] BlockSize=2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "domains"


def test_file_gives_the_domain_of_each_node(file: Path) -> None:
    file.write_text(
        "# our racks\ngpu-1 rack-a\n\n  gpu-2\track-b  # new\ngpu-3 rack-a\ngpu-1 rack-a\n"
    )
    assert find_domains(str(file), ["gpu-2", "gpu-1"]) == {"gpu-2": "rack-b", "gpu-1": "rack-a"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (
            b"gpu-1 rack-a\ngpu-2\n",
            ["line 2", "'gpu-2'", "each line names a node", "Correct"],
        ),
        (b"gpu-1 rack a\n", ["line 1", "'gpu-1 rack a'", "each line names a node"]),
        (b"gpu-1 a\ngpu-1 b\n", ["line 2", "'gpu-1 b'", "gpu-1 is in a already", "Correct"]),
        (b"\xff\xfe", ["cannot be read", "Name a file"]),
    ],
)
def test_bad_file_is_refused_with_its_line_and_the_rule(
    file: Path, content: bytes, named: list[str]
) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_domains(file)
    for each in (f"{FLAG}={file}", *named):
        assert each in str(error.value)


def test_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{FLAG}={file} cannot be read .*Name a file"):
        find_domains(str(file), ["gpu-1"])


def test_nodes_that_the_file_lacks_are_refused_by_name(file: Path) -> None:
    file.write_text("gpu-1 a\n")
    nodes = [f"gpu-{number}" for number in range(1, 7)]
    with pytest.raises(
        ConfigError, match=r'know gpu-2, gpu-3, gpu-4, ... \(5 of 6\). Add a line "gpu-2 DOMAIN"'
    ):
        find_domains(str(file), nodes)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in whose file `answer` is what scontrol prints."""
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\n[ "$*" = "show topology" ] && cat {tmp_path}/answer\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


@pytest.mark.parametrize(("answer", "domains"), [(TREE, "s0 s0 s1 s1"), (BLOCKS, "b1 b2 b1 b2")])
def test_slurm_gives_the_leaf_switch_or_the_block_of_each_node(
    slurm: Path, answer: str, domains: str
) -> None:
    (slurm / "answer").write_text(answer)
    nodes = [f"gpu{number:02}" for number in range(1, 5)]
    assert [*find_domains(SLURM, nodes).values()] == domains.split()
    with pytest.raises(
        ConfigError, match=rf"{FLAG}=slurm .* know login .*Name nodes as SLURM does"
    ):
        find_domains(SLURM, ["gpu01", "login"])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("no topology\n", "knows no switches"),
        (TREE.replace("gpu[03-04]", "gpu[02-04]"), "has gpu02 at s0 and at s1"),
        (None, r"does not answer \(.*answer: No such file"),
    ],
)
def test_slurm_that_knows_no_domains_is_refused(
    slurm: Path, answer: str | None, problem: str
) -> None:
    if answer is not None:
        (slurm / "answer").write_text(answer)
    with pytest.raises(ConfigError, match=f"{FLAG}=slurm .*{problem}.*Name a file instead"):
        find_domains(SLURM, ["gpu01"])


def test_machine_without_slurm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{FLAG}=slurm .*does not answer"):
        find_domains(SLURM, ["gpu01"])


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("", ""),
        ("login", "login"),
        ("gpu[01-03,7],login", "gpu01 gpu02 gpu03 gpu7 login"),
        ("a[9-11]b,r[1-2]n[0,3]", "a9b a10b a11b r1n0 r1n3 r2n0 r2n3"),
    ],
)
def test_list_of_hosts_is_expanded(hosts: str, names: str) -> None:
    assert [*expand(hosts)] == names.split()
