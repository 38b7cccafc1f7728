"""Chaos for some time: `make chaos MINUTES=60 SEED=1 FIRST= REPORT=runs/chaos.jsonl`.

Runs the cases of one seed after another, prints a line for each, and at the end a table. A seed that failed
keeps its folder, and runs again alone with FIRST=SEED.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from itertools import count
from pathlib import Path

from tabulate import tabulate

from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from tests.chaos.cases import draw_case
from tests.chaos.verdict import GOOD, Result, Verdict, run_case
from tests.harness import prepare_to_fork
from tests.references import Place, References


def main() -> int:
    """Run cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first case; the next ones follow"
    )
    parser.add_argument("--first", type=int, help="seed of the only case")
    parser.add_argument("--report", type=Path, default=Path("runs/chaos.jsonl"))
    parser.add_argument(
        "--forks", action="store_true", help="no launcher imports: cases are shorter"
    )
    options = parser.parse_args()
    root = Path("runs/chaos").resolve()
    (root / "tmp").mkdir(parents=True, exist_ok=True)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    prepare_to_fork()  # its own files stay where they are
    with tempfile.TemporaryDirectory(prefix="moe_ft_chaos_") as sockets:
        tempfile.tempdir = os.environ["TMPDIR"] = sockets  # of fork servers, ours and real ones
        data = _dataset(root)
        seeds = count(options.seed) if options.first is None else iter([options.first])
        end, results = time.monotonic() + 60 * options.minutes, list[Result]()
        for seed in seeds:
            results.append(_run_seed(seed, root, data, Path(sockets), options.forks or None))
            with options.report.open("a") as file:
                line = results[-1].line() | {"megatron": version("megatron-core")}
                file.write(json.dumps(line) + "\n")
            if time.monotonic() > end:
                break
    return _summarize(results, root)


def _dataset(root: Path) -> list[str]:
    """Return the flags of a small data set of text, made once."""
    folder = root / "dataset"
    if not folder.exists():
        write_dataset(TextSource(paths=(str(Path(asyncio.__file__).parent),)), folder / "text")
    paths = ["--data-path", str(folder / "text"), "--data-cache-path", str(folder / "cache")]
    return [*paths, "--split", "80,10,10"]


def _run_seed(seed: int, root: Path, data: list[str], sockets: Path, forks: bool | None) -> Result:
    case = draw_case(seed, is_real=None if forks is None else False)
    folder, begin = root / f"seed_{seed}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="moe_ft_chaos_", dir="/dev/shm") as memory:
        place = Place(data, folder, Path(memory), References(root / "references"))
        result = run_case(case, place, sockets)
    for path in sockets.rglob("*.socket*"):
        path.unlink()
    took = f"{time.monotonic() - begin:.0f} s"
    print(f"seed {seed}, {case.name}: {result.verdict} ({len(result.struck)} strikes, {took})")
    if result.verdict in GOOD:
        shutil.rmtree(folder)
    else:
        print("".join(f"    {each}\n" for each in [*result.problems, *result.notes]), end="")
        print(f"    logs: {folder}; again: make chaos FIRST={seed}")
    sys.stdout.flush()
    return result


def _summarize(results: list[Result], root: Path) -> int:
    names = sorted({each.case.name for each in results})
    rows = []
    for name in names:
        of_name = [each for each in results if each.case.name == name]
        counts = Counter(each.verdict for each in of_name)
        struck = sum(len(each.struck) for each in of_name)
        rows.append([name, struck, *(counts[verdict] or "" for verdict in Verdict)])
    print(tabulate(rows, headers=["case", "strikes", *map(str, Verdict)]))
    failed = [each.case.seed for each in results if each.verdict not in GOOD]
    print(f"{len(results)} cases; seeds that failed: {failed or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
