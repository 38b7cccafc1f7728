# A small model on CPUs, to try examples/slurm/pretrain_moe.sbatch where there are no GPUs: two nodes, one rank each.
# shellcheck shell=bash disable=SC2034  # the batch script reads the variables
#
#   python tools/prepare_text.py --output-prefix "$RUN_DIR/text"
#   DATA_PREFIX=$RUN_DIR/text MODEL=examples/slurm/models/small_cpu.sh sbatch --nodes 2 \
#       --ntasks-per-node 1 --cpus-per-task 1 --gpus-per-node 0 examples/slurm/pretrain_moe.sbatch
RANKS_PER_NODE=${RANKS_PER_NODE:-1}
STRATEGY=${STRATEGY:-sparse}
TRAIN_ITERATIONS=${TRAIN_ITERATIONS:-200}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

MODEL_FLAGS=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256
    --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01
)
# shellcheck disable=SC2054  # the comma belongs to Megatron's --split
TRAINING_FLAGS=(
    --micro-batch-size 4 --global-batch-size 16 --train-iters "$TRAIN_ITERATIONS"
    --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 10 --lr-decay-style cosine --clip-grad 1.0
    --bf16 --use-distributed-optimizer --log-interval 10 --eval-interval 100 --eval-iters 2
    --split 98,1,1
)
LAYOUT_FLAGS=(--expert-model-parallel-size 2)
TOKENIZER_FLAGS=(--tokenizer-type NullTokenizer --vocab-size 256)

case "$STRATEGY" in
    none) FAULT_TOLERANCE_FLAGS=() ;;
    dense) FAULT_TOLERANCE_FLAGS=(--moe-ft-strategy dense --moe-ft-interval 1) ;;
    sparse) FAULT_TOLERANCE_FLAGS=(--moe-ft-strategy sparse --moe-ft-window 4) ;;
    partial) FAULT_TOLERANCE_FLAGS=(--moe-ft-strategy partial --moe-ft-k-snapshot 2) ;;
    selective) FAULT_TOLERANCE_FLAGS=(--moe-ft-strategy selective) ;;
    *) echo "STRATEGY=$STRATEGY must be none, dense, sparse, partial or selective" >&2 && exit 2 ;;
esac
