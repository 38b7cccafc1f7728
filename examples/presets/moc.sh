#!/usr/bin/env bash
# MoC-System: every checkpoint holds the non-expert state and a few experts of each layer, in the memory of the
# node and, with PERSIST_DIR, on storage. Lost tokens are counted, and k grows as they add up.
#
#   examples/presets/moc.sh examples/quickstart.sh
#   STRATEGY=none EXTRA_FLAGS=$(PERSIST_DIR=/scratch/run/checkpoints examples/presets/moc.sh) sbatch ...
#
# With a command, the script runs it with the flags of the preset added; without one, it prints the flags.
set -euo pipefail

INTERVAL=${INTERVAL:-auto}               # iterations; auto: the smallest that storage and 3 % overhead allow
K_SNAPSHOT=${K_SNAPSHOT:-auto}           # experts per layer; auto: as many as forward and backward hide
K_PERSIST=${K_PERSIST:-1}                # of these go to storage
PLT_LIMIT=${PLT_LIMIT:-0.0375}           # k doubles when the next failure might lose more than this proportion
PERSIST_DIR=${PERSIST_DIR:-}             # empty: nothing goes to storage, and the state of a lost node is gone
PERSIST_INTERVAL=${PERSIST_INTERVAL:-1}  # checkpoints in memory for each one on storage

# MoC keeps no copies on other nodes. Its adaptive sharding divides state that several ranks hold: without
# --use-distributed-optimizer, add --moe-ft-sharding adaptive.
FLAGS=(
    --moe-ft-strategy partial --moe-ft-interval "$INTERVAL" --moe-ft-replication-factor 0
    --moe-ft-k-snapshot "$K_SNAPSHOT" --moe-ft-dynamic-k --moe-ft-plt-limit "$PLT_LIMIT"
)
if [ -n "$PERSIST_DIR" ]; then
    FLAGS+=(
        --moe-ft-persist-dir "$PERSIST_DIR" --moe-ft-persist-interval "$PERSIST_INTERVAL"
        --moe-ft-k-persist "$K_PERSIST"
    )
fi
if [ $# -gt 0 ]; then
    exec "$@" "${FLAGS[@]}"
fi
echo "${FLAGS[*]}"
