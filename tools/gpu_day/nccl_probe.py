"""Probe of NCCL: with which variables may two ranks share this GPU, and how long do collectives take?

    python -m tools.gpu_day.nccl_probe      the first variables that work are left for the steps after it

Each try is two processes on the first GPU: collectives that Megatron uses, checked; an abort and another
communicator; then one process dies, and the other aborts an all-reduce that nobody answers. All of repair
over NCCL depends on that last one. Over gloo where no GPU is.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from moe_ft.calls import nccl_version
from tools.gpu_day.results import IS_REHEARSAL, WORK, Watch, note

# Few blocks for each collective, so that kernels of both ranks fit on the device at the same time.
_SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
_NO_P2P, _NO_CUMEM = {"NCCL_P2P_DISABLE": "1"}, {"NCCL_CUMEM_ENABLE": "0"}
_TRIES: dict[str, dict[str, str]] = {
    "plain": {},
    "no P2P": _NO_P2P,
    "no cuMem": _NO_CUMEM,
    "sockets": {**_NO_P2P, **_NO_CUMEM, "NCCL_SHM_DISABLE": "1"},
}
_TRY_S = 40.0
_NUM, _REPEATS = 1 << 16, 20
_DEVICE, _BACKEND = ("cpu", "gloo") if IS_REHEARSAL else ("cuda", "nccl")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if not IS_REHEARSAL:
        torch.cuda.synchronize()


class Rank:
    """One of two ranks. Leaves what it has found after each part: the next one may hang."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._found: dict[str, Any] = {}
        self._base = torch.arange(_NUM, device=_DEVICE, dtype=torch.float32)

    def run(self) -> None:
        """Run all parts; end the process."""
        self._begin("first")
        if not IS_REHEARSAL:
            self._found["NCCL"] = nccl_version()
        self._check_collectives()
        self._leave("collectives")
        with Watch() as watch:
            self._abort()
        self._found["abort s"] = round(watch.s, 2)
        self._begin("second")
        self._leave("again")
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if not IS_REHEARSAL:
            dist.all_reduce(self._base.clone(), async_op=True)  # nobody answers
            time.sleep(1)  # its kernel runs, and waits for the dead rank
            with Watch() as watch:
                self._abort()
                synchronize()
            self._found["abort without a peer s"] = round(watch.s, 2)
            self._found["3.0"] = float(
                torch.ones(3, device=_DEVICE).sum()
            )  # the context still works
        self._leave("end")
        os._exit(0)

    def _begin(self, name: str) -> None:
        with Watch() as watch:
            dist.init_process_group(
                _BACKEND,
                store=dist.FileStore(str(self._folder / name), 2),
                rank=self._rank,
                world_size=2,
                timeout=timedelta(seconds=25),
            )
            dist.all_reduce(torch.ones(1, device=_DEVICE))
            synchronize()
        self._found[f"{name} start s"] = round(watch.s, 2)

    def _abort(self) -> None:
        if IS_REHEARSAL:
            dist.destroy_process_group()
        else:
            dist.distributed_c10d._abort_process_group()

    def _check_collectives(self) -> None:
        rank, base, half = self._rank, self._base, _NUM // 2
        value = base + rank
        total = value.clone()
        out = torch.empty_like(value)
        other = torch.empty_like(value)
        both = torch.empty(2 * _NUM, device=_DEVICE)
        dist.all_reduce(total)
        dist.all_to_all_single(out, value)
        dist.all_gather_into_tensor(both, value)
        operations = [
            dist.P2POp(dist.isend, value, 1 - rank),
            dist.P2POp(dist.irecv, other, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        synchronize()
        mine = base[rank * half : (rank + 1) * half]
        assert torch.equal(total, 2 * base + 1), "all_reduce is wrong"
        assert torch.equal(out, torch.cat([mine, mine + 1])), "all_to_all is wrong"
        assert torch.equal(both, torch.cat([base, base + 1])), "all_gather is wrong"
        assert torch.equal(other, base + 1 - rank), "send and receive are wrong"
        self._found["all_reduce ms"] = self._median_ms(lambda: dist.all_reduce(total))
        self._found["all_to_all ms"] = self._median_ms(lambda: dist.all_to_all_single(out, value))

    def _median_ms(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS):
            with Watch() as watch:
                call()
                synchronize()
            times.append(1e3 * watch.s)
        return round(median(times), 2)

    def _leave(self, part: str) -> None:
        if self._rank == 0:
            found = {**self._found, "got to": part}
            (self._folder / "found.json").write_text(json.dumps(found))


def attempt(name: str, variables: dict[str, str]) -> dict[str, Any]:
    """Run two ranks; return what they have found, as far as they got."""
    folder = WORK / "jobs" / "nccl-probe" / name.replace(" ", "_")
    folder.mkdir(parents=True)
    env = {
        **os.environ,
        **variables,
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    ranks = []
    for rank in ("0", "1"):
        command = (sys.executable, "-m", "tools.gpu_day.nccl_probe", str(folder), rank)
        with (folder / f"rank_{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        ranks[0].wait(_TRY_S)
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {_TRY_S:.0f} s", flush=True)
    for each in ranks:
        each.kill()
        each.wait()
    path = folder / "found.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if found.get("got to") != "end":
        lines = (folder / "rank_0.log").read_text(errors="replace").splitlines()
        marked = [line for line in lines if "rror" in line or "WARN" in line]
        found["error"] = (marked or lines or ["no output"])[-1][:200]
    return found


def main() -> None:
    """Try variables until some work; prefer those with which an abort ends an unanswered call."""
    lines = []
    good = ""
    for name, extra in _TRIES.items():
        found = attempt(name, {**_SHARED, **extra})
        lines.append(f"{name}: {found}")
        if found.get("got to") == "end" or ("got to" in found and not good):
            good = name
        if found.get("got to") == "end":
            break
    note(
        "nccl-probe",
        f"{f'works: {good}' if good else 'nothing works'}; {'; '.join(lines)}",
        is_good=bool(good),
        env={**_SHARED, **_TRIES.get(good, {})},
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Rank(Path(sys.argv[1]), int(sys.argv[2])).run()
    main()
