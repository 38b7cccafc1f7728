#!/usr/bin/env bash
# Runs the ranks of one pod until training has finished: torchrun with the flags of a model file.
#
# The first process of the container; jobset.yaml sets the variables. Kubernetes sends SIGTERM before it removes a pod.
# The ranks then get SIGUSR1: they finish the iteration, bring the newest state to storage, and end, on all pods.
# Exit code 0 only if training has finished: after any other end Kubernetes starts the container again, each time after
# a longer pause. Exit codes 2, 3 and 4 of a rank (docs/slurm.md) are those of the pod: torchrun does not restart then.
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/../.." && pwd)
MODEL=${MODEL:-$ROOT/examples/slurm/models/deepseek_moe_16b.sh}
DATA_PREFIX=${DATA_PREFIX:?set DATA_PREFIX to the prefix of an indexed dataset (tools/prepare_text.py)}
RUN_DIR=${RUN_DIR:?set RUN_DIR to a directory that all pods share}
RUN_NAME=${RUN_NAME:?set RUN_NAME: pods of one name continue the state of each other}
PERSIST_DIR=${PERSIST_DIR:-$RUN_DIR/states}      # checkpoints on storage: a directory or an fsspec URL
RENDEZVOUS=${RENDEZVOUS:?set RENDEZVOUS to host:port of the first pod}
MAX_RESTARTS=${MAX_RESTARTS:-100}                # of the ranks after failures, until torchrun ends
JOIN_SECONDS=${JOIN_SECONDS:-3600}               # that pods wait for a pod which is moved to another node
SAVE_SECONDS=${SAVE_SECONDS:-540}                # for the newest state to reach storage; less than the grace period
PROGRAM=${PROGRAM:-$ROOT/pretrain_gpt_moe.py}    # or: -m moe_ft run YOUR_SCRIPT.py
EXTRA_FLAGS=${EXTRA_FLAGS:-}                     # further or other flags; the last one wins

# shellcheck source=/dev/null
. "$MODEL"

# Restarted ranks must not read the addresses of dead ranks from torchrun's store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
mkdir -p "$RUN_DIR"

# SIGUSR1 ends training after the iteration; SIGTERM is what torchrun sends when another rank has failed.
FLAGS=(
    "${MODEL_FLAGS[@]}" "${TRAINING_FLAGS[@]}" "${LAYOUT_FLAGS[@]}" "${TOKENIZER_FLAGS[@]}"
    --data-path "$DATA_PREFIX" --data-cache-path "$RUN_DIR/cache"
    --tensorboard-dir "$RUN_DIR/tensorboard" --exit-signal-handler --exit-signal SIGUSR1
    --moe-ft-event-log "$RUN_DIR/events" --moe-ft-job-id "$RUN_NAME"
)
if [ "$STRATEGY" = none ]; then
    FLAGS+=(--save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --ckpt-format torch_dist)
    FLAGS+=(--save-interval "${SAVE_INTERVAL:-500}")
else
    FLAGS+=(--moe-ft-persist-dir "$PERSIST_DIR")
fi

# torchrun ends with 1 whatever its ranks end with, so a rank notes what a restart at once would not mend.
CODES=$(mktemp)
export CODES
# shellcheck disable=SC2016  # each rank expands it
rank='trap : TERM USR1
    code=0
    "$@" || code=$?
    case "$code" in 2 | 3 | 4) echo "$code" >>"$CODES" && kill "$PPID" ;; esac
    exit "$code"'

# shellcheck disable=SC2086  # PROGRAM and EXTRA_FLAGS hold several words
torchrun --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$MAX_RESTARTS" \
    --rdzv-id "$RUN_NAME" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" \
    --rdzv-conf "join_timeout=$JOIN_SECONDS,is_host=$((${JOB_COMPLETION_INDEX:-0} == 0))" \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout "$SAVE_SECONDS" \
    --no-python bash -c "$rank" rank python $PROGRAM "${FLAGS[@]}" "${FAULT_TOLERANCE_FLAGS[@]}" $EXTRA_FLAGS &
torchrun=$!
trap 'kill -USR1 "$torchrun"' TERM

status=0
wait "$torchrun" || status=$?
while kill -0 "$torchrun" 2>/dev/null; do  # a signal ends wait before torchrun ends
    status=0
    wait "$torchrun" || status=$?
done
code=$(head -n 1 "$CODES")
rm "$CODES"
case "$code" in
    2) echo "pod: exit code 2: the flags, or the state that is there, cannot work; see above" ;;
    3) echo "pod: exit code 3: storage lacks the newest state, memory has it" ;;
    4) echo "pod: exit code 4: storage does not answer, and may hold what the start needs" ;;
esac
[ -z "$code" ] || exit "$code"
[ "$status" -eq 0 ] || exit "$status"
# The ranks also end without an error where another pod was to be removed.
ends=$(tail -n 100 "$RUN_DIR/events/rank_00000.jsonl" | grep '"event": *"end"' | tail -n 1 || true)
grep -q '"reason": *"finished' <<<"$ends" || exit 75
