#!/usr/bin/env bash
# Runs a rank that srun has started without torchrun: srun ... examples/slurm/rank.sh python SCRIPT FLAGS
#
# restarts.sh sets MASTER_ADDR and MASTER_PORT, sends the signals, and acts on the exit code.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[^0-9]*}
trap '' USR1  # until Megatron's handler is there: restarts.sh sends it again
trap : TERM
code=0
"$@" || code=$?
# Of all exit codes srun returns the highest. So ranks that are ended because one has failed end with 1, not 143.
[ "$code" -ne 143 ] || code=1
exit "$code"
