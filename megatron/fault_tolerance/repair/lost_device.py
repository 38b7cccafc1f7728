"""Errors after which a process can do nothing with its device any more, so that only a new one helps.

CUDA calls these sticky: every later call of the process returns the same error. The rank then ends itself
while it can be replaced, and its exception is not taken for that of a survivor.
"""

import os
import re
import signal
import sys
from typing import NoReturn

# Texts of cudaGetErrorString. NCCL prints no more: "Cuda failure 700 'an illegal memory access ...'".
_TEXTS = (
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "tensor memory not completely freed",
    "CUDA-capable device(s) is/are busy or unavailable",
)
_IS_OF_CUDA = re.compile(r"cuda error|cuda failure|cudaerror", re.IGNORECASE)
_UNKNOWN = re.compile(r"CUDA error: unknown error|Cuda failure (999 )?'unknown error'")


def why_lost(error: BaseException) -> str:
    """Return the error of CUDA that an exception, or one that has led to it, is about; empty if none is.

    Errors after which the device can still be used do not count, such as one that is out of memory.
    """
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        text = str(each)
        if _UNKNOWN.search(text):
            return "unknown error"
        if _IS_OF_CUDA.search(text):
            found = next((known for known in _TEXTS if known in text), "")
            if found:
                return found
        seen.append(each)
        each = each.__cause__ or each.__context__
    return ""


def end_process(reason: str) -> NoReturn:
    """End this process at once: its zygote replaces it if it is armed, or the launcher restarts the job."""
    line = (
        f"moe_ft: process {os.getpid()} ends, because it cannot use its device any more: {reason}"
    )
    print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
