# DeepSeekMoE 16B: 16.4e9 parameters, 2.8e9 for a token; 2 nodes of 8 GPUs with 80 GB.
# shellcheck shell=bash disable=SC2034  # the batch script reads the variables
#
# The fullest GPU has 32 GB of weights, gradients and optimizer, and about 6 GB of activations.
# Host memory of a node, most bytes of a checkpoint, and what a failure costs, as plan.sh says:
#
# strategy  memory  checkpoint  every          repeated           updates lost    with all nodes
# ----------------------------------------------------------------------------------------------
# dense     491 GB  197 GB      90 iterations  1 to 2 iterations  none            none
# sparse    697 GB  279 GB      90 iterations  1 to 2 iterations  none            none
# partial   711 GB  40 GB       90 iterations  1 to 2 iterations  1.5 iterations  315 iterations
RANKS_PER_NODE=${RANKS_PER_NODE:-8}
NODES=${NODES:-2}                                # 16 GPUs: every node holds all experts
ITERATION_S=${ITERATION_S:-20}                   # for plan: 4/3 x 6 x 2.8e9 x 4.2e6 tokens at 300 TFLOP/s a GPU
SEQ_LENGTH=${SEQ_LENGTH:-4096}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1024}     # sequences: 4.2e6 tokens; the paper has 4608
TRAIN_ITERATIONS=${TRAIN_ITERATIONS:-480000}     # 2e12 tokens
TOKENIZER_MODEL=${TOKENIZER_MODEL:-deepseek-ai/deepseek-moe-16b-base}  # or its directory, for nodes without internet
PERSIST_INTERVAL=${PERSIST_INTERVAL:-90}         # snapshots: a checkpoint on storage every half hour
K_SNAPSHOT=${K_SNAPSHOT:-16}                     # partial: a quarter of the 64 experts
K_PERSIST=${K_PERSIST:-8}                        # partial: an eighth

MODEL_FLAGS=(
    --num-layers 28 --hidden-size 2048 --num-attention-heads 16                       # as published
    --ffn-hidden-size 10944 --moe-layer-freq "([0]*1+[1]*27)"                         # the first layer is dense
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear        # as Llama
    --position-embedding-type rope --rotary-base 10000 --max-position-embeddings 4096 # as published
    --untie-embeddings-and-output-weights --padded-vocab-size 102400                  # as published
    --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408                   # many small experts
    --moe-shared-expert-intermediate-size 2816                                        # two experts of every token
    --moe-router-pre-softmax                                                          # scores are not normalized again
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001              # as published
    --attention-dropout 0 --hidden-dropout 0                                          # Megatron's default is 0.1
)
TRAINING_FLAGS=(
    --seq-length "$SEQ_LENGTH" --micro-batch-size "$MICRO_BATCH_SIZE"                 # of a rank
    --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters "$TRAIN_ITERATIONS"        # of the job
    --lr 4.2e-4 --min-lr 4.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000        # the paper lowers it in steps
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95                              # as published
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather   # each rank a slice of the state
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion      # fast experts
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1  # leave out if memory allows it
    --log-interval 10 --eval-interval 1000 --eval-iters 10                            # your choice
)
LAYOUT_FLAGS=(
    --expert-model-parallel-size 8     # experts over the GPUs of a node
)
TOKENIZER_FLAGS=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
. "$(dirname "${BASH_SOURCE[0]}")/fault_tolerance.sh"
