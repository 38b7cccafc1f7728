#!/usr/bin/env bash
# Removes the checkpoints in a node's memory that no job will continue: an Epilog of SLURM, run as root on each node
# when a job ends, and better a Prolog too. examples/slurm/pretrain_moe.sbatch also runs it before it trains, as the
# user of the job.
#
# Set the variables below for your cluster, and in slurm.conf Epilog= and Prolog= to the path of a copy on each node.
#
# Memory of a run stays while a job of its name (sbatch --job-name) or number runs or is in the queue, however long.
# After that it stays for KEEP_MINUTES: whatever has ended the job, the next one may continue from it. Only that of a
# job which was cancelled or is complete, and has no other name than its number, goes at once. Where squeue does not
# answer, everything stays. Errors are told and change nothing: a failed epilog drains a node.
set -uo pipefail

PYTHON=${PYTHON:-/opt/moe_ft/bin/python}     # an environment with moe_ft; every user must be able to run it
MEMORY_DIRS=${MEMORY_DIRS:-/dev/shm/moe_ft_*}  # --moe-ft-memory-dir of all users; a pattern
KEEP_MINUTES=${KEEP_MINUTES:-60}

# Prints "wanted" if a job of this name or number may still run, "over" if the job of this number was cancelled or is
# complete, else nothing. Fails if SLURM does not answer. A job whose epilog runs is wanted: it may go to the queue.
fate() {
    local jobs number state name found=''
    jobs=$(timeout 60 squeue --noheader --all --states all --user "$2" --format '%A %T %j') || return
    while read -r number state name; do
        [[ $number == "$1" || $name == "$1" ]] || continue
        case "$state" in
            CANCELLED | COMPLETED) [ "$number" != "$1" ] || found=over ;;
            FAILED | TIMEOUT | NODE_FAIL | OUT_OF_MEMORY | DEADLINE | BOOT_FAIL | PREEMPTED | REVOKED) ;;
            *) found=wanted && break ;;
        esac
    done <<<"$jobs"
    echo "$found"
}

# Runs a command as the owner of a job's directory.
as() {
    local owner=$1
    shift
    if [ "$owner" = "$(id -un)" ]; then
        "$@"
    elif [ "$(id -u)" -eq 0 ]; then
        runuser -u "$owner" -- "$@"
    fi
}

shopt -s nullglob
# shellcheck disable=SC2086  # a pattern
for directory in $MEMORY_DIRS; do
    for marker in "$directory"/*/.moe_ft_job; do
        job=${marker%/.moe_ft_job}
        run=${job##*/}
        owner=$(stat --format %U "$job") && [ "$run" != "${RUN_NAME-}" ] && fate=$(fate "$run" "$owner") || continue
        if [ "$fate" = wanted ]; then
            as "$owner" touch --no-create --no-dereference "$marker"  # KEEP_MINUTES begin when it no longer is
        elif [ "$fate" = over ] || [ -z "$(find "$job" -mmin "-$KEEP_MINUTES" -print -quit)" ]; then
            as "$owner" "$PYTHON" -m moe_ft clean --memory-dir "$directory" --job-id "$run" --remove
        fi
    done
done
exit 0
