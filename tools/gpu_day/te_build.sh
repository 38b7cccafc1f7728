#!/usr/bin/env bash
# Makes TARGET (te.tar.xz, 29 MB): Transformer Engine for torch 2.11 and sm_90, built without a GPU. Goes on where an
# earlier run was ended. Its 33 files share a precompiled header.
#   bash tools/gpu_day/te_build.sh TARGET [WORK_FOLDER]      ENV: PYTHON (3.12 with setuptools and torch), JOBS=2,
#       IMITATED (folder of imitate.sh, whose headers are used and where the result is imported)
set -euo pipefail
TARGET=$(realpath -m "$1") WORK=$(realpath -m "${2:-${TMPDIR:-/tmp}/moe_ft_gpu/te}")
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VERSION=${TE_VERSION:-2.20.2} TORCH=${TORCH_VERSION:-2.11.0} PYTHON=${PYTHON:-python3} JOBS=${JOBS:-2}
[ -z "${IMITATED:-}" ] || PYTHON=$IMITATED/bin/python
PYTHON=$(realpath -s "$(command -v "$PYTHON")")
BEGIN=$SECONDS
note() { echo "$((SECONDS - BEGIN)) s: $*"; }
"$PYTHON" -c 'import sys, setuptools, torch; assert sys.version_info[:2] == (3, 12)' ||
    { echo "PYTHON must be a Python 3.12 with setuptools and torch (.venv/bin/python)" >&2; exit 2; }
mkdir -p "$WORK/o" "$WORK/pch" "$(dirname "$TARGET")" && cd "$WORK"

# 1. Packages: the core library is a wheel, the part for torch only source. Headers of torch 2.11 from its wheel,
#    those of CUDA from what torch brought into PYTHON's environment.
PIP=("$PYTHON" -m pip download -q --disable-pip-version-check --no-deps)
compgen -G "transformer_engine_cu13-$VERSION-*.whl" >/dev/null ||
    "${PIP[@]}" "transformer-engine==$VERSION" "transformer-engine-cu13==$VERSION"
compgen -G "transformer_engine_torch-$VERSION.tar.gz" >/dev/null ||
    "${PIP[@]}" --no-binary :all: --no-build-isolation "transformer-engine-torch==$VERSION"
compgen -G "pydantic-*.whl" >/dev/null || # which the lent machine lacks
    "${PIP[@]}" --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection
# Headers of CUDA that torch's wheels do not bring (crt/, cuda/std, nv/target).
[ -d cuda_headers ] || {
    "${PIP[@]}" nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
    for each in nvidia_cuda_crt-*.whl nvidia_cuda_cccl-*.whl; do "$PYTHON" -m zipfile -e "$each" cuda_headers.tmp; done
    mv cuda_headers.tmp cuda_headers
}
[ -d src ] || { mkdir -p src.tmp && tar xf "transformer_engine_torch-$VERSION.tar.gz" -C src.tmp --strip-components 1 && mv src.tmp src; }
SITE=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ -n "${IMITATED:-}" ]; then
    HEADERS=$SITE/torch/include
else
    compgen -G "torch-$TORCH-cp312-*.whl" >/dev/null ||
        "${PIP[@]}" --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 "torch==$TORCH"
    [ -d torch_headers ] || "$PYTHON" - torch-"$TORCH"-cp312-*.whl <<'PY'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall("torch_headers.tmp", [n for n in wheel.namelist() if n.startswith("torch/include/")])
PY
    [ -d torch_headers ] || mv torch_headers.tmp torch_headers
    HEADERS=$WORK/torch_headers/torch/include
fi
note "packages are there"

