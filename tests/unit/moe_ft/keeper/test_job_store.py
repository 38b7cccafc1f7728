"""The store of a job in a process of its own."""

import os
import signal

from moe_ft.keeper import job_store
from tests.ports import free_port


def test_store_outlives_the_processes_that_use_it() -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    server = os.fork()
    if server == 0:
        job_store.serve(environment)
    try:
        writer = os.fork()
        if writer == 0:
            job_store.connect(environment).set("key", "value")
            os._exit(0)
        assert os.waitpid(writer, 0)[1] == 0
        assert job_store.connect(environment).get("key") == b"value"
        later = {**environment, "TORCHELASTIC_RESTART_COUNT": "1"}
        assert not job_store.connect(later).check(["key"])
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def test_store_of_the_launcher_is_recognized() -> None:
    assert job_store.is_shared({"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not job_store.is_shared({"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not job_store.is_shared({})
