#!/usr/bin/env bash
# Prepares days for a GPU machine without a network, on a machine that has one and no GPU, into .gpu of the checkout:
#   bash tools/gpu_day/prepare.sh [DAY...]        first and large: 20 s; nccl: 3 minutes; te: 7 to 25 minutes
# Wheels in the versions of constraints.txt; an NCCL that lets ranks share a GPU; Transformer Engine for sm_90. Prints
# the one command of each day, what it carries, and its limit of time. ENV: PYTHON (3.12), IMITATED (folder of
# imitate.sh, whose torch Transformer Engine is compiled for and tried in).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHON
MOST=$((64 << 20)) # that travel with a call
DAYS=("$@")
[ $# -gt 0 ] || DAYS=(first nccl te large)
for day in "${DAYS[@]}"; do
    case $day in
        first | nccl | te | large) ;;
        *) echo "DAYS=$day must be of first, nccl, te, large: make gpu-day-prepare DAYS=\"first nccl\"" >&2; exit 2 ;;
    esac
done
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
    { echo "PYTHON=$PYTHON must be a Python 3.12, as on the machine that wheels are for" >&2; exit 2; }

# What a machine with torch, triton and pytest lacks; py-spy shows where a step hangs.
mkdir -p .gpu/wheels
PLATFORMS=()
for each in 2_34 2_31 2_28 2_27 2_24 2_17 2_5; do PLATFORMS+=(--platform "manylinux_${each}_x86_64"); done
for each in $(grep -E '^(megatron-core|msgspec|xxhash)==' constraints.txt) py-spy; do
    name=${each%%=*}
    rm -f .gpu/wheels/"${name//-/_}"-*.whl
    "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --abi cp312 --abi abi3 --abi none "${PLATFORMS[@]}" --platform manylinux2014_x86_64 \
        --platform manylinux1_x86_64 --platform any -d .gpu/wheels "$each"
done
for day in "${DAYS[@]}"; do
    case $day in
        nccl) [ -s .gpu/nccl/libnccl.so.2.xz ] || bash tools/gpu_day/nccl_build.sh .gpu/nccl/libnccl.so.2.xz ;;
        te) [ -s .gpu/te/te.tar.xz ] || bash tools/gpu_day/te_build.sh .gpu/te/te.tar.xz ;;
    esac
done

# Tracked files travel, those that git does not ignore, and what is carried.
tree=$(git ls-files -coz --exclude-standard | xargs -0 du -cb --apparent-size 2>/dev/null | awk 'END {print $1}')
"$PYTHON" -m tools.gpu_day --carried "${DAYS[@]}" | while read -r day budget limit folders; do
    all=$tree
    for each in $folders; do all=$((all + $(du -sb "$each" | cut -f1))); done
    echo "day $day: $((all >> 20)) of $((MOST >> 20)) MiB travel"
    [ "$all" -lt "$MOST" ] || { echo "  too much: remove or ignore files" >&2; exit 1; }
    echo "  command     BUDGET_S=$budget bash tools/gpu_day/on_device.sh $day"
    echo "  carry       $folders"
    echo "  time limit  $limit s"
done