# 2. Compile. Speed of this code does not matter: it only calls the core library.
INCLUDES=(-I"$PWD/src/common_headers" -I"$PWD/src/common_headers/common" -I"$PWD/src/common_headers/common/include" -I"$PWD/src/csrc")
for each in "$HEADERS" "$HEADERS"/torch/csrc/api/include "$SITE"/nvidia/*/include cuda_headers/nvidia/*/include cuda_headers/nvidia/*/include/cccl; do
    [ -d "$each" ] || continue
    each=$(realpath "$each") INCLUDES+=(-isystem "$each"); done
INCLUDES+=(-isystem "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')")
FLAGS=(-std=c++20 -O0 -g0 -fPIC -fvisibility=hidden -w -DTORCH_EXTENSION_NAME=transformer_engine_torch -DTORCH_API_INCLUDE_EXTENSION_H -D_GLIBCXX_USE_CXX11_ABI=1)
printf '#include "common.h"\n#include "pybind.h"\n' >pch/all.h
[ -e pch/all.h.gch ] || { g++ "${FLAGS[@]}" "${INCLUDES[@]}" -x c++-header pch/all.h -o pch/tmp && mv pch/tmp pch/all.h.gch; note "header is compiled"; }
export SRC=$PWD/src/csrc
compile() { local o; o=o/$(echo "${1#"$SRC"/}" | tr / _).o; [ -e "$o" ] || { g++ "${@:2}" -c "$1" -o "$o.tmp" && mv "$o.tmp" "$o"; }; }
export -f compile
# The largest first, so that no core waits for the last one.
find "$SRC" -name '*.cpp' -printf '%s %p\n' | sort -rn | cut -d' ' -f2 |
    xargs -P "$JOBS" -I{} bash -c 'compile "$@"' _ {} "${FLAGS[@]}" -Ipch -include all.h "${INCLUDES[@]}" || true
total=$(find "$SRC" -name '*.cpp' | wc -l) made=$(find o -name '*.o' | wc -l)
note "$made of $total files are compiled"
[ "$made" = "$total" ] || exit 3

# 3. Link. Libraries of torch are named, not needed: at run time torch has loaded them before.
mkdir -p stubs
for each in libc10.so libc10_cuda.so libtorch.so libtorch_cpu.so libtorch_cuda.so libtorch_python.so libcudart.so.13; do
    printf '' | gcc -shared -fPIC -x c - -Wl,-soname,"$each" -o "stubs/$each"
done
EXTENSION=transformer_engine_torch.cpython-312-x86_64-linux-gnu.so
g++ -shared -o "$EXTENSION" o/*.o -Wl,--no-as-needed stubs/*.so stubs/libcudart.so.13
strip --strip-unneeded "$EXTENSION"

# 4. Pack: one architecture, what torch needs, the extension where Transformer Engine looks for it.
rm -rf pack && mkdir pack
"$PYTHON" -m zipfile -e transformer_engine_cu13-"$VERSION"-*.whl pack
"$PYTHON" -m zipfile -e transformer_engine-"$VERSION"-*.whl pack
for each in pydantic-*.whl pydantic_core-*.whl annotated_types-*.whl typing_inspection-*.whl; do "$PYTHON" -m zipfile -e "$each" pack; done
rm -rf pack/transformer_engine/jax pack/transformer_engine/wheel_lib/nccl_ep
mv pack/transformer_engine/wheel_lib/libtransformer_engine.so whole.so
"$PYTHON" "$HERE/one_arch.py" whole.so pack/transformer_engine/wheel_lib/libtransformer_engine.so "${ARCH:-90}"
rm whole.so
strip --strip-unneeded pack/transformer_engine/wheel_lib/libtransformer_engine.so
cp "$EXTENSION" pack/transformer_engine/wheel_lib/
META=pack/transformer_engine_torch-$VERSION.dist-info
mkdir -p "$META" && printf 'Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: %s\n' "$VERSION" >"$META/METADATA"
# libcublasLt of torch 2.11 lacks one function of grouped products, which nothing here calls; the linker wants its name.
printf 'int cublasLtGroupedMatrixLayoutInit_internal(void) { return 15; }\n' | gcc -shared -fPIC -x c - -o pack/libte_stub.so
tar c -C pack . | xz -6 -T2 >"$TARGET.tmp"
mv "$TARGET.tmp" "$TARGET"
note "packed"; ls -la "$TARGET"

# 5. Import, where there is an imitated machine.
[ -z "${IMITATED:-}" ] || PYTHONPATH=$PWD/pack LD_PRELOAD=$PWD/pack/libte_stub.so "$PYTHON" -W ignore -c '
import torch  # first: it loads the NCCL that the core library is linked to
import transformer_engine, transformer_engine.pytorch as te, transformer_engine_torch as tex
print("imported: Transformer Engine", transformer_engine.__version__, "with", len(dir(tex)), "functions")'
