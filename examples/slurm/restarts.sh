# Restarts, requeues and bad nodes of a job: functions for a batch script of SLURM, which sources this file.
# shellcheck shell=bash
#
#   RUN_DIR=/scratch/moe                   # a directory that all nodes share
#   . examples/slurm/restarts.sh
#   with_restarts srun python -m moe_ft launch --status "$STATUS" SCRIPT FLAGS   # one task a node, or
#   with_restarts srun "$HERE/rank.sh" python -m moe_ft run SCRIPT FLAGS         # one task a rank
#
# `with_restarts COMMAND` starts the ranks, again after failures, and ends the batch script:
#   - exit codes 0 and 2 of the ranks end the job, 3 and 4 start them again after a pause, others at once;
#   - after a start that has not brought training further it waits, each time longer, and gives up after a few;
#   - nodes that do not answer or fail the check are replaced, if the job has more than TRAIN_NODES;
#   - a node on which starts fail twice in an hour is excluded, by RUN_DIR/excluded_nodes;
#   - SIGUSR1 (#SBATCH --signal=B:USR1@600) has the ranks save, and returns the job to the queue.
# COMMAND is srun itself, which gets the signals. Each start has MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT
# in its environment, and defaults for options of srun: labelled output, the nodes, and what the end of a task means.
#
# docs/your_sbatch.md has an example, docs/slurm_restarts.md has more. The variables can be set from outside; functions can be defined again after this file.

RUN_DIR=${RUN_DIR:?set RUN_DIR to a directory that all nodes share}
RUN_NAME=${RUN_NAME:-$SLURM_JOB_ID}                # --moe-ft-job-id, which is SLURM_JOB_ID by default
EVENTS=${EVENTS:-$RUN_DIR/events}                  # --moe-ft-event-log: tells how far training is, and who failed
PERSIST_DIR=${PERSIST_DIR:-}                       # --moe-ft-persist-dir, for rescues; empty: none
MEMORY_DIRS=${MEMORY_DIRS:-/dev/shm/moe_ft_$UID*}  # --moe-ft-memory-dir; where another user has that name, _1 follows
PYTHON=${PYTHON:-$(command -v python >/dev/null && echo python || echo python3)}
TRAIN_NODES=${TRAIN_NODES:-$SLURM_JOB_NUM_NODES}   # nodes that train; the others are spares
usual_tasks=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES} / SLURM_JOB_NUM_NODES))}
TASKS_PER_NODE=${TASKS_PER_NODE:-$usual_tasks}     # of COMMAND
MAX_RESTARTS=${MAX_RESTARTS:-20}                   # of the ranks after failures, in this allocation
MAX_VAIN_STARTS=${MAX_VAIN_STARTS:-4}              # in a row, that have not brought training further
PAUSE_SECONDS=${PAUSE_SECONDS:-60}                 # before a start after exit codes 3 and 4, or after one in vain
MAX_PAUSE_SECONDS=${MAX_PAUSE_SECONDS:-900}        # pauses after starts in vain double up to this
MAX_REQUEUES=${MAX_REQUEUES:-100}                  # of the job, for whatever reason
WAIT_SECONDS=${WAIT_SECONDS:-120}                  # for all ranks to end after the first, also those of a dead node
SAVE_SECONDS=${SAVE_SECONDS:-480}                  # for the newest state to reach storage before a requeue
NODE_FAILURES=${NODE_FAILURES:-2}                  # starts that fail on a node within an hour exclude it
CHECK_SECONDS=${CHECK_SECONDS:-60}                 # for the check of a node
HEALTH_CHECK=${HEALTH_CHECK:-check_node}           # a node must pass this before each start
[ -n "${CONTAINER+set}" ] || CONTAINER=()          # options of srun for steps that need moe_ft: --container-image=...

