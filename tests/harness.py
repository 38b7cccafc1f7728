"""Runs several ranks of a job for tests, forked from one process that has torch and Megatron imported.

Importing takes four seconds per process, a fork milliseconds. The standard library's fork server imports once
and stays single-threaded, and every rank is a fresh fork of it. The output of a rank goes to a file, which a
failing test shows.
"""

import functools
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

import pretrain_gpt_moe
from moe_ft.events import event_path, read_events
from tests.breakages import BREAKAGE, MARKS, apply_breakage
from tests.measuring import TEST, save_coverage_regularly
from tests.ports import free_port
from tests.settled import SETTLED, apply_settling

KILL_AFTER_S = 30.0  # torchrun's --shutdown-timeout
DEADLINE_S = 240.0  # of a start; it takes 10 s on a machine that does nothing else
_POLL_S = 0.02
_TAIL_BYTES = 3000
# By a model that was built in the process of the tests, before it started the fork server.
_LEFT_BY_MEGATRON = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.warm"])


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """End of one incarnation: exit codes and output of its ranks."""

    exit_codes: tuple[int, ...]  # negative: ended by that signal
    log_paths: tuple[Path, ...]
    seconds: float

    def output(self, rank: int) -> str:
        return self.log_paths[rank].read_text(errors="replace")

    def check(self) -> "JobResult":
        """Return self, or fail with the ends of all logs if a rank failed."""
        assert not any(self.exit_codes), f"exit codes {self.exit_codes}\n{_tails(self.log_paths)}"
        return self


Train = Callable[[list[str]], object]  # what it returns does not matter


def run_ranks(
    target: Callable[..., Any],
    world_size: int,
    *args: Any,
    log_dir: Path,
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
    nodes: Sequence[str] | None = None,
) -> JobResult:
    """Run ``target(*args)`` on every rank of a new job and wait until all ranks have ended.

    When one rank fails the others get SIGTERM at once and SIGKILL after KILL_AFTER_S, as under
    torchrun; no process is left behind. GPUs are hidden unless ``env`` shows them.

    Args:
        target: importable function; RANK, WORLD_SIZE, MASTER_ADDR and so on are set when it runs.
        log_dir: folder for the output of each rank; created.
        deadline_s: fails the test, after killing all ranks, if they take longer.
        nodes: ``[rank]`` the node of each rank; None for one node.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    paths = tuple(log_dir / f"output_{rank}.log" for rank in range(world_size))
    prepare_to_fork()
    start = time.monotonic()
    ranks = []
    common = _environment(world_size, env or {})
    for rank, path in enumerate(paths):
        variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if nodes is not None:
            variables["MOE_FT_NODE_ID"] = nodes[rank]
            variables["LOCAL_RANK"] = str(list(nodes[:rank]).count(nodes[rank]))
        path.touch()  # a rank that the others' end stops before it opens its output has printed nothing
        process = _context.Process(target=_rank_main, args=(target, args, variables, path))
        process.start()
        ranks.append(process)
    try:
        _wait(ranks, start + deadline_s, paths)
    finally:
        for process in ranks:
            assert process.pid is not None, "all ranks were started"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what the rank has started
            process.kill()
            process.join()
    return JobResult(
        exit_codes=tuple(process.exitcode or 0 for process in ranks),
        log_paths=paths,
        seconds=time.monotonic() - start,
    )


def run_training(
    flags: Sequence[str],
    world_size: int,
    *,
    log_dir: Path,
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
    nodes: Sequence[str] | None = None,
    train: Train | None = None,
) -> JobResult:
    """Run pretrain_gpt_moe.py on every rank of a new job, or ``train``, which changes something first."""
    return run_ranks(
        train or _train,
        world_size,
        list(flags),
        log_dir=log_dir,
        deadline_s=deadline_s,
        env=env,
        nodes=nodes,
    )


def run_with_restarts(
    flags: Sequence[str],
    world_size: int,
    *,
    log_dir: Path,
    max_restarts: int,
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
    nodes: Callable[[int], Sequence[str]] | None = None,
    between: Callable[[int], None] | None = None,
    train: Train | None = None,
) -> list[JobResult]:
    """Run a job and restart all its ranks as long as a rank fails, as torchrun does.

    Arguments are those of `run_training`; there are at most ``max_restarts`` restarts. ``nodes`` returns the
    node of each rank in a start, counted from 0. ``between`` is called after a start that failed, with its
    number. Returns one result per incarnation, the last one included.
    """
    results: list[JobResult] = []
    while len(results) <= max_restarts:
        count = len(results)
        variables = {**(env or {}), "TORCHELASTIC_RESTART_COUNT": str(count)}
        folder = log_dir / f"start_{count}"
        results.append(
            run_training(
                flags,
                world_size,
                log_dir=folder,
                deadline_s=deadline_s,
                env=variables,
                nodes=None if nodes is None else nodes(count),
                train=train,
            )
        )
        if not any(results[-1].exit_codes):
            break
        if between is not None:
            between(count)
    return results


@functools.cache
def prepare_to_fork() -> None:
    """Wait until the fork server has imported everything: on a busy machine that takes minutes."""
    process = _context.Process(target=os.getpid)
    process.start()
    process.join()


def events(directory: Path, rank: int, event: str | None = None) -> list[dict[str, Any]]:
    found = read_events(event_path(directory, rank))
    return [line for line in found if event in (None, line["event"])]


def digests(directory: Path, world_size: int) -> list[tuple[str, str]]:
    """Return every rank's last state digest."""
    last = [events(directory, rank, "state_digest")[-1] for rank in range(world_size)]
    return [(line["sha256"], line["sha256_all"]) for line in last]


