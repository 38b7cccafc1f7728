#!/usr/bin/env bash
# MoEtion: a checkpoint in every iteration, of as many experts as fit into what the rank can copy and send
# meanwhile, in host memory and on other nodes. With PERSIST_DIR some checkpoints also go to storage.
#
#   examples/presets/moetion.sh examples/quickstart.sh
#   STRATEGY=none EXTRA_FLAGS=$(RULE=paper examples/presets/moetion.sh) sbatch ...
#
# With a command, the script runs it with the flags of the preset added; without one, it prints the flags.
set -euo pipefail

INTERVAL=${INTERVAL:-1}                    # iterations between checkpoints
LOCAL_BUDGET=${LOCAL_BUDGET:-auto}         # bytes of a rank in memory; auto: measured
REMOTE_BUDGET=${REMOTE_BUDGET:-auto}       # of these to each peer; auto: measured
RULE=${RULE:-age}                          # paper: MoEtion's Algorithm 1 as printed
REPLICAS=${REPLICAS:-auto}                 # other nodes that keep a copy; auto: 2 where there are three nodes
PERSIST_DIR=${PERSIST_DIR:-}               # empty: nothing goes to storage
PERSIST_INTERVAL=${PERSIST_INTERVAL:-100}  # checkpoints in memory for each one on storage

# Not part of the preset: gradients in the place of state (Algorithm 3), and copies in the bubbles of the pipeline
# (Algorithm 4). docs/selective.md says what differs.
FLAGS=(
    --moe-ft-strategy selective --moe-ft-interval "$INTERVAL" --moe-ft-selective-rule "$RULE"
    --moe-ft-local-budget "$LOCAL_BUDGET" --moe-ft-remote-budget "$REMOTE_BUDGET"
    --moe-ft-replication-factor "$REPLICAS"
)
if [ -n "$PERSIST_DIR" ]; then
    FLAGS+=(--moe-ft-persist-dir "$PERSIST_DIR" --moe-ft-persist-interval "$PERSIST_INTERVAL")
fi
if [ $# -gt 0 ]; then
    exec "$@" "${FLAGS[@]}"
fi
echo "${FLAGS[*]}"
