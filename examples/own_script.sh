#!/usr/bin/env bash
# Trains with a script that knows nothing of moe_ft: 2 ranks on this machine, of which one is killed. The arguments
# of `moe_ft launch` are the script, its own flags and Megatron's, and flags of moe_ft.
#
#   examples/own_script.sh                        # the rank is replaced, the other one keeps its process
#   examples/own_script.sh --moe-ft-repair off    # both restart
#   SHOW=all examples/own_script.sh         # and Megatron's 900 lines of arguments; output.log has them
#   STRATEGY=dense KILL=kill:0@30 examples/own_script.sh --train-iters 60
set -euo pipefail

STRATEGY=${STRATEGY:-sparse}
KILL=${KILL:-kill:1@20:backward}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
RUN_DIR=${RUN_DIR:-$ROOT/runs/own_script}

[ -d "$ROOT/.venv/bin" ] && PATH="$ROOT/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
. "$ROOT/examples/show.sh"
mkdir -p "$RUN_DIR"
rm -rf "$RUN_DIR/events"

# Of the script and of Megatron, then of moe_ft.
python -m moe_ft launch --ranks-per-node 2 "$ROOT/examples/pretrain_own.py" --base 16 \
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --ffn-hidden-size 64 \
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights \
    --expert-model-parallel-size 2 --use-distributed-optimizer --bf16 --vocab-size 64 \
    --micro-batch-size 4 --global-batch-size 16 --train-iters 40 --lr 3e-3 --log-interval 10 \
    --eval-interval 1000 --eval-iters 0 \
    --moe-ft-strategy "$STRATEGY" --moe-ft-job-id own_script --moe-ft-event-log "$RUN_DIR/events" \
    --moe-ft-inject-fault "$KILL" "$@" \
    2>&1 | tee -i "$RUN_DIR/output.log" | show "$@"
PYTHONPATH="$ROOT" python -m moe_ft report "$RUN_DIR/events"
