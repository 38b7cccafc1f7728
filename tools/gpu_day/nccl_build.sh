#!/usr/bin/env bash
# Makes TARGET (libnccl.so.2.xz, 34 MB) of the package nvidia-nccl-cu13, with machine code of sm_90 alone. NCCL lets
# ranks share a GPU since 2.30, with NCCL_MULTI_RANK_GPU_ENABLE=1. Its ABI has stayed: torch takes it from LD_PRELOAD.
#   bash tools/gpu_day/nccl_build.sh TARGET [WORK_FOLDER]        ENV: PYTHON (3.12), NCCL_VERSION, ARCH
set -euo pipefail
TARGET=$(realpath -m "$1") WORK=${2:-${TMPDIR:-/tmp}/moe_ft_gpu/nccl}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VERSION=${NCCL_VERSION:-2.31.2} PYTHON=$(realpath -s "$(command -v "${PYTHON:-python3}")")
mkdir -p "$WORK" "$(dirname "$TARGET")"
cd "$WORK"
compgen -G "nvidia_nccl_cu13-$VERSION-*.whl" >/dev/null ||
    "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux_2_18_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d . "nvidia-nccl-cu13==$VERSION"
rm -rf unpacked libnccl.so.2
"$PYTHON" - nvidia_nccl_cu13-"$VERSION"-*.whl <<'PY'
import sys, zipfile
zipfile.ZipFile(sys.argv[1]).extract("nvidia/nccl/lib/libnccl.so.2", "unpacked")
PY
"$PYTHON" "$HERE/one_arch.py" unpacked/nvidia/nccl/lib/libnccl.so.2 libnccl.so.2 "${ARCH:-90}"
strip --strip-unneeded libnccl.so.2
xz -6 -T2 -c libnccl.so.2 >"$TARGET.tmp"
mv "$TARGET.tmp" "$TARGET"
rm -rf unpacked
# It must load.
"$PYTHON" - "$PWD/libnccl.so.2" <<'PY'
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(f"NCCL {version.value}")
PY
ls -la "$TARGET"
