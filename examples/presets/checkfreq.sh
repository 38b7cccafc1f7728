#!/usr/bin/env bash
# CheckFreq: every checkpoint goes to storage, as often as possible at a cost of at most 3 % of the training time.
#
#   PERSIST_DIR=/scratch/run/checkpoints examples/presets/checkfreq.sh examples/quickstart.sh
#   STRATEGY=none EXTRA_FLAGS=$(PERSIST_DIR=/scratch/run/checkpoints examples/presets/checkfreq.sh) sbatch ...
#
# With a command, the script runs it with the flags of the preset added; without one, it prints the flags.
set -euo pipefail

PERSIST_DIR=${PERSIST_DIR:?set PERSIST_DIR to a directory or fsspec URL that all nodes share}
OVERHEAD_LIMIT=${OVERHEAD_LIMIT:-0.03}

FLAGS=(
    --moe-ft-strategy dense
    --moe-ft-interval auto --moe-ft-overhead-limit "$OVERHEAD_LIMIT"
    --moe-ft-replication-factor 0
    --moe-ft-persist-dir "$PERSIST_DIR" --moe-ft-persist-interval 1
)
if [ $# -gt 0 ]; then
    exec "$@" "${FLAGS[@]}"
fi
echo "${FLAGS[*]}"
