"""Seconds from a kill until Megatron-Bridge trains a new iteration: alone, and under moe_ft.

    make .venv/bridge/installed
    .venv/bridge/bin/python -m benchmarks.bridge_recovery [--kinds NAME ...] [--kills N] [--quick]
        [--output FILE.md]

Two ranks train the model of tests/bridge, EP 2. The last one is killed after an iteration, --kills times,
10 iterations apart. Seconds count from the kill until each rank has finished an iteration that none had
finished before. All jobs must end in the same state, bit for bit. Kinds:

bridge   Bridge alone: it saves every 5 iterations, and torchrun starts all ranks again. Kills are 4
         iterations after a save
restart  moe_ft, strategy dense: torchrun starts all ranks again, which recover from memory
keep     the same under `moe_ft keep`, which has imported Bridge once, with --moe-ft-repair off
repair   the same with --moe-ft-repair auto: the dead rank is replaced in place
"""

import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.jobs import run_under_torchrun
from benchmarks.output import conditions, markdown_table, read_options, show, spread

KINDS = ("bridge", "restart", "keep", "repair")
_NUM_RANKS = 2
_SAVE_EVERY, _KILL_EVERY, _FIRST = 5, 10, 9


def run_kind(kind: str, num_kills: int, folder: Path) -> tuple[list[float], list[int], str]:
    """Return the seconds after each kill, how many iterations ran again, and the digests of the end.

    Raises:
        AssertionError: if the job does not end as planned.
    """
    folder.mkdir()
    kills = [_FIRST + _KILL_EVERY * number for number in range(num_kills)]
    job = [
        *("-m", "benchmarks.bridge_rank", str(folder), ",".join(map(str, kills))),
        *("model.expert_model_parallel_size=2", f"train.train_iters={kills[-1] + 3}"),
    ]
    if kind == "bridge":
        saved = f"checkpoint.save_interval={_SAVE_EVERY}"
        job += [saved, *(f"checkpoint.{name}={folder / 'saved'}" for name in ("save", "load"))]
    else:
        job = ["-m", "moe_ft", "run", *_flags(kind, folder), "--", *job]
    run_under_torchrun(
        job,
        _NUM_RANKS,
        max_restarts=num_kills,
        log_path=folder / "log",
        keeps=kind in ("keep", "repair"),
    )
    ended = [[*map(_entry, (folder / f"{rank}.times").open())] for rank in range(_NUM_RANKS)]
    seconds, again = [], []
    for kill in kills:
        killed_s = float((folder / f"kill_{kill}").read_text())
        later = [[each for each in own if each[0] > killed_s] for own in ended]
        firsts = [next(at_s for at_s, iteration in own if iteration > kill) for own in later]
        seconds.append(max(firsts) - killed_s)
        again.append(sum(at_s < max(firsts) and number <= kill for at_s, number in later[0]))
    digests = "".join((folder / f"{rank}.json").read_text() for rank in range(_NUM_RANKS))
    return seconds, again, digests


def _flags(kind: str, folder: Path) -> list[str]:
    repair = {"repair": "auto", "keep": "off"}.get(kind)
    return [
        *("--moe-ft-strategy", "dense", "--moe-ft-job-id", "benchmark"),
        *("--moe-ft-memory-dir", f"/dev/shm/{folder.parent.name}/{kind}"),
        *(("--moe-ft-repair", repair) if repair else ()),
    ]


def _entry(line: str) -> tuple[float, int]:
    at_s, iteration = line.split()
    return float(at_s), int(iteration)


def main(words: Sequence[str] | None = None) -> None:
    """Run the jobs of all kinds and print their table."""
    options = read_options(words, kinds=(list(KINDS),), kills=(3, 1, "of each job"))
    about = conditions(
        f"{_NUM_RANKS} ranks, median (range) of {options.kills} kills. "
        f"megatron-bridge {version('megatron-bridge')}."
    )
    rows, known = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            print(kind, file=sys.stderr, flush=True)
            seconds, again, digests = run_kind(kind, options.kills, Path(folder) / kind)
            known.add(digests)
            assert len(known) == 1, f"{kind} ends in another state than the others"
            rows.append((kind, spread(seconds, ".2f"), spread(again, ".0f")))
    headers = ("kind", "to a new iteration, s", "iterations again")
    show([about, markdown_table(rows, headers)], options.output)


if __name__ == "__main__":
    main()
