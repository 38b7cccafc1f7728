# Mixtral 8x7B: 46.7e9 parameters, 12.9e9 for a token; 4 nodes of 8 GPUs with 80 GB.
# shellcheck shell=bash disable=SC2034  # the batch script reads the variables
#
# The fullest GPU has 29 GB of weights, gradients and optimizer, and about 4 GB of activations.
# Host memory of a node, most bytes of a checkpoint, and what a failure costs, as plan.sh says:
#
# strategy  memory  checkpoint  every          repeated           updates lost    with all nodes
# ----------------------------------------------------------------------------------------------
# dense     705 GB  560 GB      50 iterations  1 to 2 iterations  none            none
# sparse    976 GB  781 GB      50 iterations  1 to 2 iterations  none            none
# partial   865 GB  87 GB       50 iterations  1 to 2 iterations  1.5 iterations  175 iterations
RANKS_PER_NODE=${RANKS_PER_NODE:-8}
NODES=${NODES:-4}                                # 32 GPUs: 4 stages of 8 ranks, each with one of the experts
ITERATION_S=${ITERATION_S:-34}                   # for plan: 4/3 x 6 x 12.9e9 x 4.2e6 tokens at 400 TFLOP/s a GPU
SEQ_LENGTH=${SEQ_LENGTH:-4096}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1024}     # sequences: 4.2e6 tokens
TRAIN_ITERATIONS=${TRAIN_ITERATIONS:-250000}     # 1e12 tokens
TOKENIZER_MODEL=${TOKENIZER_MODEL:-mistralai/Mixtral-8x7B-v0.1}  # or its directory, for nodes without internet
REPLICAS=${REPLICAS:-1}                          # two nodes of four that fail at once are rare
PERSIST_INTERVAL=${PERSIST_INTERVAL:-50}         # snapshots: a checkpoint on storage every half hour
K_SNAPSHOT=${K_SNAPSHOT:-2}                      # partial: a quarter of the 8 experts
K_PERSIST=${K_PERSIST:-1}                        # partial: an eighth

MODEL_FLAGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --moe-ffn-hidden-size 14336  # all layers are MoE
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128  # four queries a key
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear        # as Llama
    --position-embedding-type rope --rotary-base 1000000 --max-position-embeddings 32768  # as published
    --untie-embeddings-and-output-weights --padded-vocab-size 32000                   # as published
    --num-experts 8 --moe-router-topk 2                                               # experts of a layer, of a token
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02               # as published
    --attention-dropout 0 --hidden-dropout 0                                          # Megatron's default is 0.1
)
TRAINING_FLAGS=(
    --seq-length "$SEQ_LENGTH" --micro-batch-size "$MICRO_BATCH_SIZE"                 # of a rank
    --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters "$TRAIN_ITERATIONS"        # of the job
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000            # your choice
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95                              # your choice
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather   # each rank a slice of the state
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion      # fast experts
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1  # leave out if memory allows it
    --log-interval 10 --eval-interval 1000 --eval-iters 10                            # your choice
)
LAYOUT_FLAGS=(
    --pipeline-model-parallel-size 4   # a stage on each node
    --expert-model-parallel-size 8     # experts over the GPUs of a node
)
TOKENIZER_FLAGS=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
. "$(dirname "${BASH_SOURCE[0]}")/fault_tolerance.sh"
