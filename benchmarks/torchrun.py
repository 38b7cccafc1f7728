"""Jobs under torchrun on this machine, which starts all ranks again when one has died."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.ports import free_port

_ROOT = Path(__file__).resolve().parent.parent
_TAIL_CHARACTERS = 3000
_END_S = 60.0  # longer than torchrun gives its ranks to end


def run_under_torchrun(
    words: Sequence[str],
    num_ranks: int,
    *,
    max_restarts: int,
    log_path: Path,
    keeps: bool = False,
    deadline_s: float = 600,
) -> None:
    """Run a job on the CPU until it ends by itself.

    Args:
        words: what follows torchrun's own options: the script or `-m` and a module, with their arguments.
        num_ranks: of the job, all on this machine.
        max_restarts: how often torchrun starts all ranks again.
        log_path: gets the output of torchrun and of the ranks.
        keeps: whether torchrun starts `moe_ft keep`, which forks the ranks.

    Raises:
        AssertionError: if the job fails, or takes longer than the deadline; with what moe_ft said and the
            end of its output.
    """
    keep = ("-m", "moe_ft", "keep", "--ranks-per-node", str(num_ranks), "--") if keeps else ()
    num_processes = "1" if keeps else str(num_ranks)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", num_processes),
        *("--max-restarts", str(max_restarts), "--rdzv-backend", "c10d"),
        *("--rdzv-id", "benchmark", "--rdzv-endpoint", f"localhost:{free_port()}", *keep, *words),
    ]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONWARNINGS": "ignore"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log_path.open("w") as log:
        agent = subprocess.Popen(command, cwd=_ROOT, env=env, stdout=log, stderr=log)
        try:
            code = agent.wait(deadline_s)
        except BaseException as error:
            agent.terminate()  # it ends its ranks
            agent.wait(_END_S)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = -1
    if code:
        output = log_path.read_text(errors="replace")
        said = "\n".join(line for line in output.splitlines() if "moe_ft: " in line)
        how = "did not end in time" if code == -1 else f"ended with code {code}"
        raise AssertionError(f"the job {how}\n{said}\n...\n{output[-_TAIL_CHARACTERS:]}")
