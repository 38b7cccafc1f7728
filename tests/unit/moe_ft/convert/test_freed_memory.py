"""Memory that is freed stays with the process, of every thread."""

import subprocess
import sys

import pytest

_SCRIPT = """
import ctypes, resource, sys, threading
from moe_ft.convert.freed_memory import keep_freed_memory

PR_SET_THP_DISABLE = 41  # some machines have huge pages everywhere, and few page faults
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def fill():
    for _ in range(10):
        bytearray(64 << 20)[:] = b"x" * (64 << 20)

fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
thread = threading.Thread(target=fill)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("mode", "is_kept"), [("keep", True), ("default", False)])
def test_freed_blocks_are_used_again_without_new_pages(mode: str, is_kept: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, mode], check=True, capture_output=True, text=True
    )
    # 20 times two blocks of 16384 pages, of which a page fault may bring several.
    assert (int(done.stdout) < 2000) == is_kept
