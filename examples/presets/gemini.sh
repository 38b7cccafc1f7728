#!/usr/bin/env bash
# Gemini: a checkpoint in the memory of other nodes every iteration (or every INTERVAL), storage rarely.
#
#   examples/presets/gemini.sh examples/quickstart.sh
#   STRATEGY=none EXTRA_FLAGS=$(INTERVAL=5 PERSIST_DIR=/scratch/run/checkpoints examples/presets/gemini.sh) sbatch ...
#
# With a command, the script runs it with the flags of the preset added; without one, it prints the flags.
set -euo pipefail

INTERVAL=${INTERVAL:-1}                  # iterations
REPLICAS=${REPLICAS:-auto}               # copies on other nodes; auto: 2, or what the nodes allow
PERSIST_DIR=${PERSIST_DIR:-}             # empty: nothing goes to storage
PERSIST_INTERVAL=${PERSIST_INTERVAL:-500}  # checkpoints in memory for each one on storage

FLAGS=(
    --moe-ft-strategy dense --moe-ft-interval "$INTERVAL" --moe-ft-replication-factor "$REPLICAS"
)
if [ -n "$PERSIST_DIR" ]; then
    FLAGS+=(--moe-ft-persist-dir "$PERSIST_DIR" --moe-ft-persist-interval "$PERSIST_INTERVAL")
fi
if [ $# -gt 0 ]; then
    exec "$@" "${FLAGS[@]}"
fi
echo "${FLAGS[*]}"
