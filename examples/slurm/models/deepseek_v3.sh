# DeepSeek-V3: 671e9 parameters, 37e9 for a token, and a layer for a second token; 128 nodes of 8 GPUs with 80 GB.
# shellcheck shell=bash disable=SC2034  # the batch script reads the variables
#
# The fullest GPU has 21 GB of weights, gradients and optimizer, and about 11 GB of activations.
# Host memory of a node, most bytes of a checkpoint, and what a failure costs, as plan.sh says:
#
# strategy  memory  checkpoint  every          repeated           updates lost    with all nodes
# ----------------------------------------------------------------------------------------------
# dense     483 GB  8,203 GB    30 iterations  1 to 2 iterations  none            none
# sparse    684 GB  12,499 GB   30 iterations  1 to 2 iterations  none            none
# partial   638 GB  1,218 GB    30 iterations  1 to 2 iterations  1.5 iterations  105 iterations
RANKS_PER_NODE=${RANKS_PER_NODE:-8}
NODES=${NODES:-128}                              # 1024 GPUs: 16 stages of 64 ranks, which share the experts
ITERATION_S=${ITERATION_S:-60}                   # for plan: 4/3 x 6 x 37e9 x 63e6 tokens at 300 TFLOP/s a GPU
SEQ_LENGTH=${SEQ_LENGTH:-4096}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-15360}    # sequences: 63e6 tokens, as published
TRAIN_ITERATIONS=${TRAIN_ITERATIONS:-235000}     # 14.8e12 tokens
TOKENIZER_MODEL=${TOKENIZER_MODEL:-deepseek-ai/DeepSeek-V3}  # or its directory, for nodes without internet
PERSIST_INTERVAL=${PERSIST_INTERVAL:-30}         # snapshots: a checkpoint on storage every half hour
K_SNAPSHOT=${K_SNAPSHOT:-64}                     # partial: a quarter of the 256 experts
K_PERSIST=${K_PERSIST:-32}                       # partial: an eighth

MODEL_FLAGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --moe-layer-freq "([0]*3+[1]*58)"  # three dense layers
    --multi-latent-attention --num-attention-heads 128 --qk-layernorm                 # keys and values from a vector
    --q-lora-rank 1536 --kv-lora-rank 512                                             # as published
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128                       # as published
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear        # as Llama
    --position-embedding-type rope --rope-type yarn --rotary-base 10000 --rotary-scaling-factor 40  # published
    --mscale 1.0 --mscale-all-dim 1.0 --max-position-embeddings 163840                # as published
    --untie-embeddings-and-output-weights --padded-vocab-size 129280                  # as published
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048                  # many small experts
    --moe-shared-expert-intermediate-size 2048                                        # an expert of every token
    --moe-router-num-groups 8 --moe-router-group-topk 4                               # of a token's experts
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32  # as published
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3                # balance without a loss
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4           # and with a small one
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3                                  # predicts a second token
    --attention-dropout 0 --hidden-dropout 0                                          # Megatron's default is 0.1
)
TRAINING_FLAGS=(
    --seq-length "$SEQ_LENGTH" --micro-batch-size "$MICRO_BATCH_SIZE"                 # of a rank
    --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters "$TRAIN_ITERATIONS"        # of the job
    --lr 2.2e-4 --min-lr 7.3e-6 --lr-decay-style cosine --lr-warmup-iters 2000        # the paper keeps 2.2e-4 long
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95                              # as published
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather   # each rank a slice of the state
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion      # fast experts
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1  # activations do not fit otherwise
    --log-interval 1 --eval-interval 1000 --eval-iters 10                             # your choice
)
LAYOUT_FLAGS=(
    --pipeline-model-parallel-size 16                        # a stage on 8 nodes
    --pipeline-model-parallel-layout "Et*4|(t*4|)*14tmL"  # 4 layers; the last: 1, the second token, the loss
    --expert-model-parallel-size 64                          # each GPU of a stage has 4 experts of a layer
)
TOKENIZER_FLAGS=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
. "$(dirname "${BASH_SOURCE[0]}")/fault_tolerance.sh"
