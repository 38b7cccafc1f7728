"""`python -m moe_ft convert`: its flags, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.convert.safetensors_set import SafetensorsSet
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.convert.models import persist_model


def test_checkpoint_is_converted_with_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (4, 8):
        persist_model(Storage(str(tmp_path / "src")), iteration)
    words = ["convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--to", "safetensors"]
    assert main([*words, "--iteration", "4", "--what", "weights", "--dtype", "fp32"]) == 0
    assert "iteration 4 as safetensors, 6 tensors" in capsys.readouterr().out
    assert (tmp_path / "dst/model-00001-of-00001.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SRC", "DST", "--shard-size", "0"], "--shard-size=0.0 must be a number of GiB"),
        (["SRC", "DST", "--for-ep", "0"], "--for-ep=0 must be a number of ranks"),
        (["SRC", " "], "DST=' ' is empty: an unset variable"),
        (["NOWHERE", "DST"], "NOWHERE must be a folder, but is not there"),
        (["", "DST"], "SRC='' is empty"),
        (["SRC", "SRC"], "must be a new or an empty folder, but it is not empty"),
    ],
)
def test_bad_input_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    persist_model(Storage(str(tmp_path / "SRC")))
    paths = {name: str(tmp_path / name) for name in ("SRC", "DST", "NOWHERE")}
    given = [paths.get(word, word) for word in words]
    assert main(["convert", *given, "--to", "safetensors"]) == 2
    assert message in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["SRC"]


def test_interruption_says_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    persist_model(Storage(str(tmp_path / "src")))
    monkeypatch.setattr(SafetensorsSet, "finish", interrupt)
    words = ["convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--to", "safetensors"]
    assert main(words) == 130
    assert "the same command continues" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(words) == 0


_SCRIPT = """
import ctypes, resource, sys, threading
from moe_ft.commands.convert import keep_freed_memory

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