# The node of the batch script may lack the Python of the container.
host_python=$(command -v "$PYTHON" || command -v python3 || echo python3)
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
STATUS=$RUN_DIR/status                             # for --status of agents
own_list=$RUN_DIR/excluded_by_$SLURM_JOB_ID        # nodes that sbatch --exclude names
mapfile -t allocated < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
hosts=$(mktemp)
ranks_pid='' is_stopping='' timer='' watcher='' attempt=0 began=0 log='' log_bytes=0
vain=0 newest=0 is_agents='' left_out='' uses_excluded=''
mkdir -p "$RUN_DIR"
# Those of the last start, also in an earlier job: their memory has its state.
nodes=()
[ ! -f "$RUN_DIR/nodes" ] || mapfile -t nodes <"$RUN_DIR/nodes"
[ "${#nodes[@]}" -eq "$TRAIN_NODES" ] || nodes=("${allocated[@]:0:TRAIN_NODES}")
touch "$RUN_DIR/excluded_nodes" "$RUN_DIR/node_failures"

say() {
    echo "$(date +%FT%T) batch: $*"
}

# Examines the node that it runs on. Define it again for tests of your own: of the fabric, of NCCL, of storage.
check_node() {
    command -v nvidia-smi >/dev/null || return 0
    # Level 1 takes seconds: driver, libraries, pages with errors. It needs the daemon of DCGM.
    if command -v dcgmi >/dev/null && dcgmi discovery --list >/dev/null 2>&1; then
        dcgmi diag --run 1 >/dev/null
    else
        nvidia-smi >/dev/null
    fi
}

# The address of a node for other nodes. NodeAddr may be in the network of management: say `echo "$1-ib0"` or so then.
address_of() {
    scontrol show node "$1" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
}

# Has the last word before the job ends or goes back to the queue.
at_end() {
    :
}

# Runs a command once on each of some nodes, in one step, for some seconds at most. The loss of a node does not end it
# for the others, as far as SLURM can help it.
srun_on() {
    local seconds=$1
    shift
    timeout "$seconds" srun --quiet --overlap --no-kill --kill-on-bad-exit=0 --distribution=block --ntasks-per-node 1 \
        --nodes "$#" --ntasks "$#" --nodelist "$(IFS=, && echo "$*")" "${step[@]}"
}

# Sets living to the nodes that answer and pass a check, which is a command or a function.
find_living() {
    local check node answer missing=() step
    check="$(declare -f "$1" || true)
        if $1; then echo \"is_living \$SLURMD_NODENAME\"; fi"
    step=(bash -c "$check")
    answer=$(srun_on "$CHECK_SECONDS" "${allocated[@]}") || true
    for node in "${allocated[@]}"; do
        grep -qx "is_living $node" <<<"$answer" || missing+=("$node")
    done
    # SLURM may have ended the step of all because of one: those that are missing have a step each.
    if [ "${#missing[@]}" -gt 0 ]; then
        answer+=$'\n'$(for node in "${missing[@]}"; do srun_on "$CHECK_SECONDS" "$node" & done; wait)
    fi
    living=" $(sed -n 's/^is_living //p' <<<"$answer" | sort -u | tr '\n' ' ') "
}

is_excluded() {
    grep -q "^$1 " "$RUN_DIR/excluded_nodes"
}

# Puts a node that answers in the place of each that does not; fails if there are too few. A node that stays keeps
# its place, and so its ranks, which find their state in its memory.
choose_nodes() {
    local slot node
    find_living "$HEALTH_CHECK"
    spares=() left_out=''
    for node in "${allocated[@]}"; do
        case "$living" in
            *" $node "*)
                if [ -n "$uses_excluded" ] || ! is_excluded "$node"; then continue; fi
                say "$node is excluded ($RUN_DIR/excluded_nodes)"
                living=${living/ $node / } left_out+=" $node"
                ;;
            *) say "$node does not answer, or fails HEALTH_CHECK" ;;
        esac
    done
    for node in "${allocated[@]}"; do
        case " ${nodes[*]} " in *" $node "*) continue ;; esac
        case "$living" in *" $node "*) spares+=("$node") ;; esac
    done
    for slot in "${!nodes[@]}"; do
        case "$living" in *" ${nodes[slot]} "*) continue ;; esac
        [ "${#spares[@]}" -gt 0 ] || return 1
        say "${spares[0]} replaces ${nodes[slot]}"
        nodes[slot]=${spares[0]} spares=("${spares[@]:1}")
    done
}

