"""Backends of gloo: made with devices that they share, and freed by the end of their connections."""

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.transport import Place
from tests.harness import run_ranks

TIMEOUT = timedelta(seconds=60)
LONGER = timedelta(seconds=600)


def wait_for_a_rank_that_lives(folder: str) -> None:
    rank, store = int(os.environ["RANK"]), dist.FileStore(f"{folder}/store", 2)
    transport = Gloo()
    make, mark = transport.maker(), transport.mark()
    places = [
        Place(store=dist.PrefixStore(name, store), rank=rank, ranks=(0, 1), name=name)
        for name in ("first", "second")
    ]
    backends: list[Any] = [make(place, None, LONGER) for place in places]
    made = transport.made_since(mark)
    assert made
    assert transport.failure(made) == ""
    value = torch.tensor([rank + 1.0])
    for backend in backends:
        backend.allreduce([value]).wait()
    assert value.item() == 6.0
    if rank == 0:
        waits = threading.Event()
        threading.Thread(target=lambda: (waits.wait(), transport.end(made)), daemon=True).start()
        waits.set()
        try:
            backends[0].allreduce([value]).wait()
        except RuntimeError:
            store.set("freed", "")
    store.wait(["freed"], TIMEOUT)
    sys.stdout.flush()
    os._exit(0)


def test_thread_that_waits_for_a_healthy_rank_is_freed(tmp_path: Path) -> None:
    run_ranks(wait_for_a_rank_that_lives, 2, str(tmp_path), log_dir=tmp_path).check()


def test_transport_of_gloo_needs_nothing_else() -> None:
    transport = Gloo()
    transport.settle()
    transport.leave()
    assert (transport.name, transport.fails_silently) == ("gloo", False)
