#!/bin/bash
# Train under Slurm, through any number of time limits and preemptions:
#
#   sbatch deploy/slurm.sh out/longhorn_350m config/longhorn_350m.py --micro_batch_size=8
#
# Slurm sends SIGUSR1 five minutes before the time limit, and SIGTERM when it preempts the job. train.py then finishes the
# step, saves and exits with 0. Until result.json exists, the job is requeued after a signal, a killed process (128 +
# the signal's number) or a process that did not answer (75). Any other exit code means an error in the run and ends the
# job.
#SBATCH --job-name=longhorn
#SBATCH --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8
#SBATCH --time=24:00:00 --signal=USR1@300
#SBATCH --requeue --open-mode=append --output=%x-%j.txt
set -euo pipefail
out=$1; shift
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES)) OUT=$out
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not take this from sbatch
code=0
srun --kill-on-bad-exit=1 bash -c \
    'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec ${PYTHON:-python} train.py "$@" --out_dir="$OUT" --resume=auto' train "$@" ||
    code=$?
tail -n 1 "$out/result.json" 2> /dev/null | grep -q '^}' && exit "$code"  # complete
case $code in
    0 | 75 | 13? | 14?) [ "${SLURM_RESTART_COUNT:-0}" -lt 1000 ] && scontrol requeue "$SLURM_JOB_ID" ;;
    *) exit "$code" ;;
esac
