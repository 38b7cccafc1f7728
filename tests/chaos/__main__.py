"""Chaos for some time, `make chaos`: a case for one seed after another; docs/testing_chaos.md."""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from itertools import count
from pathlib import Path

from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from moe_ft.tables import table
from tests.chaos.cases import Case, draw_case
from tests.chaos.verdict import GOOD, Result, Verdict, run_case
from tests.harness import prepare_to_fork
from tests.references import Place, References

ROOT = Path("runs/chaos").resolve()


def main() -> int:
    """Run cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first case; others follow")
    parser.add_argument("--first", type=int, help="seed of the only case")
    parser.add_argument("--report", type=Path, default=Path("runs/chaos.jsonl"))
    parser.add_argument("--forks", action="store_true", help="no process imports: cases are short")
    options = parser.parse_args()
    ROOT.mkdir(parents=True, exist_ok=True)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    prepare_to_fork()  # files of its own stay where they are
    end, results = time.monotonic() + 60 * options.minutes, list[Result]()
    with tempfile.TemporaryDirectory(prefix="moe_ft_chaos_") as sockets:
        tempfile.tempdir = os.environ["TMPDIR"] = sockets
        for seed in count(options.seed) if options.first is None else [options.first]:
            results.append(_run(draw_case(seed, are_forks=options.forks), Path(sockets)))
            with options.report.open("a") as file:
                line = {"megatron": version("megatron-core"), **asdict(results[-1])}
                file.write(json.dumps(line) + "\n")
            if time.monotonic() > end:
                break
    verdicts = Counter((each.case.name, each.verdict) for each in results)
    struck = Counter(each.case.name for each in results for _ in each.struck)
    rows = [
        [name, n, *(verdicts[name, each] or "" for each in Verdict)] for name, n in struck.items()
    ]
    print(table(rows, ["case", "strikes", *map(str, Verdict)]))
    failed = [each.case.seed for each in results if each.verdict not in GOOD]
    print(f"{len(results)} cases; seeds that failed: {failed or 'none'}")
    return int(bool(failed))


def _dataset() -> list[str]:
    """Return the flags of a small data set of text, made once."""
    text, cache = ROOT / "dataset" / "text", ROOT / "dataset" / "cache"
    if not text.parent.exists():
        write_dataset(TextSource(paths=(str(Path(asyncio.__file__).parent),)), text)
    return ["--data-path", str(text), "--data-cache-path", str(cache), "--split", "80,10,10"]


def _run(case: Case, sockets: Path) -> Result:
    folder, begin = ROOT / f"seed_{case.seed}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="moe_ft_chaos_", dir="/dev/shm") as memory:
        place = Place(_dataset(), folder, Path(memory), References(ROOT / "references"))
        result = run_case(case, place, sockets)
    for path in sockets.rglob("*.socket*"):
        path.unlink()
    took = f"{len(result.struck)} strikes, {time.monotonic() - begin:.0f} s"
    print(f"seed {case.seed}, {case.name}: {result.verdict} ({took})", flush=True)
    if result.verdict in GOOD:
        shutil.rmtree(folder)
    else:
        again = f"logs: {folder}; again: make chaos FIRST={case.seed}"
        print(*result.problems, *result.notes, again, sep="\n    ", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
