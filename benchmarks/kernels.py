"""Packing state: bytes per second against a plain copy, and whole snapshots against one copy per tensor.

    python -m benchmarks.kernels [--mib N] [--share N] [--repeats N] [--quick] [--output FILE.md]

On a GPU: kernels against a copy from device to device, and snapshots through staging into pinned host memory
against one cudaMemcpyAsync per tensor. Without one: the torch reference against memcpy and torch.cat, and
snapshots through staging against torch's copies. All peers of a table take turns in one run; GB/s are of what
is read and written together.
"""

import mmap
import platform
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.output import markdown_table, read_options, show, spread, take_turns
from moe_ft.engine.snapshots.staging import PackedPart, Staging, cut_into_chunks
from moe_ft.format.packings import Packing
from moe_ft.kernels.number_formats import BF16, E4M3, ScaleKind
from moe_ft.kernels.pack_table import PackTable
from moe_ft.kernels.packing import ALIGNMENT, Segment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_STAGING_BYTES = 64 << 20
Peers = Mapping[str, tuple[int, Callable[[], object]]]  # bytes read and written, and what does it


def finish() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def speed_table(peers: Peers, repeats: int) -> str:
    """Return bytes per second, and the share of the first peer's by turn, median and range."""
    functions = {name: work for name, (_, work) in peers.items()}
    seconds = take_turns(functions, repeats, prepare=finish, finish=finish)
    first = next(iter(peers))
    rows = []
    for name, (num_bytes, _) in peers.items():
        speeds = [num_bytes / each / 1e9 for each in seconds[name]]
        of_first = [peers[first][0] / each / 1e9 for each in seconds[first]]
        shares = [100 * own / other for own, other in zip(speeds, of_first, strict=True)]
        rows.append(
            (
                name,
                spread(speeds, ".2f"),
                spread(shares, ".0f"),
            )
        )
    headers = ("what", "GB/s", f"% of {first}")
    return markdown_table(rows, headers)


# --- one launch


