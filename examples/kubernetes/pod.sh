#!/usr/bin/env bash
# Runs the ranks of one pod until training has finished, with the flags of a model file.
#
# The first process of the container; jobset.yaml sets the variables. With REPAIR=auto it starts `moe_ft keep`, which
# replaces ranks that die, and nodes that are lost by spare pods, while the others keep their processes. With REPAIR=off
# torchrun restarts all ranks. Kubernetes sends SIGTERM before it removes a pod: a spare takes over, or the ranks of all
# pods finish the iteration, bring the newest state to storage, and end.
# Exit code 0 only if training has finished: after any other end Kubernetes starts the container again, each time after
# a longer pause. Exit codes 2, 3 and 4 of a rank (docs/slurm_restarts.md) are those of the pod: it does not restart them then.
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/../.." && pwd)
MODEL=${MODEL:-$ROOT/examples/slurm/models/deepseek_moe_16b.sh}
DATA_PREFIX=${DATA_PREFIX:?set DATA_PREFIX to the prefix of an indexed dataset (tools/prepare_text.py)}
RUN_DIR=${RUN_DIR:?set RUN_DIR to a directory that all pods share}
RUN_NAME=${RUN_NAME:?set RUN_NAME: pods of one name continue the state of each other}
PERSIST_DIR=${PERSIST_DIR:-$RUN_DIR/states}      # checkpoints on storage: a directory or an fsspec URL
MEMORY_DIR=${MEMORY_DIR:-/dev/shm/moe_ft_$UID}   # checkpoints in memory: in the emptyDir of the pod
RENDEZVOUS=${RENDEZVOUS:?set RENDEZVOUS to host:port of the pod of the store, or of the first one}
REPAIR=${REPAIR:-off}                            # auto: docs/repair.md; on GPUs it has to be tried first
NUMBER=${NUMBER:-${JOB_COMPLETION_INDEX:-0}}     # of this pod; those from NODES on are spares
STORE=${STORE:-0}                                # number of the pod of the job's store, under REPAIR=auto
MAX_RESTARTS=${MAX_RESTARTS:-100}                # of the ranks after failures, until the container ends
JOIN_SECONDS=${JOIN_SECONDS:-3600}               # that pods under torchrun wait for a pod that is moved
SAVE_SECONDS=${SAVE_SECONDS:-540}                # for the newest state to reach storage; the grace period less 60
SCRIPT=${SCRIPT:-}                               # a Megatron script of your own, instead of pretrain_gpt_moe.py
METRICS_PORT=${METRICS_PORT:-}                   # for Prometheus: docs/metrics.md; empty: none
METRICS_INTERFACE=${METRICS_INTERFACE:-eth0}     # of the pod, on which that port is opened
EXTRA_FLAGS=${EXTRA_FLAGS:-}                     # further or other flags; the last one wins

# shellcheck source=/dev/null
. "$MODEL"

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
mkdir -p "$RUN_DIR"

PROGRAM=("$ROOT/pretrain_gpt_moe.py")
[ -z "$SCRIPT" ] || PROGRAM=(-m moe_ft run "$SCRIPT")
# SIGUSR1 ends training after the iteration; SIGTERM is what ranks get when another one has failed.
FLAGS=(
    "${MODEL_FLAGS[@]}" "${TRAINING_FLAGS[@]}" "${LAYOUT_FLAGS[@]}" "${TOKENIZER_FLAGS[@]}"
    --data-path "$DATA_PREFIX" --data-cache-path "$RUN_DIR/cache"
    --tensorboard-dir "$RUN_DIR/tensorboard" --exit-signal-handler --exit-signal SIGUSR1
    --moe-ft-event-log "$RUN_DIR/events" --moe-ft-job-id "$RUN_NAME" --moe-ft-memory-dir "$MEMORY_DIR"
)
if [ "$STRATEGY" = none ]; then
    FLAGS+=(--save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --ckpt-format torch_dist)
    FLAGS+=(--save-interval "${SAVE_INTERVAL:-500}")
else
    FLAGS+=(--moe-ft-persist-dir "$PERSIST_DIR")
fi
if [ "$REPAIR" = auto ]; then
    FLAGS+=(--moe-ft-repair auto --moe-ft-breakpoints)
    stages=' --pipeline-model-parallel-size ([2-9]|[1-9][0-9]+) '
    [[ ! " ${LAYOUT_FLAGS[*]} " =~ $stages ]] || FLAGS+=(--moe-ft-upstream-log)
fi
if [ -n "$METRICS_PORT" ]; then
    FLAGS+=(--moe-ft-metrics-port "$METRICS_PORT" --moe-ft-metrics-interface "$METRICS_INTERFACE")
