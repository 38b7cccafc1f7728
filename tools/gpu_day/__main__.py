"""Command line of a day with a GPU: choose steps, unpack what was carried, run them.

    python -m tools.gpu_day DAY [STEP...] [--budget-s S] [--folder DIR]
    python -m tools.gpu_day --list

Standard library only: it runs before packages that are missing have been unpacked.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_day.day import Runner
from tools.gpu_day.results import ROOT, WORK, result_path
from tools.gpu_day.steps import DAYS, FACTS, LOAN_S, Day, Step

CARRIED = ROOT / ".gpu"  # of tools/gpu_day/prepare.sh
_NEEDED = ("megatron-core", "msgspec")


def list_days() -> str:
    """Return all days and steps with their questions and seconds."""
    lines = []
    for day in DAYS.values():
        lines.append(f"{day.name}: {day.shows} (budget {day.budget_s} s)")
        lines += [
            f"  {each.name:22} usual {each.usual_s:3.0f} s, at most {each.most_s:3.0f} s  {each.question}"
            for each in day.steps
        ]
    return "\n".join(lines)


def carried(names: Sequence[str]) -> str:
    """Return a line for each day: its name, seconds of steps and of a loan, folders that it takes along."""
    days = [DAYS[name] for name in names]
    return "\n".join(
        f"{day.name} {day.budget_s} {day.budget_s + LOAN_S} "
        + " ".join(f".gpu/{folder}" for folder in day.carries)
        for day in days
    )


def choose(day: Day, names: Sequence[str]) -> list[Step]:
    """Return the facts and the steps that are named, and those without a result that they need."""
    by_name = {each.name: each for each in day.steps}
    wanted = set(names or by_name)
    for name in names:
        for needed in (by_name[name].of, by_name[name].after):
            if needed and not result_path(needed).exists():
                wanted.add(needed)
    return [FACTS, *(each for each in day.steps if each.name in wanted)]


def has_gpu() -> bool:
    """Return whether torch finds a GPU, asked in a process of its own."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run((sys.executable, "-W", "ignore", "-c", code)).returncode == 0


def missing_packages() -> list[str]:
    """Return what this Python lacks of what every step needs."""
    missing = []
    for name in _NEEDED:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def unpack_wheels(folder: Path) -> Path:
    """Unpack the wheels of the day; return the folder of programs among them."""
    if not folder.exists():
        temporary = folder.with_suffix(".new")
        shutil.rmtree(temporary, ignore_errors=True)
        for wheel in sorted((CARRIED / "wheels").glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(temporary)
        for program in temporary.glob("*.data/scripts/*"):
            program.chmod(0o755)
            (temporary / "bin").mkdir(exist_ok=True)
            program.rename(temporary / "bin" / program.name)
        temporary.rename(folder)
    return folder / "bin"


def environment(day: Day, *, is_rehearsal: bool) -> dict[str, str]:
    """Return the environment of all steps, and unpack what they need."""
    paths, preloaded = [str(ROOT)], list(filter(None, [os.environ.get("LD_PRELOAD", "")]))
    programs = os.environ.get("PATH", "")
    if missing_packages():
        programs = f"{unpack_wheels(WORK / 'site')}{os.pathsep}{programs}"
        paths.append(str(WORK / "site"))
    if "nccl" in day.carries and (packed := CARRIED / "nccl" / "libnccl.so.2.xz").exists():
        library = WORK / "nccl" / "libnccl.so.2"
        library.parent.mkdir(parents=True, exist_ok=True)
        with lzma.open(packed) as source, library.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        preloaded.append(str(library))
    if "te" in day.carries and (packed := CARRIED / "te" / "te.tar.xz").exists():
        with tarfile.open(packed, "r:xz") as archive:
            archive.extractall(WORK / "te", filter="data")
        paths.append(str(WORK / "te"))
        preloaded.append(str(WORK / "te" / "libte_stub.so"))
    if given := os.environ.get("PYTHONPATH"):
        paths.append(given)
    return {
        **os.environ,
        "PATH": programs,
        "PYTHONPATH": os.pathsep.join(paths),
        "LD_PRELOAD": os.pathsep.join(preloaded),
        "GPU_DAY_WORK": str(WORK),
        "GPU_DAY_REHEARSAL": str(int(is_rehearsal)),
        "GPU_DAY_FORCE": str(int(is_rehearsal)),  # of one_gpu.py
        # Caches that all processes share, one thread each, no pool of compilers for each rank, quiet logs.
        "TORCHINDUCTOR_CACHE_DIR": str(WORK / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "TRITON_CACHE_DIR": str(WORK / "triton"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "MEGATRON_LOGGING_LEVEL": "40",
        "HF_HUB_OFFLINE": "1",
    }


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; end the process at what cannot work."""
    parser = argparse.ArgumentParser(prog="tools.gpu_day", description=__doc__.splitlines()[0])
    parser.add_argument("day", nargs="?", metavar="DAY", help=", ".join(DAYS))
    parser.add_argument("steps", nargs="*", metavar="STEP", help="names; all of the day by default")
    parser.add_argument("--budget-s", type=float, help="seconds for all steps; default: the day's")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu_day", metavar="DIR")
    parser.add_argument("--together", type=int, help="most steps at a time; default: by cores")
    parser.add_argument("--carried", nargs="+", choices=DAYS, help="for prepare.sh")
    parser.add_argument("--list", action="store_true", help="show days and steps")
    options = parser.parse_args(words)
    if options.list or options.carried:
        return options
    if options.day not in DAYS:
        parser.error(f"DAY={options.day} must be one of {', '.join(DAYS)}: --list shows them")
    known = [each.name for each in DAYS[options.day].steps]
    if unknown := sorted({*options.steps} - {*known}):
        parser.error(
            f"STEPS={' '.join(unknown)} must be steps of {options.day} ({', '.join(known)})"
        )
    if missing := [] if any((CARRIED / "wheels").glob("*.whl")) else missing_packages():
        parser.error(
            f"{sys.executable} lacks {', '.join(missing)}, which every step needs: give another PYTHON, "
            "or run `make gpu-day-prepare` on a machine with a network and bring .gpu/wheels here"
        )
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run a day; return 0 if each of its steps passed."""
    options = parse(words)
    if options.list:
        print(list_days())
        return 0
    if options.carried:
        print(carried(options.carried))
        return 0
    day = DAYS[options.day]
    is_rehearsal = not has_gpu()
    kind = "a REHEARSAL without a GPU, with the small model" if is_rehearsal else "on a GPU"
    title = f"Day `{day.name}`, {datetime.datetime.now():%Y-%m-%d %H:%M}: {kind}."
    print(title, flush=True)
    num_cores = os.cpu_count() or 1
    runner = Runner(
        choose(day, options.steps),
        budget_s=options.budget_s or day.budget_s,
        folder=options.folder.resolve(),
        env=environment(day, is_rehearsal=is_rehearsal),
        together=options.together or max(3, min(day.together, num_cores)),
        is_rehearsal=is_rehearsal,
        title=title,
    )
    return 0 if runner.run() else 1


if __name__ == "__main__":
    raise SystemExit(main())
