"""A forked process takes over what a worker has; running scripts is in test_worker.py."""

import json
import os
import random
from pathlib import Path

from moe_ft.cluster.forked_rank import become, run
from moe_ft.cluster.protocol import RankRequest
from moe_ft.cluster.target import Target


def test_process_takes_over_streams_environment_folder_mask_and_session(tmp_path: Path) -> None:
    request = RankRequest(
        words=("script",),
        environment={"RANK": "12"},
        folder=str(tmp_path),
        mask=0o27,
        cpus=(min(os.sched_getaffinity(0)),),
    )
    streams = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("in", "out", "err")]
    random.seed(1)
    expected = random.random()
    random.seed(1)
    pid = os.fork()
    if pid == 0:
        become(request, streams)
        facts = {
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "mask": os.umask(0),
            "cpus": sorted(os.sched_getaffinity(0)),
            "leads": os.getsid(0) == os.getpid(),
            "draw": random.random(),
            "name": Path("/proc/self/comm").read_text(),
        }
        os.write(1, json.dumps(facts).encode())
        os.write(2, b"error")
        os._exit(0)
    for each in streams:
        os.close(each)
    assert os.waitpid(pid, 0)[1] == 0
    facts = json.loads((tmp_path / "out").read_text())
    assert facts.pop("draw") != expected
    assert facts == {
        "environment": {"RANK": "12"},
        "name": "rank_12\n",
        "folder": str(tmp_path),
        "mask": 0o27,
        "cpus": list(request.cpus),
        "leads": True,
    }
    assert (tmp_path / "err").read_text() == "error"


def test_module_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text(
        "import sys; open('facts', 'w').write(f'{__name__} {sys.argv[1:]} {sys.path[0]}')"
    )
    pid = os.fork()
    if pid == 0:
        os.chdir(tmp_path)
        run(Target(words=("-m", "some_module", "a"), preload=()))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "facts").read_text() == f"__main__ ['a'] {tmp_path}"
