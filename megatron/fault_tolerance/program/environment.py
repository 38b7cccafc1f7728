"""Preparation of the process for Megatron: workarounds that must be in place before flags are parsed."""

import importlib.util
import os
import socket
import threading
import time
from pathlib import Path

import torch
from megatron.core.datasets import utils as dataset_utils

from megatron.fault_tolerance.cpu import adam
from megatron.fault_tolerance.cpu import device as cpu_device
from moe_ft.errors import ConfigError

_RANK_POLL_S = 1.0
_RANK_PID = "MOE_FT_RANK_PID"


def prepare_environment() -> None:
    """Adapt the process to a machine without a GPU, and set the variables that Megatron expects.

    Call it before parsing.

    Raises:
        ConfigError: if restarts by torchrun could not work.
    """
    _complete_variables()
    _check_restarts()
    if not torch.cuda.is_available():
        cpu_device.install()
        # Megatron asserts it for some layouts. It orders work on a GPU, and there is none.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if os.environ["LOCAL_RANK"] == "0":
            print("moe_ft: no GPU found, training on the CPU with gloo", flush=True)
    _use_prebuilt_dataset_helper()
    adam.install()


def end_with_rank() -> None:
    """End this process soon after its rank has ended, for whatever reason.

    Megatron's checkpoint writers wait for work forever. The writers of a killed rank would keep its memory
    and its output pipe, and a launcher waits for the pipe to close.
    """
    rank_pid = int(os.environ[_RANK_PID])

    def watch() -> None:
        while _is_alive(rank_pid):
            time.sleep(_RANK_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _complete_variables() -> None:
    """Set the variables that torchrun sets, for a process that is started without it."""
    os.environ[_RANK_PID] = str(os.getpid())
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    if os.environ.get("WORLD_SIZE", "1") == "1" and "MASTER_PORT" not in os.environ:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
        os.environ["MASTER_ADDR"] = "127.0.0.1"


def _check_restarts() -> None:
    """Refuse torchrun's shared store if torchrun may restart the job.

    torchrun shares its own TCP store with the ranks and keeps it across a restart (torch 2.13). The restarted
    ranks then read the addresses of dead processes from it and fail to connect.
    """
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    max_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if shares_store and (max_restarts != "0" or is_restart):
        raise ConfigError(
            f"torchrun --max-restarts={max_restarts} needs --rdzv-backend=c10d and the environment "
            "variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without both, restarted ranks look for "
            "dead processes and fail. Set them before torchrun starts."
        )


def _use_prebuilt_dataset_helper() -> None:
    """Keep Megatron from running make if the wheel contains the compiled helper and no Makefile.

    Megatron's compile_helpers ends the process if make fails.
    """
    has_makefile = (Path(dataset_utils.__file__).parent / "Makefile").is_file()
    if not has_makefile and importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None
