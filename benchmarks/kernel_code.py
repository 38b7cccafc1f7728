"""Kernels as the compiler makes them: registers, spills, shared memory, width of loads and stores.

    python -m benchmarks.kernel_code [--targets N...] [--quick] [--output FILE.md]

No GPU is needed: Triton compiles for a target that is named, with the ptxas that it brings, and its cuobjdump
shows what came out. Nothing is measured. The command ends with an error if a kernel is beyond its limits.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.output import markdown_table, read_options, show

WIDTHS = (16, 8, 4, 2, 1)  # bytes of a load or store
_WARP = 32
_REGISTERS = 65_536  # of a multiprocessor; each block also takes 1 KiB of its shared memory
_SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
_MEMORY = re.compile(r"\b(LDG|STG|LDL|STL)((?:\.[A-Z0-9_]+)*) ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a kernel, for every target.

    Attributes:
        registers: of a thread, at most.
        stack_bytes: of a thread, at most: what did not fit into registers.
        shared_bytes: of a block, at most.
        blocks: on a multiprocessor, at least; with one, nothing hides the wait for memory.
        wide_loads: of 16 bytes in the code, at least; likewise `wide_stores`.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    blocks: int
    wide_loads: int
    wide_stores: int


# The first argument of each kernel that is known when it is compiled is whether it packs.
LIMITS = {
    "pack": Limits(
        registers=128, stack_bytes=0, shared_bytes=8192, blocks=2, wide_loads=26, wide_stores=6
    ),
    "unpack": Limits(
        registers=128, stack_bytes=48, shared_bytes=16384, blocks=2, wide_loads=8, wide_stores=24
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCode:
    """Machine code of a kernel for one target.

    Attributes:
        target: 90 for sm_90.
        spills: instructions that store to the stack or load from it.
        loads: of device memory, number of instructions by width in bytes; likewise `stores`.
    """

    name: str
    target: int
    threads: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    spills: int
    loads: Mapping[int, int]
    stores: Mapping[int, int]

    @property
    def blocks(self) -> int:
        """Blocks that fit on a multiprocessor at a time."""
        by_registers = _REGISTERS // (self.registers * self.threads)
        return min(by_registers, _SHARED_BYTES[self.target] // (self.shared_bytes + 1024))

    def problems(self, limits: Limits) -> Iterator[str]:
        """Yield the limits that the code breaks."""
        most = ("registers", "stack_bytes", "shared_bytes")
        found = {
            **{name: getattr(self, name) for name in (*most, "blocks")},
            "wide_loads": self.loads[16],
            "wide_stores": self.stores[16],
        }
        for name, value in found.items():
            limit = getattr(limits, name)
            if value > limit if name in most else value < limit:
                side = "most" if name in most else "least"
                yield f"{self.name}, sm_{self.target}: {name} is {value}, and {limit} at {side}"

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        by_width = (
            " ".join(str(counts[width]) for width in WIDTHS) for counts in (self.loads, self.stores)
        )
        numbers = (self.registers, self.stack_bytes, self.spills, self.shared_bytes, self.blocks)
        return (self.name, f"sm_{self.target}", *map(str, numbers), *by_width)


def compile_kernel(name: str, target: int) -> KernelCode:
    """Compile a kernel as `KernelTable` launches it.

    Raises:
        ImportError: without Triton.
        RuntimeError: where Triton interprets kernels instead (TRITON_INTERPRET).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moe_ft.kernels.triton_packing import MOST_REGISTERS, NUM_WARPS, _work

    if not hasattr(_work, "cache_key"):
        raise RuntimeError("TRITON_INTERPRET is set: unset it, an interpreter compiles nothing")
    pointers = {"rows": "*i64", "segments": "*i32", "buffer": "*u8", "num_wrong": "*i64"}
    source = ASTSource(
        fn=_work,
        signature={**pointers, "IS_PACKING": "constexpr"},
        constexprs={(len(pointers),): name == "pack"},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(len(pointers))},
    )
    built = triton.compile(
        source,
        target=GPUTarget("cuda", target, _WARP),
        options={"num_warps": NUM_WARPS, "maxnreg": MOST_REGISTERS},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                (tool, option, file.name), capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    return read_code(name, target, NUM_WARPS * _WARP, built.metadata.shared, usage, code)


def read_code(
    name: str, target: int, threads: int, shared_bytes: int, usage: str, code: str
) -> KernelCode:
    """Read what cuobjdump prints about one kernel.

    Args:
        usage: with -res-usage.
        code: with -sass.
    """
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    counts: Counter[tuple[str, int]] = Counter()
    for kind, modifiers in _MEMORY.findall(code):
        sizes = re.findall(r"\.[US]?(128|64|16|8)\b", modifiers)
        counts[kind, int(sizes[0]) // 8 if sizes else 4] += 1
    return KernelCode(
        name=name,
        target=target,
        threads=threads,
        registers=int(found[0]),
        stack_bytes=int(found[1]),
        shared_bytes=shared_bytes,
        spills=sum(count for (kind, _), count in counts.items() if kind in ("LDL", "STL")),
        loads={width: counts["LDG", width] for width in WIDTHS},
        stores={width: counts["STG", width] for width in WIDTHS},
    )


def main() -> None:
    """Compile, print, and compare with the limits."""
    options = read_options(targets=([*_SHARED_BYTES], [90]))
    codes = [compile_kernel(name, target) for name in LIMITS for target in options.targets]
    import triton

    widths = "/".join(map(str, WIDTHS))
    headers = (
        "kernel",
        "target",
        "registers",
        "stack",
        "spills",
        "shared",
        "blocks",
        f"loads of {widths}",
        f"stores of {widths}",
    )
    text = (
        f"Triton {triton.__version__}, {codes[0].threads} threads a block. Stack in bytes of a thread, "
        "shared memory in bytes of a block, spills, loads and stores as instructions in the code, by "
        "bytes; blocks are those that fit on a multiprocessor at a time."
    )
    show([text, markdown_table([code.row() for code in codes], headers)], options.output)
    problems = [each for code in codes for each in code.problems(LIMITS[code.name])]
    if problems:
        raise SystemExit(
            "\n".join(problems)
            + "\nChange the kernel, or LIMITS in benchmarks/kernel_code.py if it is worth it."
        )


if __name__ == "__main__":
    main()
