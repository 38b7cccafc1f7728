#!/usr/bin/env bash
# MoC-System: non-expert state and a few experts of each layer in every checkpoint, in the node's own memory and,
# with PERSIST_DIR, on storage; what a failure loses is counted, and more experts are saved when it adds up.
#
#   examples/presets/moc.sh examples/quickstart.sh
#   EXTRA_FLAGS=$(PERSIST_DIR=/scratch/run/checkpoints examples/presets/moc.sh) sbatch ...
#
# With a command, runs it with the preset's flags behind its own; without one, prints the flags.
set -euo pipefail

INTERVAL=${INTERVAL:-auto}               # iterations; auto: the smallest that storage and 3 % overhead allow
K_SNAPSHOT=${K_SNAPSHOT:-auto}           # experts per layer; auto: as many as forward and backward hide
K_PERSIST=${K_PERSIST:-1}                # of them to storage
PLT_LIMIT=${PLT_LIMIT:-0.0375}           # k doubles when the next failure might lose more than this proportion
PERSIST_DIR=${PERSIST_DIR:-}             # empty: nothing goes to storage, and what a lost node had is gone
PERSIST_INTERVAL=${PERSIST_INTERVAL:-1}  # checkpoints in memory for each one on storage

# MoC has no copies on other nodes. Its adaptive sharding is for state that ranks hold alike: where
# --use-distributed-optimizer is left out, add --moe-ft-sharding adaptive.
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