def _train(flags: list[str]) -> None:
    sys.argv[0] = pretrain_gpt_moe.__file__  # as if Python had started it
    pretrain_gpt_moe.main(flags)


def _environment(world_size: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all ranks of a job get. The fork server has those of its own start."""
    own = os.environ.items()
    given = {
        name: value
        for name, value in own
        if name in (BREAKAGE, MARKS, SETTLED, TEST) or name.startswith("AWS_")
    }
    return {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": "",
        **env,
        **given,
    }


def _rank_main(
    target: Callable[..., Any], args: Sequence[Any], env: Mapping[str, str], log_path: Path
) -> None:
    for name in _LEFT_BY_MEGATRON:
        os.environ.pop(name, None)
    os.environ.update(env)

    def act() -> None:
        assert not torch.cuda._is_in_bad_fork(), "an import of tests/warm.py has asked the driver"
        save_coverage_regularly()
        apply_breakage()
        apply_settling()
        target(*args)

    be_process(log_path, act)


def be_process(log_path: Path, act: Callable[[], object]) -> NoReturn:
    """Be a process of its own session in a fork: append output to a file, act, and end with its exit code."""
    os.setsid()
    multiprocessing.set_start_method(
        None, force=True
    )  # the fork server has set its own for its forks
    output = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 0
    try:
        act()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Tests need only the exit code, and broken process groups can block the end of an interpreter.
    os._exit(code)


def _wait(ranks: Sequence[Any], deadline: float, paths: Sequence[Path]) -> None:
    failed_at = None
    while any(process.exitcode is None for process in ranks):
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"the ranks did not end in time\n{_tails(paths)}")
        if failed_at is None and any(process.exitcode for process in ranks):
            failed_at = now
            for process in ranks:
                process.terminate()
        if failed_at is not None and now > failed_at + KILL_AFTER_S:
            return  # the caller kills them
        time.sleep(_POLL_S)


def _tails(paths: Sequence[Path]) -> str:
    return "\n".join(
        f"--- {path}\n{path.read_bytes()[-_TAIL_BYTES:].decode(errors='replace')}"
        for path in paths
        if path.exists()
    )
