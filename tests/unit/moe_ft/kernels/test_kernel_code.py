"""Each kernel is compiled for the GPUs that it is for, within its limits, and to what the page shows."""

import ast
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.kernel_code import LIMITS, KernelCode, read_code
from tests.unit.source import ROOT, text_of

PAGE = "docs/benchmarks/kernel_code.md"
USAGE = " Function _work:\n  REG:96 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:400"
CODE = """
        /*0090*/       LDG.E R21, desc[UR6][R6.64] ;
        /*00a0*/  @!P0 LDG.E.128.CONSTANT R8, [R6.64] ;
        /*00b0*/       LDG.E.U16 R3, [R2.64] ;
        /*00c0*/       LDG.E.U8.STRONG.GPU R3, [R2.64] ;
        /*00d0*/       STG.E.64 [R2.64], R4 ;
        /*00e0*/       STL.64 [R1], R4 ;
        /*00f0*/       LDL.LU R4, [R1] ;
        /*0100*/       STS.128 [R1], R4 ;
"""


def compiler() -> str:
    """Return why nothing can be compiled here; empty if it can."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return "needs Triton, which comes with torch for CUDA"
    tools = os.path.join(os.path.dirname(found.origin), "backends", "nvidia", "bin")
    missing = [name for name in ("ptxas", "cuobjdump") if name not in os.listdir(tools)]
    return f"needs {' and '.join(missing)} of Triton's package" if missing else ""


needs_compiler = pytest.mark.skipif(bool(compiler()), reason=compiler())


@needs_compiler
@pytest.mark.parametrize(
    "target",
    [90, pytest.param(80, marks=pytest.mark.rest), pytest.param(100, marks=pytest.mark.rest)],
)
def test_kernels_are_within_their_limits_and_as_the_page_says(target: int) -> None:
    command = (sys.executable, "-m", "benchmarks.kernel_code", "--targets", str(target))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows, known = rows_of(done.stdout, target), rows_of(text_of(PAGE), target)
    assert len(rows) == len(LIMITS)
    version = done.stdout.partition(",")[0]
    if f"{version}," not in text_of(PAGE):
        pytest.skip(f"{PAGE} is of another version than {version}")
    remedy = f"run python -m benchmarks.kernel_code --output {PAGE} after the commit"
    assert rows == known, f"{PAGE} shows other code: {remedy}"


def rows_of(text: str, target: int) -> list[list[str]]:
    lines = [line for line in text.splitlines() if f"| sm_{target} " in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_kernel_that_is_launched_is_compiled_here() -> None:
    # One function, which packs or unpacks as it is told when it is compiled.
    launched = {
        f"{path.stem}.{ast.unparse(call.func.value)}"
        for path in (ROOT / "moe_ft" / "kernels").glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        if ast.unparse(call.func.slice).startswith("(")
    }
    assert launched == {"triton_packing._work"}
    assert set(LIMITS) == {"pack", "unpack"}


def test_registers_spills_and_widths_are_read_from_the_machine_code() -> None:
    found = read_code("pack", 80, 256, 8192, USAGE, CODE)
    assert (found.registers, found.stack_bytes, found.spills, found.blocks) == (96, 16, 2, 2)
    assert found.loads == {16: 1, 8: 0, 4: 1, 2: 1, 1: 1}
    assert found.stores == {16: 0, 8: 1, 4: 0, 2: 0, 1: 0}


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"registers": 129}, ["registers", "blocks"]),
        ({"stack_bytes": 4}, ["stack_bytes"]),
        ({"shared_bytes": 8193}, ["shared_bytes"]),
        ({"loads": {16: 25}}, ["wide_loads"]),
        ({"stores": {16: 5}}, ["wide_stores"]),
    ],
)
def test_each_limit_that_is_broken_is_named(change: dict[str, Any], broken: list[str]) -> None:
    good = KernelCode(
        name="pack",
        target=90,
        threads=256,
        registers=128,
        stack_bytes=0,
        shared_bytes=8192,
        spills=0,
        loads={16: 26},
        stores={16: 6},
    )
    assert not list(good.problems(LIMITS["pack"]))
    found = list(replace(good, **change).problems(LIMITS["pack"]))
    assert [each.split(": ")[1].split()[0] for each in found] == broken