# Has another node look after this one. Because of --no-kill SLURM does not end the job when the node of this script
# fails: it only takes it out of the job, which would then hold the others and do nothing until its time limit.
watch_this_node() {
    local node
    case " ${nodes[*]} " in *" $watcher "*) return ;; esac
    for node in "${nodes[@]}"; do
        [ "$node" != "$SLURMD_NODENAME" ] || continue
        watcher=$node
        # shellcheck disable=SC2016  # the inner shell expands them
        srun --quiet --overlap --no-kill=off --nodes 1 --ntasks 1 --ntasks-per-node 1 --nodelist "$node" bash -c '
            while sleep 30; do
                left=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %N) && [ -n "$left" ] || continue
                scontrol show hostnames "$left" | grep -qx "$0" || scontrol requeue "$SLURM_JOB_ID"
            done' "$SLURMD_NODENAME" >/dev/null 2>&1 &
        return
    done
}

# Prints a port that is free on a node: one that others know before they could take.
draw_port() {
    local port
    port=$(srun --quiet --overlap --no-kill=off --nodes 1 --ntasks 1 --ntasks-per-node 1 --nodelist "$1" "$PYTHON" \
        -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])' || true)
    echo "${port:-$((20000 + RANDOM % 10000))}"
}

# Starts the ranks and waits for them; returns their exit code. If agents start them, training is over when the file of
# --status says so: srun waits longer, for the tasks of a node that is lost.
run_command() {
    local over=0 code=0 node task written on=("${nodes[@]}") lines=() step=(SLURM_LABELIO=1 SLURM_OVERLAP=1)
    if [ -n "$is_agents" ]; then
        on+=("${spares[@]}")
        step+=(SLURM_NO_KILL=set SLURM_KILL_BAD_EXIT=0 SLURM_WAIT=0)
    else
        step+=(SLURM_NO_KILL=off SLURM_KILL_BAD_EXIT=1 SLURM_WAIT="$WAIT_SECONDS")
    fi
    # srun no longer takes it from sbatch, and a task would have one core.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || step+=(SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}")
    if [ "${on[*]} $TASKS_PER_NODE" != "${allocated[*]} $usual_tasks" ]; then
        for node in "${on[@]}"; do
            for ((task = 0; task < TASKS_PER_NODE; task++)); do lines+=("$node"); done
        done
        printf '%s\n' "${lines[@]}" >"$hosts"
        step+=(SLURM_HOSTFILE="$hosts" SLURM_DISTRIBUTION=arbitrary SLURM_NTASKS_PER_NODE="$TASKS_PER_NODE")
        for node in SLURM_NNODES SLURM_JOB_NUM_NODES; do step+=("$node=${#on[@]}"); done
        for node in SLURM_NTASKS SLURM_NPROCS; do step+=("$node=${#lines[@]}"); done
    fi
    printf '%s\n' "${nodes[@]}" >"$RUN_DIR/nodes"
    printf '%s\n' - "${nodes[@]}" >"$STATUS"
    written=$(stat --format '%i %y' "$STATUS")
    log=$(readlink "/proc/$$/fd/2") began=$(date +%s) log_bytes=0
    [ ! -f "$log" ] || log_bytes=$(stat --format %s "$log")
    say "start $attempt on ${nodes[*]}${is_agents:+, with ${#spares[@]} spares}"
    MASTER_ADDR=$(address_of "${nodes[0]}") MASTER_PORT=$(draw_port "${nodes[0]}")
    # Restarts are counted as torchrun does: --moe-ft-recover-from holds for the first start only.
    export MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT=$attempt
    env "${step[@]}" "$@" &
    ranks_pid=$!
    if [ -n "$is_agents" ]; then
        while kill -0 "$ranks_pid" 2>/dev/null; do
            sleep 1 &
            wait "$!" || true
            [ "$(head -n 1 "$STATUS")" != - ] || continue
            over=$((over + 1))
            [ "$over" -ne 20 ] || kill "$ranks_pid" 2>/dev/null || true
            [ "$over" -lt 30 ] || kill -KILL "$ranks_pid" 2>/dev/null || true
        done
    fi
    wait "$ranks_pid" || code=$?
    while kill -0 "$ranks_pid" 2>/dev/null; do  # a signal ends wait before the ranks end
        code=0
        wait "$ranks_pid" || code=$?
    done
    ranks_pid=''
    # Agents replace the file.
    [ "$(stat --format '%i %y' "$STATUS")" != "$written" ] || return "$code"
    code=$(head -n 1 "$STATUS")
    mapfile -t on < <(tail -n +2 "$STATUS")  # spares may have taken over
    # Before all have arrived some are missing, and the others would get ranks of others.
    [ "${#on[@]}" -ne "$TRAIN_NODES" ] || nodes=("${on[@]}")
    printf '%s\n' "${nodes[@]}" >"$RUN_DIR/nodes"
    [ "$code" != - ] || code=1  # the first node is lost, which decides
    return "$code"
}

