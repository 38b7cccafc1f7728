"""Demonstration of a repair in place: `make demo`, or `python examples/demo.py`.

It trains the small model of quickstart.sh twice on 4 ranks of this machine: undisturbed, and with a rank that
is killed in the middle of an iteration. Then it compares both, and says what the kill has cost. Whatever ends
it, it leaves no process and no memory; its logs and the report stay in --run-dir.
"""

import argparse
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from job_lines import essential_lines

from moe_ft.events import event_path, ranks_with_events, read_events

_ROOT = Path(__file__).resolve().parents[1]
_KILLED = 3  # rank
_END_S = 60.0  # torchrun gives ranks 30 s
_MOST_SHOWN = 110  # characters of a line


def main() -> int:
    """Train twice, compare, and return the exit code: 0 if the rank was replaced and nothing was lost."""
    options = _parse()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _interrupt)
    options.run_dir.mkdir(parents=True, exist_ok=True)
    with (options.run_dir / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _fail(
                f"--run-dir={options.run_dir} is used by another demo. Name another folder, or end it."
            )
        try:
            with _memory(options.memory_dir) as memory:
                kill = f"kill:{_KILLED}@{2 * options.iterations // 3}:backward"
                print(f"1. Train {options.iterations} iterations on 4 ranks, undisturbed.")
                whole = _train(options, memory, "undisturbed", [])
                print(
                    f"\n2. The same again; rank {_KILLED} is killed in the middle of an iteration."
                )
                killed = _train(options, memory, "killed", ["--moe-ft-inject-fault", kill])
        except KeyboardInterrupt:
            print("\ninterrupted: all processes have ended", file=sys.stderr)
            return 130
    print("\n3. What the kill has cost")
    is_equal = _compare(whole, killed)
    _report(killed, options.run_dir / "report.html")
    return 0 if is_equal else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill a rank of a small job, and see it repaired.")
    parser.add_argument(
        "--run-dir", type=Path, default=_ROOT / "runs" / "demo", help="for logs and the report"
    )
    parser.add_argument(
        "--memory-dir", type=Path, default=Path("/dev/shm"), help="for snapshots: on tmpfs"
    )
    parser.add_argument("--iterations", type=int, default=20, help="of each run, at least 4")
    parser.add_argument("--port", type=int, help="where ranks meet; default: a free one")
    options = parser.parse_args()
    if options.iterations < 4:
        parser.error(f"--iterations={options.iterations} must be at least 4. Give more.")
    options.run_dir = options.run_dir.absolute()
    return options


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _fail(problem: str) -> NoReturn:
    sys.exit(f"demo.py: error: {problem}")


@contextmanager
def _memory(parent: Path) -> Iterator[Path]:
    """Make a folder for the memory of both jobs, and remove it in the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="moe_ft_demo_", dir=parent))
    except OSError as error:
        _fail(
            f"--memory-dir={parent} cannot be used ({error.strerror}). Name another folder on tmpfs."
        )
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _train(options: argparse.Namespace, memory: Path, name: str, flags: list[str]) -> Path:
    """Run examples/quickstart.sh to its end, show the lines that matter, and return its event log."""
    folder: Path = options.run_dir
    events, log = folder / name, folder / f"{name}.log"
    shutil.rmtree(events, ignore_errors=True)
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RUN_DIR": str(options.run_dir),
        "MASTER_PORT": str(options.port or _free_port()),
        "MAX_RESTARTS": "0",  # a repair needs none
        "CUDA_VISIBLE_DEVICES": "",  # a start on GPUs refuses repairs
        "TRAIN_ITERATIONS": str(options.iterations),
        "SHOW": "all",  # the log has it
    }
    command = [
        *(str(_ROOT / "examples" / "quickstart.sh"), "--log-interval", "5", "--eval-iters", "0"),
        *("--moe-ft-strategy", "dense", "--moe-ft-repair", "auto", "--moe-ft-state-digest"),
        *("--lr-warmup-iters", "2", "--moe-ft-memory-dir", str(memory)),
        *("--moe-ft-event-log", str(events), *flags),
    ]
    # A session of its own: Ctrl-C reaches this process alone, which ends the job in order.
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as job,
    ):
        try:
            assert job.stdout is not None
            for line in essential_lines(_noted(job.stdout, file)):
                print(f"   {_short(line)}", flush=True)
        except BaseException:
            _end(job)
            raise
    if job.returncode:
        _fail(f"training has failed with exit code {job.returncode}. {log} has all of its lines.")
    return events


def _noted(lines: Iterable[str], log: TextIO) -> Iterator[str]:
    """Yield lines that are written to a log first."""
    for line in lines:
        log.write(line)
        yield line


def _short(line: str) -> str:
    """Return a line without the time and the rank, and without what an exception has to add."""
    return line.rpartition(" moe_ft: ")[2].split(" ([")[0][:_MOST_SHOWN]


def _end(job: "subprocess.Popen[str]") -> None:
    """End a job as Ctrl-C in its terminal does, and wait for it; a second Ctrl-C must not cut that short."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    os.killpg(job.pid, signal.SIGINT)
    try:
        job.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _events(folder: Path, kind: str) -> dict[int, list[dict[str, Any]]]:
    """Return the events of a kind by rank."""
    return {
        rank: [each for each in read_events(event_path(folder, rank)) if each["event"] == kind]
        for rank in ranks_with_events(folder)
    }


def _compare(whole: Path, killed: Path) -> bool:
    """Print what the killed run did and lost; return whether it ends in the bits of the whole one."""
    repairs, starts = _events(killed, "repair"), _events(killed, "start")
    if not all(len(found) == 1 for found in repairs.values()):
        print("   the rank was not repaired in place: see the lines above")
        return False
    repair = repairs[0][0]
    kept = [rank for rank, found in starts.items() if len({each["pid"] for each in found}) == 1]
    lost_tokens = max(
        each["lost_tokens"] for found in _events(killed, "recovery").values() for each in found
    )
    digests = [
        {rank: found[-1]["sha256_all"] for rank, found in _events(folder, "state_digest").items()}
        for folder in (whole, killed)
    ]
    is_equal = digests[0] == digests[1]
    broken, recovered = repair["broken_iteration"], repair["recovered_iteration"]
    rows = (
        (
            "replaced",
            f"rank {', '.join(map(str, repair['dead_ranks']))}, which died in iteration {broken + 1}",
        ),
        ("kept their process", f"ranks {', '.join(map(str, kept))}"),
        ("time", f"{repair['seconds']:.1f} s from the death until that iteration was finished"),
        ("lost iterations", f"{broken - recovered}, apart from the one that was running"),
        ("lost tokens", f"{lost_tokens}"),
        (
            "state at the end",
            "equal to that of the undisturbed run, bit for bit, on every rank"
            if is_equal
            else "NOT equal to that of the undisturbed run",
        ),
        *((f"  SHA-256, rank {rank}", digest) for rank, digest in sorted(digests[1].items())),
    )
    for name, value in rows:
        print(f"   {name:<20} {value}")
    return is_equal and not lost_tokens


def _report(events: Path, page: Path) -> None:
    """Write the report of a run as a page, and say where it is."""
    command = [sys.executable, "-m", "moe_ft", "report", str(events), "--html", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"   {'report':<20} {page}")


if __name__ == "__main__":
    sys.exit(main())
