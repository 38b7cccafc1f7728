#!/usr/bin/env bash
# Removes the checkpoints in a node's memory that no job will continue: an Epilog of SLURM, run as root on each node
# when a job ends. examples/slurm/pretrain_moe.sbatch also runs it before it trains, as the user of the job.
#
# Set the variables below for your cluster, and in slurm.conf Epilog= to the path of a copy on each node.
#
# What a job named by its number has left goes when that job is over, and stays while SLURM will start it again. What
# a run with a name (RUN_NAME of the batch script) has left stays for KEEP_MINUTES: the next job may continue it.
# Memory of a job that runs is never removed. Errors are told and change nothing: a failed epilog drains a node.
set -uo pipefail

PYTHON=${PYTHON:-/opt/moe_ft/bin/python}     # an environment with moe_ft; every user must be able to run it
MEMORY_DIRS=${MEMORY_DIRS:-/dev/shm/moe_ft_*}  # --moe-ft-memory-dir of all users; a pattern
KEEP_MINUTES=${KEEP_MINUTES:-60}

# Succeeds if SLURM does not know a job any more, or only as one that is over.
is_over() {
    local shown end
    if ! shown=$(scontrol show job "$1" --oneliner 2>&1); then
        [[ $shown == *'Invalid job id'* ]]
        return
    fi
    case "$shown" in
        *JobState=COMPLETING*)
            # A job that goes back to the queue has the end of its next start here, or none.
            end=${shown#*EndTime=} end=${end%% *}
            [[ $end != Unknown && ! $end > $(date --date '1 minute' +%FT%T) ]]
            ;;
        *JobState=CANCELLED* | *JobState=COMPLETED* | *JobState=FAILED* | *JobState=TIMEOUT*) ;;
        *JobState=NODE_FAIL* | *JobState=OUT_OF_MEMORY* | *JobState=DEADLINE* | *JobState=BOOT_FAIL*) ;;
        *) return 1 ;;
    esac
}

# Runs `moe_ft clean` for the directory of a job as its owner.
clean() {
    local owner command=("$PYTHON" -m moe_ft clean --memory-dir "${1%/*}" --job-id "${1##*/}" --remove)
    owner=$(stat --format %U "$1") || return
    if [ "$owner" != "$(id -un)" ]; then
        [ "$(id -u)" -eq 0 ] || return
        command=(runuser -u "$owner" -- "${command[@]}")
    fi
    "${command[@]}"
}

shopt -s nullglob
# shellcheck disable=SC2086  # a pattern
for directory in $MEMORY_DIRS; do
    for marker in "$directory"/*/.moe_ft_job; do
        job=${marker%/.moe_ft_job}
        if [[ ${job##*/} =~ ^[0-9]+$ ]]; then
            is_over "${job##*/}" || continue
        elif [ -n "$(find "$job" -mmin "-$KEEP_MINUTES" -print -quit)" ]; then
            continue
        fi
        clean "$job"
    done
done
exit 0
