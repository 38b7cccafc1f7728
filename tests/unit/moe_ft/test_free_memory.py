"""Memory that is free for processes, as the kernel shows it, and what processes have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ft.free_memory import available_bytes, children_of, free_memory, private_bytes

MIB = 1 << 20


def lay_out(tmp_path: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write what the kernel shows; return the paths."""
    (tmp_path / "cgroup").write_text(groups)
    for name, content in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{content}\n")
    return tmp_path / "cgroup", tmp_path / "fs"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/job/step\n", {}, None),
        ("0::/job/step\n", {"job/memory.max": "max", "job/memory.current": "5"}, None),
        (
            "0::/job/step\n",
            {
                "job/memory.max": "100",
                "job/memory.current": "60",
                "job/step/memory.max": "90",
                "job/step/memory.current": "20",
            },
            (40, 100),
        ),
        ("0::/host/pod\n", {"memory.max": "100", "memory.current": "1"}, (99, 100)),
        (
            "5:cpu:/x\n3:memory:/job\n",
            {"memory/job/memory.limit_in_bytes": "10", "memory/job/memory.usage_in_bytes": "12"},
            (0, 10),
        ),
        (
            "3:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": "9223372036854771712",
                "memory/job/memory.usage_in_bytes": "12",
            },
            None,
        ),
    ],
    ids=["none", "no limit", "of the parent", "in a container", "version 1", "version 1, no limit"],
)
def test_free_memory_of_groups(
    groups: str, files: dict[str, str], expected: tuple[int, int] | None, tmp_path: Path
) -> None:
    assert free_memory(*lay_out(tmp_path, groups, files)) == expected


def test_system_without_groups_has_no_limit(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "missing", tmp_path) is None


def test_memory_of_a_child_is_its_own_and_counts_until_it_has_ended() -> None:
    code = f"import sys; held = bytearray({64 * MIB}); print('there', flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert child.pid in children_of(os.getpid())
        assert 64 * MIB < private_bytes([child.pid]) < available_bytes() + 128 * MIB
        child.communicate()
    assert child.pid not in children_of(os.getpid())
    assert private_bytes([child.pid]) == 0 and children_of(child.pid) == []