# Prints the newest iteration that is finished, by which progress is measured; nothing if Python does not run here.
newest_iteration() {
    "$host_python" "$HERE/last_start.py" iteration "$EVENTS" --checkpoints "$RUN_DIR/checkpoints" || true
}

# Prints the nodes to blame for the failure of the last start, each with a reason. Ranks that have trained tell it in
# their event log. Before that, SLURM does: by the first task that ended, since it ends the others because of it.
blamed_nodes() {
    local index reason found
    found=$("$host_python" "$HERE/last_start.py" failed "$EVENTS" --since "$began" --nodes "${#nodes[@]}") || true
    while read -r index reason; do
        [ -z "$index" ] || echo "${nodes[index]} $reason"
    done <<<"$found"
    [ -z "$found" ] && [ -f "$log" ] || return 0
    found=$(tail -c "+$((log_bytes + 1))" "$log" | grep -a -m 1 -E \
        '^srun: error: ([^ ]+: tasks? [0-9,-]+: |Task launch for .* failed on node )' || true)
    # Agents all end with 1 when the job fails; and where the program is wrong, the first of few nodes is chance.
    if [[ $found =~ "Exited with exit code" ]] && { [ -n "$is_agents" ] || [ "${#allocated[@]}" -lt 4 ]; }; then
        return 0
    fi
    sed -n -E 's/^srun: error: Task launch for .* failed on node ([^ :]+).*/\1 the task could not be launched/p
        s/^srun: error: ([^ :]+): tasks? [0-9,-]+: (.*)/\1 the first task to end: \2/p' <<<"$found"
}

# Notes who is to blame, and excludes nodes on which starts have failed often. One of several nodes is to blame at most
# by half of them: else it is the program, or the network.
note_failure() {
    local node reason count found
    [ "${#allocated[@]}" -gt 1 ] || return 0
    mapfile -t found < <(blamed_nodes)
    [ "${#found[@]}" -gt 0 ] && [ "$((2 * ${#found[@]}))" -le "${#allocated[@]}" ] || return 0
    while read -r node reason; do
        echo "$node $began $reason" >>"$RUN_DIR/node_failures"
        count=$(awk -v node="$node" -v since="$((began - 3600))" '$1 == node && $2 >= since' "$RUN_DIR/node_failures" | wc -l)
        say "start $attempt failed on $node ($reason), failure $count there within an hour"
        if [ "$count" -ge "$NODE_FAILURES" ] && ! is_excluded "$node"; then
            echo "$node $began $(date +%FT%T) start $attempt of job $SLURM_JOB_ID: $reason" >>"$RUN_DIR/excluded_nodes"
            say "$node is excluded from now on. To let it back in, remove its line from $RUN_DIR/excluded_nodes"
        fi
    done < <(printf '%s\n' "${found[@]}")
}

# Counts starts in a row that have not brought training further than it was, also before a requeue. Sets vain.
count_start() {
    local job=0 count=0 now
    now=$(newest_iteration) vain_since=$began
    [ ! -f "$RUN_DIR/starts_in_vain" ] || read -r job count newest vain_since <"$RUN_DIR/starts_in_vain"
    [ "$job" = "$SLURM_JOB_ID" ] || count=0 newest=${first_iteration:-0}
    if [ -z "$now" ] || [ "$now" -gt "$newest" ]; then vain=0 newest=${now:-$newest}; else vain=$((count + 1)); fi
    [ "$vain" -gt 1 ] || vain_since=$began
    echo "$SLURM_JOB_ID $vain $newest $vain_since" >"$RUN_DIR/starts_in_vain"
}

