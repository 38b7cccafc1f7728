"""Every benchmark runs, in its smallest size, and `make bench` has all that it can have."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.output import ROOT

# Programs of ranks, which benchmarks start with torchrun or a wrapper.
_OF_RANKS = {"bridge_rank", "inprocess_rank", "slow_devices", "slow_stages"}
BENCHMARKS = sorted(
    ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
    if path.stem not in _OF_RANKS
)
_ELSEWHERE = {"bridge_recovery"}  # needs .venv/bridge
# The Makefile says why.
_NOT_IN_BENCH = {
    *("papers.routing", "papers.expert_placement"),
    *("papers.quality", "papers.expert_slots"),
    *("verdicts", *_ELSEWHERE),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", [each for each in BENCHMARKS if each not in _ELSEWHERE])
def test_benchmark_with_quick_runs_and_prints_a_table(name: str, tmp_path: Path) -> None:
    pages = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
    before = [page.read_bytes() for page in pages]
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert re.search(r"^\|[-|]+\|$", run.stdout, re.MULTILINE), run.stdout
    assert [page.read_bytes() for page in pages] == before


def test_make_bench_runs_every_benchmark_but_those_it_explains() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    listed = re.search(r"^BENCHMARKS := (.*)$", text, re.MULTILINE)
    assert listed
    assert sorted([*listed[1].split(), *_NOT_IN_BENCH]) == BENCHMARKS
    for name in _NOT_IN_BENCH:
        assert re.search(rf"^#.*\b{re.escape(name)}\b", text, re.MULTILINE), name