fi
# shellcheck disable=SC2206  # EXTRA_FLAGS holds several words
FLAGS+=("${FAULT_TOLERANCE_FLAGS[@]}" $EXTRA_FLAGS)

# torchrun ends with 1 whatever its ranks end with, so a rank notes what a restart at once would not mend.
CODES=$(mktemp)
export CODES
launcher='' is_ending=''
trap 'exit 75' TERM  # nothing runs yet, and the first process of a container ignores it otherwise

# Waits for the launcher, which gets a signal when the pod is to be removed; returns its exit code.
wait_for_launcher() {
    local code=0
    launcher=$!
    # shellcheck disable=SC2064  # the signal is that of now
    trap "is_ending=1; kill -$1 $launcher 2>/dev/null || true" TERM
    [ -z "$is_ending" ] || kill -"$1" "$launcher" 2>/dev/null || true  # told between two attempts
    wait "$launcher" || code=$?
    while kill -0 "$launcher" 2>/dev/null; do  # a signal ends wait before the launcher ends
        code=0
        wait "$launcher" || code=$?
    done
    return "$code"
}

# Has keep fork the ranks. It has a spare take over, or all save, on SIGTERM.
run_node() {
    trap '' USR1  # ranks that start must not die of it
    TORCHELASTIC_RUN_ID=$RUN_NAME python -m moe_ft keep --nodes "$NODES" --ranks-per-node "$RANKS_PER_NODE" \
        --meet "$RENDEZVOUS" --number "$NUMBER" --store "$STORE" --grace "$((SAVE_SECONDS + 30))" --status "$RUN_DIR/status" \
        -- "${PROGRAM[@]}" "${FLAGS[@]}" &
    wait_for_launcher TERM
}

# Has torchrun start the ranks. SIGUSR1 passes through it; it sends SIGTERM when another rank has failed.
run_agent() {
    # Restarted ranks must not read the addresses of dead ranks from torchrun's store.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    unset MOE_FT_KEEP_TOKEN  # says that keep has started the nodes
    # shellcheck disable=SC2016  # each rank expands it
    local rank='trap : TERM USR1
        code=0
        "$@" || code=$?
        case "$code" in 2 | 3 | 4) echo "$code" >>"$CODES" && kill "$PPID" ;; esac
        exit "$code"'
    torchrun --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$MAX_RESTARTS" \
        --rdzv-id "$RUN_NAME" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" \
        --rdzv-conf "join_timeout=$JOIN_SECONDS,is_host=$((NUMBER == 0))" \
        --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout "$SAVE_SECONDS" \
        --no-python bash -c "$rank" rank python "${PROGRAM[@]}" "${FLAGS[@]}" &
    wait_for_launcher USR1
}

# Brings what memory holds to storage, unless storage has it: memory goes with the pod. Pods that hold replicas wait for
# those that they are replicas of.
rescue() {
    [ "$STRATEGY" != none ] && [ -d "$MEMORY_DIR/$RUN_NAME" ] || return 0
    echo "pod: rescue: storage gets what memory holds beyond it, in at most $SAVE_SECONDS s"
    timeout "$SAVE_SECONDS" python -m moe_ft rescue "$RUN_NAME" --to "$PERSIST_DIR" --memory-dir "$MEMORY_DIR" \
        --wait 60 || echo "pod: rescue: exit code $?: storage may lack the newest state"
}

status=0
if [ "$REPAIR" = auto ]; then
    for ((attempt = 0; attempt <= MAX_RESTARTS; attempt++)); do
        status=0
        run_node || status=$?
        [ -z "$is_ending" ] || break
        case "$status" in 0 | 2 | 3 | 4) break ;; esac
        echo "pod: exit code $status: the ranks start again"
    done
    case "$status" in 2 | 3 | 4) echo "$status" >>"$CODES" ;; esac
else
    run_agent || status=$?
fi
code=$(head -n 1 "$CODES")
rm "$CODES"
case "$code" in
    2) echo "pod: exit code 2: the flags, or the state that is there, cannot work; see above" ;;
    3) echo "pod: exit code 3: storage lacks the newest state, memory has it" ;;
    4) echo "pod: exit code 4: storage or memory that the start needs cannot be had now" ;;
esac
if [ -z "$is_ending" ]; then  # the ranks of a pod that is removed have saved; with 3 and 4 storage cannot be written
    case "${code:-$status}" in 0 | 3 | 4) ;; *) rescue ;; esac
fi
[ -z "$code" ] || exit "$code"
[ "$status" -eq 0 ] || exit "$status"
# The ranks also end without an error where a pod was to be removed.
ends=$(tail -n 100 "$RUN_DIR/events/rank_00000.jsonl" | grep '"event": *"end"' | tail -n 1 || true)
grep -q '"reason": *"finished' <<<"$ends" || exit 75
