#!/usr/bin/env bash
# MoEvement: a sparse snapshot in every iteration, in host memory and on other nodes; recovery is exact.
#
#   examples/presets/moevement.sh examples/quickstart.sh
#   STRATEGY=none EXTRA_FLAGS=$(WINDOW=4 examples/presets/moevement.sh) sbatch ...
#
# With a command, the script runs it with the flags of the preset added; without one, it prints the flags.
set -euo pipefail

WINDOW=${WINDOW:-auto}                    # snapshots; auto: the fewest that cost no time
MAX_WINDOW=${MAX_WINDOW:-8}               # longest window that auto may choose; memory is reserved for it
REPLICATION=${REPLICATION:-auto}          # copies on other nodes
UNIT_ORDER=${UNIT_ORDER:-count}           # popularity: count, soft-count or decayed
PERSIST_DIR=${PERSIST_DIR:-}              # empty: nothing goes to storage
PERSIST_INTERVAL=${PERSIST_INTERVAL:-10}  # windows for each one on storage

FLAGS=(
    --moe-ft-strategy sparse --moe-ft-window "$WINDOW" --moe-ft-max-window "$MAX_WINDOW"
    --moe-ft-unit-order "$UNIT_ORDER" --moe-ft-replication-factor "$REPLICATION"
)
if [ -n "$PERSIST_DIR" ]; then
    FLAGS+=(--moe-ft-persist-dir "$PERSIST_DIR" --moe-ft-persist-interval "$PERSIST_INTERVAL")
fi
if [ $# -gt 0 ]; then
    exec "$@" "${FLAGS[@]}"
fi
echo "${FLAGS[*]}"
