#!/usr/bin/env bash
# Says with `moe_ft plan` what a model file of this folder costs: memory, storage, and what a failure loses.
#
#   examples/slurm/models/plan.sh deepseek_moe_16b
#   STRATEGY=dense NODES=8 examples/slurm/models/plan.sh qwen3_30b_a3b
#
# Bandwidths are of one rank; measure your own with `python -m moe_ft doctor`. Further arguments go to plan.
set -euo pipefail

FOLDER=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$FOLDER/../../.." && pwd)
[ -d "$ROOT/.venv/bin" ] && PATH="$ROOT/.venv/bin:$PATH"

BANDWIDTH=${BANDWIDTH:-25GB}                   # device to host: PCIe 5
NETWORK_BANDWIDTH=${NETWORK_BANDWIDTH:-1.25e9}  # to other nodes: 100 Gbit/s, which 8 ranks share
STORAGE_BANDWIDTH=${STORAGE_BANDWIDTH:-250MB}  # to storage: 2 GB/s of a node, which 8 ranks share
PERSIST_DIR=${PERSIST_DIR:-/persist}           # any: plan writes nothing
EXTRA_FLAGS=${EXTRA_FLAGS:-}                   # of training, such as --moe-ft-breakpoints

MODEL=${1:?name a model file of this folder, without .sh}
shift
# shellcheck source=/dev/null
. "$FOLDER/$MODEL.sh"

options=(--iteration-s "$ITERATION_S" --bandwidth "$BANDWIDTH" --storage-bandwidth "$STORAGE_BANDWIDTH")
case "$STRATEGY" in sparse | selective) options+=(--network-bandwidth "$NETWORK_BANDWIDTH") ;; esac
# shellcheck disable=SC2206  # EXTRA_FLAGS holds several words
command=(
    torchrun --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" pretrain_gpt_moe.py
    "${MODEL_FLAGS[@]}" "${TRAINING_FLAGS[@]}" "${LAYOUT_FLAGS[@]}" "${TOKENIZER_FLAGS[@]}"
    --moe-ft-persist-dir "$PERSIST_DIR" "${FAULT_TOLERANCE_FLAGS[@]}" $EXTRA_FLAGS
)
cd "$ROOT"
exec python -m moe_ft plan "${options[@]}" "$@" -- "${command[@]}"