# Lets nodes back in that were excluded since a time: it has not helped.
readmit_nodes() {
    local excluded
    excluded=$(awk -v since="$1" '$2 >= since {print $1}' "$RUN_DIR/excluded_nodes" | paste -s -d ' ')
    [ -n "$excluded" ] || return 0
    awk -v since="$1" '$2 < since' "$RUN_DIR/excluded_nodes" >"$RUN_DIR/excluded_nodes.new"
    mv "$RUN_DIR/excluded_nodes.new" "$RUN_DIR/excluded_nodes"
    say "$excluded: no longer excluded, since starts without it have failed too"
}

# Returns the job to the queue, or ends it if that cannot be.
requeue() {
    local excluded
    rm -f "$hosts"
    at_end
    [ -z "$timer" ] || kill "$timer" 2>/dev/null || true
    say "$1: the job goes back to the queue"
    trap '' TERM  # SLURM sends it to scontrol as well, and must not take an exit code for the end of the job
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_REQUEUES" ] && scontrol requeue "$SLURM_JOB_ID"; then
        excluded=$(cut -d ' ' -f 1 "$RUN_DIR/excluded_nodes" | sort -u | paste -s -d ,)
        # SLURM takes it from jobs that wait, and this one does now. It takes the place of sbatch's --exclude.
        if [ -n "$excluded" ] && scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$excluded$(cat "$own_list")"; then
            say "it waits for nodes other than $excluded ($RUN_DIR/excluded_nodes)"
        fi
        sleep 600  # SLURM ends this script
    fi
    say "that was refused, or it was there $MAX_REQUEUES times"
    rescue
    say_how_to_continue
    exit 1
}

# Brings what memory holds to storage, unless storage has it: the job ends for good, and its nodes go to other jobs.
rescue() {
    local list step
    [ -n "$PERSIST_DIR" ] || return 0
    find_living true || true  # also one without a GPU that works
    read -ra list <<<"$living"
    [ "${#list[@]}" -gt 0 ] || return 0
    say "rescue: storage gets what memory holds beyond it, in at most $SAVE_SECONDS s"
    # Nodes that have not trained hold nothing. Those that hold replicas wait for the nodes that they are replicas of.
    # shellcheck disable=SC2016  # each task expands them
    step=("${CONTAINER[@]}" bash -c 'for each in $0; do [ ! -O "$each/$1" ] || exec "${@:2}" --memory-dir "$each"; done'
        "$MEMORY_DIRS" "$RUN_NAME" "$PYTHON" -m moe_ft rescue "$RUN_NAME" --to "$PERSIST_DIR" --wait 60)
    srun_on "$SAVE_SECONDS" "${list[@]}" || say "rescue: exit code $?: storage may lack the newest state"
}

say_how_to_continue() {
    say "memory of the nodes stays for the KEEP_MINUTES of epilog.sh. To continue: the same variables, and" \
        "RUN_NAME=$RUN_NAME sbatch --job-name $RUN_NAME"
}

# Waits some seconds, or until a signal comes.
pause() {
    sleep "$1" &
    wait "$!" || true
}

# Has the ranks bring their newest state to storage and end. The job must be in the queue again before the time limit.
on_usr1() {
    [ -z "$ranks_pid" ] || kill -USR1 "$ranks_pid" 2>/dev/null || true
    [ -z "$is_stopping" ] || return 0
    is_stopping=1
    say "SIGUSR1: the ranks save the newest state and end, in at most $SAVE_SECONDS s"
    {
        for ((second = 0; second < SAVE_SECONDS; second += 15)); do
            sleep 15
            kill -USR1 $$  # again: ranks that were starting have ignored it
        done
        say "SIGUSR1: the ranks have not ended in $SAVE_SECONDS s: the job goes back to the queue"
        scontrol requeue "$SLURM_JOB_ID"
    } &
    timer=$!
}

