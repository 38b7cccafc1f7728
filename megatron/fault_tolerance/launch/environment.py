"""The process of a rank: workarounds that must be in place before flags are parsed, and its error file."""

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, override

import torch
import torch.distributed as dist
from megatron.core.datasets import utils as dataset_utils
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from megatron.fault_tolerance.cpu import adam
from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.launch.children import end_children_with
from moe_ft.command_lines import flag_value
from moe_ft.errors import ConfigError
from moe_ft.launches import launch_of, shares_store, slurms_variables
from moe_ft.processes import has_ended, start_ticks
from moe_ft.saying import FORMAT_FLAG, choose_format, say, warn

_MEETING = "moe_ft/meeting"  # key of torchrun's store
_MEET_S = 900.0
_POLL_S = 0.05


def prepare_environment(flags: Sequence[str] = ()) -> None:
    """Adapt the process to a machine without a GPU, and set the variables that Megatron expects.

    Call it before parsing; a second call does nothing. Where there is a GPU it changes no result.

    Args:
        flags: of moe_ft that are not among the arguments of the process.
    """
    choose_format(flag_value([*sys.argv, *flags], FORMAT_FLAG))
    _complete_variables()
    if not cpu_device.is_active() and not torch.cuda.is_available():
        cpu_device.install()
        # Megatron asserts it for some layouts. It orders work on a GPU, and there is none.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if os.environ["LOCAL_RANK"] == "0":
            say("no GPU found, training on the CPU with gloo")
    _use_prebuilt_dataset_helper()
    adam.install()
    end_children_with(os.getpid(), on_cpu=cpu_device.is_active())


def take_slurms_variables() -> None:
    """Set the variables that torchrun sets from those of `srun`, for a loop that reads SLURM's itself.

    Such a loop also finds out where the ranks meet. Call it before `prepare_environment`.
    """
    os.environ |= slurms_variables(os.environ)


def _complete_variables() -> None:
    """Set the variables that torchrun sets, for a process that is started without it."""
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    if "MASTER_PORT" in os.environ:  # a shell may have it from an example
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        return
    os.environ["MASTER_PORT"] = str(_free_port())
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def check_restarts(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if torchrun may restart ranks of several nodes, and shares its store with them.

    It keeps that store across a restart (torch 2.13). The restarted ranks then read the addresses of dead
    processes from it and fail to connect. Those of one node meet elsewhere: `prepare_restarts`.
    """
    if _may_read_of_dead_ranks(environment) and environment.get("GROUP_WORLD_SIZE") != "1":
        _refuse_shared_store(environment)


def prepare_restarts() -> None:
    """Check restarts, and have ranks of a single node meet at a store of their own, if there may be any.

    Call it before ranks meet; a second call does nothing.

    Raises:
        ConfigError: as `check_restarts` does, or if ranks have met already.
    """
    check_restarts(os.environ)
    if _may_read_of_dead_ranks(os.environ):
        if dist.is_initialized():
            _refuse_shared_store(os.environ)
        os.environ["MASTER_PORT"] = str(_own_port())
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _may_read_of_dead_ranks(environment: Mapping[str, str]) -> bool:
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return shares_store(environment) and (restarts or launch_of(environment).start > 0)


def _refuse_shared_store(environment: Mapping[str, str]) -> NoReturn:
    raise ConfigError(
        f"torchrun --max-restarts={environment.get('TORCHELASTIC_MAX_RESTARTS', '0')} needs "
        "--rdzv-backend=c10d or --standalone, and the environment variable "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without both, restarted ranks look for dead processes and "
        "fail. Set them before torchrun starts."
    )


def _own_port() -> int:
    """Return a free port that rank 0 draws, and shows to the others of its node in torchrun's store.

    That may still have what the rank 0 of an earlier start has shown, whose process is gone.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False)
    if os.environ["RANK"] == "0":
        port = _free_port()
        store.set(_MEETING, f"{port} {os.getpid()} {start_ticks(os.getpid())}")
        return port
    end_s = time.monotonic() + _MEET_S
    while time.monotonic() < end_s:
        if store.check([_MEETING]):
            port, pid, started = map(int, store.get(_MEETING).split())
            if not has_ended(pid, started):
                return port
        time.sleep(_POLL_S)
    raise ConfigError(
        f"rank 0 has not shown within {_MEET_S:.0f} s where ranks of this node meet: it imports, or hangs. "
        "See what it prints."
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _use_prebuilt_dataset_helper() -> None:
    """Keep Megatron from running make if this Python's compiled helper is there and not out of date.

    A wheel has no Makefile. That of a checkout looks for the helper of the python3 on PATH, which may be
    another one, and Megatron's compile_helpers ends the process if make fails.
    """
    helper = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    if helper is None or helper.origin is None:
        return
    source, makefile = (
        Path(dataset_utils.__file__).with_name(name) for name in ("helpers.cpp", "Makefile")
    )
    if (
        not makefile.is_file()
        or Path(helper.origin).stat().st_mtime_ns >= source.stat().st_mtime_ns
    ):
        dataset_utils.compile_helpers = lambda: None


class WholeErrorFile(ErrorHandler):
    """Writer of the error file for torch's decorator `record`: the file is there as a whole or not at all.

    torch writes it in place. If torchrun's SIGTERM comes in between, or there is no room, torchrun reads half
    a file, and ends the job whatever restarts it has left.
    """

    _suffix = ""

    @override
    def _get_error_file_path(self) -> str | None:
        path = super()._get_error_file_path()
        return None if path is None else f"{path}{self._suffix}"

    @override
    def record_exception(self, e: BaseException) -> None:
        path = self._get_error_file_path()
        if path is None:
            return
        self._suffix = f".{os.getpid()}"
        temporary = Path(path + self._suffix)
        try:
            super().record_exception(e)
            temporary.replace(path)
        except OSError as error:  # the exception goes on; its traceback is on standard error
            temporary.unlink(missing_ok=True)
            warn(f"torchrun's error file is not written: {error}")
        finally:
            self._suffix = ""
