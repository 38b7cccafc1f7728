#!/usr/bin/env bash
# Lazarus: replicas of experts follow the load, each expert has at least F, and training continues with the nodes that
# are left. Checkpoints are those of `dense`, in host memory and on other nodes: they bring the state of lost nodes,
# which replicas of experts do not here (docs/expert_slots.md). With PERSIST_DIR some also go to storage.
#
#   export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 MOE_FT_KEEP_TOKEN=...  # a secret of all nodes
#   examples/presets/lazarus.sh torchrun --nnodes 2:4 --nproc-per-node 1 --rdzv-backend c10d ... \
#       -m moe_ft keep --ranks-per-node 8 -- pretrain_gpt_moe.py ...
#   STRATEGY=none EXTRA_FLAGS=$(SLOTS=8 examples/presets/lazarus.sh) sbatch ...
#
# With a command, the script runs it with the flags of the preset added; without one, it prints the flags. The job
# leaves --expert-model-parallel-size out. docs/elastic.md has what torchrun needs to lose and get nodes.
set -euo pipefail

SLOTS=${SLOTS:-8}                          # of each rank in an MoE layer
REBALANCE_INTERVAL=${REBALANCE_INTERVAL:-200}  # iterations between new tables
F=${F:-2}                                  # least slots of an expert
INTERVAL=${INTERVAL:-1}                    # iterations between checkpoints
REPLICAS=${REPLICAS:-auto}                 # other nodes that keep a copy; auto: 2 where there are three nodes
PERSIST_DIR=${PERSIST_DIR:-}               # empty: nothing goes to storage
PERSIST_INTERVAL=${PERSIST_INTERVAL:-100}  # checkpoints in memory for each one on storage

FLAGS=(
    --moe-ft-expert-slots "$SLOTS" --moe-ft-rebalance-interval "$REBALANCE_INTERVAL" --moe-ft-min-replicas "$F"
    --moe-ft-elastic --moe-ft-layout any --calculate-per-token-loss --moe-token-dispatcher-type alltoall
    --moe-ft-strategy dense --moe-ft-interval "$INTERVAL" --moe-ft-replication-factor "$REPLICAS"
)
if [ -n "$PERSIST_DIR" ]; then
    FLAGS+=(--moe-ft-persist-dir "$PERSIST_DIR" --moe-ft-persist-interval "$PERSIST_INTERVAL")
fi
if [ $# -gt 0 ]; then
    exec "$@" "${FLAGS[@]}"
fi
echo "${FLAGS[*]}"
