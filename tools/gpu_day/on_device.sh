#!/usr/bin/env bash
# Runs a day on a lent machine, in the root of a copy of the project that brought .gpu along:
#   BUDGET_S=390 bash tools/gpu_day/on_device.sh DAY [STEP...]
# Results: $OUT/summary.md, result.json, logs.tar.gz, setup.log. Nothing here touches the settings of the card.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
BEGIN=$SECONDS OUT=${OUT:-runs/gpu_day} BUDGET_S=${BUDGET_S:-390} PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
# Two copies of 6 GiB and several jobs must fit, and a tmpfs may have been made when the machine was small.
size=$(df --output=size -B1M /dev/shm | tail -1)
if [ -e /dev/nvidiactl ] && [ "$size" -lt 49152 ]; then
    mount -o remount,size=80G /dev/shm >>"$OUT/setup.log" 2>&1 || echo "/dev/shm stays as it is" >>"$OUT/setup.log"
fi
df -h /dev/shm >>"$OUT/setup.log"
rest=$((BUDGET_S - (SECONDS - BEGIN)))
# The guard ends a runner that hangs: a loan has a limit.
timeout --kill-after=5 $((rest + 15)) "$PYTHON" -m tools.gpu_day "$@" --budget-s "$rest" --folder "$OUT" 2>&1 |
    tee -a "$OUT/setup.log"
exit "${PIPESTATUS[0]}"
