#!/usr/bin/env bash
# SYMI: replicas of experts follow the tokens of the iteration before, and no optimizer state moves. Checkpoints are
# those of `dense`, in host memory and on other nodes: replicas of experts do not replace them (docs/expert_slots.md).
# With PERSIST_DIR some also go to storage. F=2 gives each expert two replicas, as Lazarus does.
#
#   examples/presets/symi.sh examples/quickstart.sh
#   STRATEGY=none EXTRA_FLAGS=$(SLOTS=8 examples/presets/symi.sh) sbatch ...
#
# With a command, the script runs it with the flags of the preset added; without one, it prints the flags. The job
# leaves --expert-model-parallel-size out. SYMI drops tokens: --moe-expert-capacity-factor 1.0 is the job's own flag.
set -euo pipefail

SLOTS=${SLOTS:-4}                          # of each rank in an MoE layer
REBALANCE_INTERVAL=${REBALANCE_INTERVAL:-1}  # iterations between new tables
F=${F:-1}                                  # least slots of an expert
INTERVAL=${INTERVAL:-1}                    # iterations between checkpoints
REPLICAS=${REPLICAS:-auto}                 # other nodes that keep a copy; auto: 2 where there are three nodes
PERSIST_DIR=${PERSIST_DIR:-}               # empty: nothing goes to storage
PERSIST_INTERVAL=${PERSIST_INTERVAL:-100}  # checkpoints in memory for each one on storage

FLAGS=(
    --moe-ft-expert-slots "$SLOTS" --moe-ft-rebalance-interval "$REBALANCE_INTERVAL" --moe-ft-min-replicas "$F"
    --moe-ft-strategy dense --moe-ft-interval "$INTERVAL" --moe-ft-replication-factor "$REPLICAS"
)
if [ -n "$PERSIST_DIR" ]; then
    FLAGS+=(--moe-ft-persist-dir "$PERSIST_DIR" --moe-ft-persist-interval "$PERSIST_INTERVAL")
fi
if [ $# -gt 0 ]; then
    exec "$@" "${FLAGS[@]}"
fi
echo "${FLAGS[*]}"