def placed(segments: Sequence[Segment]) -> tuple[list[Segment], torch.Tensor]:
    """Return segments one behind the other, and their buffer."""
    found, end = [], 0
    for each in segments:
        side = end + -(-each.num_bytes // ALIGNMENT) * ALIGNMENT
        found.append(
            Segment(
                tensor=each.tensor,
                to=each.to,
                scales=each.scales,
                weights=each.weights,
                offset=end,
                side_offset=side,
            )
        )
        end = side + -(-each.side_bytes // ALIGNMENT) * ALIGNMENT
    return found, torch.zeros(end, dtype=torch.uint8, device=DEVICE)


def moved_bytes(segments: Sequence[Segment]) -> int:
    """Return what packing reads and writes."""
    return sum(
        each.tensor.numel() * each.tensor.element_size()
        + (each.weights.numel() * 2 if each.weights is not None else 0)
        + each.num_bytes
        + each.side_bytes
        for each in segments
    )


def packing_peers(num_bytes: int, num_tensors: int) -> Peers:
    """Return copies and kernels over so many bytes of fp32 in so many tensors that lie scattered."""
    size = num_bytes // 4 // num_tensors
    tensors = [
        torch.randn(size + index % 7, device=DEVICE)[index % 4 :] for index in range(num_tensors)
    ]
    tensors = [each.contiguous() if index % 2 else each for index, each in enumerate(tensors)]
    total = sum(each.numel() * 4 for each in tensors)
    source = torch.randn(total // 4, device=DEVICE)
    target = torch.empty_like(source)
    copies = [torch.empty_like(each) for each in tensors]
    ways: dict[str, list[Segment]] = {
        "pack, as it is": [Segment(tensor=each) for each in tensors],
        "pack to bf16": [Segment(tensor=each, to=BF16) for each in tensors],
        "pack to fp8-e4m3": [Segment(tensor=each, to=E4M3) for each in tensors],
        "pack to fp8-e4m3-block": [
            Segment(tensor=each, to=E4M3, scales=ScaleKind.FP32) for each in tensors
        ],
        "split masters": [
            Segment(tensor=each, weights=each.to(torch.bfloat16)) for each in tensors
        ],
    }
    device_copy = "device-to-device copy" if DEVICE == "cuda" else "memcpy"
    peers: dict[str, tuple[int, Callable[[], object]]] = {
        device_copy: (2 * total, lambda: target.copy_(source)),
        "torch.cat": (2 * total, lambda: torch.cat(tensors, out=target)),
        "torch._foreach_copy_": (2 * total, lambda: torch._foreach_copy_(copies, tensors)),
        "torch's cast to bf16": (
            total * 3 // 2,
            lambda: [each.to(torch.bfloat16) for each in tensors],
        ),
    }
    for name, segments in ways.items():
        in_place, buffer = placed(segments)
        table = PackTable(in_place)
        moved = moved_bytes(in_place)
        peers[name] = (moved, lambda table=table, buffer=buffer: table.pack(buffer))  # type: ignore[misc]
        unpack = name.replace("pack", "unpack").replace("split", "join")
        peers[unpack] = (moved, lambda table=table, buffer=buffer: table.unpack(buffer))  # type: ignore[misc]
    return peers


# --- whole snapshots


def expert_tensors(hidden: int, ffn: int, num_experts: int, share: int) -> list[torch.Tensor]:
    """Return masters and moments of experts with gates, 1/share of each, as a rank owns them."""
    sizes = (2 * hidden * ffn // share, hidden * ffn // share)
    return [
        torch.randn(size, device=DEVICE)
        for _ in range(num_experts)
        for size in sizes
        for _ in ("param", "exp_avg", "exp_avg_sq")
    ]


def snapshot_peers(tensors: Sequence[torch.Tensor]) -> Peers:
    """Return the ways of a rank's tensors to the host."""
    total = sum(each.numel() * 4 for each in tensors)
    file = mmap.mmap(-1, total + ALIGNMENT * len(tensors) + mmap.PAGESIZE)
    targets, offset = [], 0
    for each in tensors:
        targets.append(
            torch.frombuffer(file, dtype=torch.float32, count=each.numel(), offset=offset)
        )
        offset += -(-each.numel() * 4 // ALIGNMENT) * ALIGNMENT
    if DEVICE == "cuda":
        address = torch.frombuffer(file, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(file), 0))
    staging = Staging(_STAGING_BYTES, tensors[0].device)

    def packed(packings: Sequence[Packing]) -> Callable[[], object]:
        parts, offset = [], 0
        for index, tensor in enumerate(tensors):
            part = PackedPart(
                name=str(index),
                source=tensor,
                weights=None,
                dtype="F32",
                packing=packings[index % 3],
                file=file,
                offset=offset,
            )
            parts.append(part)
            offset += part.buffer_bytes(tensor.numel())
        chunks = list(cut_into_chunks(parts, staging.chunk_bytes))
        for chunk in chunks:
            chunk.finish()

        def work() -> None:
            staging.copy(chunks)
            staging.wait()

        return work

    exact = Packing.EXACT
    name = "one cudaMemcpyAsync per tensor" if DEVICE == "cuda" else "torch._foreach_copy_"
    # Per parameter of 12 bytes: all of them count as what a snapshot has to bring over.
    return {
        name: (total, lambda: torch._foreach_copy_(targets, list(tensors), non_blocking=True)),
        "staging, as it is": (total, packed([exact] * 3)),
        "staging, moments in bf16": (total, packed([exact, Packing.BF16, Packing.BF16])),
        "staging, moments in fp8-e4m3-block": (
            total,
            packed([exact, Packing.E4M3_BLOCKS, Packing.E4M3_BLOCKS]),
        ),
    }


def main() -> None:
    """Measure and print."""
    on_gpu = DEVICE == "cuda"
    options = read_options(
        mib=(2048 if on_gpu else 64, 1, "of fp32 to pack"),
        share=(1 if on_gpu else 16, 1024, "ranks that divide an expert"),
        repeats=(11, 1),
    )
    torch.manual_seed(0)
    device = torch.cuda.get_device_name() if on_gpu else "CPU, the torch reference"
    parts = [
        f"{device}; {torch.get_num_threads()} threads on the host; Python {platform.python_version()}, torch "
        f"{torch.__version__}. Median (range) of {options.repeats} turns."
    ]
    for count in (1, 16, 4096):
        peers = packing_peers(options.mib << 20, count)
        parts.append(f"{options.mib} MiB of fp32 in {count} tensors, every other one unaligned")
        parts.append(speed_table(peers, options.repeats))
    models = {
        "DeepSeek-MoE 16B, 8 experts of 2048 x 1408": (2048, 1408, 8),
        "Mixtral 8x7B, 1 expert of 4096 x 14336": (4096, 14336, 1),
    }
    for name, (hidden, ffn, num_experts) in models.items():
        tensors = expert_tensors(hidden, ffn, num_experts, options.share)
        size = sum(each.numel() * 4 for each in tensors) / 2**20
        parts.append(
            f"Snapshot: {name}, 1/{options.share} of each ({len(tensors)} tensors, {size:.0f} MiB of "
            "fp32); GB/s are of the fp32 state, so that they compare how soon training may go on"
        )
        parts.append(speed_table(snapshot_peers(tensors), options.repeats))
    show(parts, options.output)


if __name__ == "__main__":
    main()
