"""Folders of a day, and the result that a step leaves in them. day.py reads it."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
# Jobs, logs and results. A later call on the same machine finds the results of earlier ones there.
WORK = Path(os.environ.get("GPU_DAY_WORK", f"{tempfile.gettempdir()}/moe_ft_gpu_day_{os.getuid()}"))
IS_REHEARSAL = os.environ.get("GPU_DAY_REHEARSAL") == "1"


def result_path(name: str) -> Path:
    """Return the file of a step's result."""
    return WORK / "results" / f"{name}.json"


def note(name: str, line: str, *, is_good: bool = True, **values: Any) -> None:
    """Leave the result of a step: a line for the summary, and figures."""
    path = result_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"is_good": is_good, "line": line, **values}, default=str))
    print(f"RESULT {name}: {line}", flush=True)


class Watch:
    """Seconds of a block."""

    s = 0.0

    def __enter__(self) -> Self:
        self.start_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.s = time.perf_counter() - self.start_s


def rate(num_bytes: float, seconds: float) -> float:
    """Return GB/s."""
    return round(num_bytes / max(seconds, 1e-9) / 1e9, 2)