# scancel, a requeue by somebody else, or the time limit: the ranks have the same signal.
on_term() {
    trap '' TERM
    say "SIGTERM: SLURM ends the job now; memory of its nodes ($MEMORY_DIRS/$RUN_NAME) has the newest state"
    [ -z "$ranks_pid" ] || wait "$ranks_pid" || true
    rm -f "$hosts"
    exit 143
}

# Says why the last start has ended, and waits if the next one should; fails if there is to be none.
is_worth_another_start() {
    local failed="exit code $1" is_storage='' seconds=0
    case "$1" in
        0) return 1 ;;
        2)
            say "$failed: the flags, or the state that is there, cannot work; see above"
            return 1
            ;;
        3) failed+=" (storage lacks the newest state, memory has it)" is_storage=1 ;;
        4)
            failed+=" (storage or memory that the start needs cannot be had now)" is_storage=1
            [ -z "$is_stopping" ] || return 1  # nothing is left to save
            ;;
        *) [ -n "$is_stopping" ] || note_failure ;;
    esac
    if [ "$attempt" -ge "$MAX_RESTARTS" ]; then
        failed+=": MAX_RESTARTS=$MAX_RESTARTS is reached"
        [ -z "$is_storage" ] || requeue "$failed"
        say "$failed"
        return 1
    fi
    if [ -n "$is_storage" ]; then
        seconds=$PAUSE_SECONDS
    elif [ -z "$is_stopping" ]; then
        count_start
        if [ "$vain" -ge "$MAX_VAIN_STARTS" ]; then
            say "$failed: $vain starts in a row have finished no iteration beyond $newest:" \
                "MAX_VAIN_STARTS=$MAX_VAIN_STARTS is reached. Look for the first error of each start above"
            readmit_nodes "$vain_since"
            return 1
        fi
        [ "$vain" -eq 0 ] || seconds=$((PAUSE_SECONDS << (vain - 1)))
        [ "$seconds" -le "$MAX_PAUSE_SECONDS" ] || seconds=$MAX_PAUSE_SECONDS
        [ "$vain" -eq 0 ] || failed+=", and no iteration beyond $newest was finished ($vain of $MAX_VAIN_STARTS)"
    fi
    if [ -n "$is_storage" ] || [ "$seconds" -gt 0 ]; then
        say "$failed: the ranks start again in $seconds s"
        pause "$seconds"
    else
        say "$failed: the ranks start again"
    fi
}

# Starts the ranks until training ends, and ends the batch script.
with_restarts() {
    local status first_iteration spares=()
    [[ ! " $* " =~ " moe_ft "(launch|keep)" " ]] || is_agents=1
    first_iteration=$(newest_iteration)
    if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || [ ! -f "$own_list" ]; then
        scontrol show job "$SLURM_JOB_ID" --oneliner | sed -n 's/.* ExcNodeList=\([^( ][^ ]*\).*/,\1/p' >"$own_list"
    fi
    trap on_usr1 USR1
    trap on_term TERM
    while true; do
        if ! choose_nodes; then
            # SLURM may have refused to leave out a node of a job that it has started again.
            if [ "$attempt" -gt 0 ] || [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || [ -z "$left_out" ]; then
                requeue "fewer than $TRAIN_NODES nodes are left"
            fi
            say "SLURM has given no other nodes than$left_out, which the job uses again"
            uses_excluded=1
            choose_nodes || requeue "fewer than $TRAIN_NODES nodes are left"
        fi
        status=0
        watch_this_node
        run_command "$@" || status=$?
        is_worth_another_start "$status" || break
        attempt=$((attempt + 1))
    done
    [ -z "$is_stopping" ] || [ "$status" -eq 2 ] || requeue SIGUSR1
    [ -z "$timer" ] || kill "$timer" 2>/dev/null || true
    rm -f "$hosts"
    at_end
    if [ "$status" -ne 0 ]; then
        rescue
        say_how_to_continue
    fi
    say "the job ends with exit code $status"
    exit "$status"
}
