"""A shared library with the machine code of one GPU architecture: zeros in place of the rest compress well.

    python tools/gpu_day/one_arch.py IN.so OUT.so [ARCH, as 90]

Headers and offsets stay, so the library loads as before, and its kernels run on devices of that architecture
alone. PTX of others goes too.
"""

import struct
import sys
from pathlib import Path

MAGIC = struct.pack(
    "<I", 0xBA55ED50
)  # of a fat binary, which holds entries for several architectures


def main() -> None:
    """Clear all entries of fat binaries but those of one architecture."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    arch = int(sys.argv[3]) if len(sys.argv) > 3 else 90
    data = bytearray(source.read_bytes())
    place = kept = cleared = 0
    while (place := data.find(MAGIC, place)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, place)
        if (header, version) != (16, 1) or place + header + size > len(data):
            place += 4
            continue
        entry, end = place + header, place + header + size
        while entry + 32 <= end:
            _, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            if entry_header < 32:
                break
            (own,) = struct.unpack_from("<I", data, entry + 28)
            if own == arch:
                kept += entry_size
            else:
                start = entry + entry_header
                data[start : start + entry_size] = bytes(entry_size)
                cleared += entry_size
            entry += entry_header + entry_size
        place = end
    target.write_bytes(data)
    print(f"{source.name}: kept {kept >> 20} MiB of sm_{arch}, cleared {cleared >> 20} MiB")
    if not kept:
        sys.exit("nothing for this architecture")


if __name__ == "__main__":
    main()
