"""Real agents that run small scripts: their fork servers import next to nothing, and their ranks no torch."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kept_job import KeptAgent
from tests.waiting import wait_for

_KEEP = (
    "import sys; from moe_ft.cluster import forks, options; options.PRELOADED = ({preload!r},); "
    "[setattr(forks, name, value) for name, value in {settings!r}.items()]; "
    "from moe_ft.commands.launch import keep; keep(sys.argv[1:])"
)
# Writes facts into a file of the rank, or of another name.
_TELL = """
import json, os, sys, time
def tell(name=None, **facts):
    path = os.path.join(os.environ["FOLDER"], name or "rank_" + os.environ["RANK"])
    with open(path + ".new", "w") as file:
        json.dump({"pid": os.getpid(), "server": os.getppid(), **facts}, file)
    os.rename(path + ".new", path)
"""
SLEEP = "tell()\ntime.sleep(1000)\n"


class Kept:
    """An agent, and what its ranks have told."""

    def __init__(self, folder: Path, agent: KeptAgent, log: Path) -> None:
        self._folder, self.agent, self._log = folder, agent, log

    @property
    def log(self) -> str:
        return " ".join(self._log.read_text().split())

    def read(self, name: str) -> dict[str, Any]:
        """Return what a rank has told, when it has."""
        path = self._folder / name
        wait_for(path.exists, f"{name}\n{self._log.read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def code(self) -> int:
        return self.agent.wait()


@contextmanager
def kept(
    folder: Path,
    script: str,
    *options: str,
    flags: tuple[str, ...] = (),
    preload: str = "json",
    settings: dict[str, float] | None = None,
    log: str = "log",
    env: Mapping[str, str] | None = None,
) -> Iterator[Kept]:
    """Run an agent whose ranks run a script, which may call `tell`; kill what is left in the end.

    Args:
        settings: values of names in forks.py.
    """
    path = folder / "script.py"
    path.write_text(_TELL + script)
    code = _KEEP.format(preload=preload, settings=settings or {})
    agent = KeptAgent(
        [*options, "--", str(path), *flags],
        folder / log,
        {"FOLDER": str(folder), **(env or {})},
        command=[sys.executable, "-c", code],
    )
    try:
        yield Kept(folder, agent, folder / log)
    finally:
        agent.kill()
