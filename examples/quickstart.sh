#!/usr/bin/env bash
# Trains a small Mixture-of-Experts GPT on real text: 4 ranks on this machine, 2 pipeline stages, experts
# spread over 2 ranks. Runs with or without a GPU. Further arguments go to pretrain_gpt_moe.py.
#
#   examples/quickstart.sh
#   TEXT_DIR=/some/texts RUN_DIR=runs/mine examples/quickstart.sh --train-iters 500
#   MAX_RESTARTS=3 examples/quickstart.sh --moe-ft-strategy dense --moe-ft-inject-fault kill:3@20
#   SHOW=all examples/quickstart.sh     # and Megatron's 900 lines of arguments; output.log has them
set -euo pipefail

NUM_RANKS=${NUM_RANKS:-4}
PIPELINE_PARALLEL=${PIPELINE_PARALLEL:-2}
EXPERT_PARALLEL=${EXPERT_PARALLEL:-2}
TRAIN_ITERATIONS=${TRAIN_ITERATIONS:-200}
TEXT_DIR=${TEXT_DIR:-}                  # empty: the source of Python's standard library
MAX_RESTARTS=${MAX_RESTARTS:-0}
MASTER_PORT=${MASTER_PORT:-29511}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
RUN_DIR=${RUN_DIR:-$ROOT/runs/quickstart}

[ -d "$ROOT/.venv/bin" ] && PATH="$ROOT/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export MEGATRON_LOGGING_LEVEL=${MEGATRON_LOGGING_LEVEL:-40}
. "$ROOT/examples/show.sh"

if ! [[ $MASTER_PORT =~ ^[0-9]{1,5}$ ]]; then
    echo "quickstart.sh: error: MASTER_PORT=$MASTER_PORT must be a port number. Set it to a free one." >&2
    exit 2
fi
if (: <>"/dev/tcp/localhost/$MASTER_PORT") 2>/dev/null; then
    echo "quickstart.sh: error: MASTER_PORT=$MASTER_PORT is in use: ranks must meet at a free port." \
        "Set MASTER_PORT to another one." >&2
    exit 2
fi
if ! mkdir -p "$RUN_DIR"; then
    echo "quickstart.sh: error: RUN_DIR=$RUN_DIR must be a folder, or a path where one can be created." \
        "Set RUN_DIR to another one." >&2
    exit 2
fi
exec 9>"$RUN_DIR/lock"  # torchrun and its ranks close it
if ! flock --nonblock 9; then
    echo "quickstart.sh: error: RUN_DIR=$RUN_DIR is used by another run. Set RUN_DIR to another folder," \
        "or end that run." >&2
    exit 2
fi
rm -rf "$RUN_DIR/events"
# Megatron caches the order of samples by the dataset's path: other text needs a new cache.
if [ ! -f "$RUN_DIR/text.idx" ] || [ "$(cat "$RUN_DIR/text.source" 2>/dev/null)" != "$TEXT_DIR" ]; then
    rm -rf "$RUN_DIR/cache"
    python "$ROOT/tools/prepare_text.py" ${TEXT_DIR:+"$TEXT_DIR"} --output-prefix "$RUN_DIR/text"
    echo "$TEXT_DIR" >"$RUN_DIR/text.source"
fi
# A rank needs a GPU of its own: with fewer GPUs than ranks all run on the CPU.
if [ "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" -lt "$NUM_RANKS" ]; then
    export CUDA_VISIBLE_DEVICES=
fi

MODEL=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256
    --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01
)
# shellcheck disable=SC2054  # the comma belongs to Megatron's --split
TRAINING=(
    --micro-batch-size 4 --global-batch-size 16 --train-iters "$TRAIN_ITERATIONS"
    --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 10 --lr-decay-style cosine --clip-grad 1.0
    --bf16 --use-distributed-optimizer --log-interval 10 --eval-interval 100 --eval-iters 2
    --data-path "$RUN_DIR/text" --data-cache-path "$RUN_DIR/cache" --split 98,1,1
    --tokenizer-type NullTokenizer --vocab-size 256
    --tensorboard-dir "$RUN_DIR/tensorboard" --no-one-logger
)
LAYOUT=(
    --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
    --expert-model-parallel-size "$EXPERT_PARALLEL"
)

status=0
torchrun --nproc-per-node 1 --max-restarts "$MAX_RESTARTS" --rdzv-id quickstart \
    --rdzv-backend c10d --rdzv-endpoint "localhost:$MASTER_PORT" \
    -m moe_ft keep --ranks-per-node "$NUM_RANKS" -- "$ROOT/pretrain_gpt_moe.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" --moe-ft-event-log "$RUN_DIR/events" "$@" \
    2>&1 | tee -i "$RUN_DIR/output.log" | show "$@" || status=$?

echo
if (cd "$RUN_DIR/events" 2>/dev/null && compgen -G "rank_*.jsonl" >/dev/null); then
    python -m moe_ft report "$RUN_DIR/events" || true
fi
echo "output      $RUN_DIR/output.log"
echo "TensorBoard $RUN_DIR/tensorboard"
exit "$status"
