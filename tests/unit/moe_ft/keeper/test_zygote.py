"""Imports of the zygote, and reasons not to fork; serving workers is in test_worker.py."""

import os
import sys
import threading
from pathlib import Path

import pytest

from moe_ft.keeper.target import Target
from moe_ft.keeper.zygote import import_modules, why_not_to_fork


def test_modules_come_from_the_folder_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_module.py").write_text("NAME = __file__")
    (tmp_path / "broken_module.py").write_text("1 / 0")
    (tmp_path / "script.py").touch()
    preload = ("broken_module", "no_such_module.part", "own_module")
    path = list(sys.path)
    import_modules(Target(words=(str(tmp_path / "script.py"),), preload=preload))
    assert str(tmp_path / "own_module.py") == sys.modules.pop("own_module").NAME
    assert sys.path == path
    (line,) = capsys.readouterr().err.splitlines()
    assert "broken_module is not imported beforehand: ZeroDivisionError" in line


def test_threads_forbid_a_fork() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="mine")
    thread.start()
    try:
        assert "started threads" in why_not_to_fork() and "mine" in why_not_to_fork()
    finally:
        end.set()
        thread.join()


def test_open_device_forbids_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert why_not_to_fork() == ""
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia0")
    assert "has used CUDA (/dev/nvidia0 is open)" in why_not_to_fork()
