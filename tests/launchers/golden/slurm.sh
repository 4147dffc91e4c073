#!/bin/bash
#SBATCH --job-name=run1
#SBATCH --nodes=3
#SBATCH --ntasks=6
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=2
#SBATCH --partition=gpu
#SBATCH --time=4:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --chdir="/shared/my project"
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --exclusive

export DATA='a "b" '"'"'c'"'"' $d
e'
# Known to the tasks of this run only; drawn anew when the job runs again.
export TFDIST_JOB_SECRET=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n')
export TFDIST_ATTEMPT=${SLURM_RESTART_COUNT:-0}
# Where the tasks leave their exit codes: srun knows the largest only, and not who was the first.
state=$PWD/.tfdist-$SLURM_JOB_ID
export TFDIST_SLURM_EXITS=$state-$TFDIST_ATTEMPT
rm -rf -- "$TFDIST_SLURM_EXITS"
mkdir -p -- "$TFDIST_SLURM_EXITS"

srun --ntasks=6 --cpus-per-task=8 --distribution=block --kill-on-bad-exit=1 --unbuffered \
  python3 -P -m tfdist.launchers.slurm_task --num_workers=4 --num_ps=1 --chief --port=0 --grace_period_secs=30 -- train.py '--name=it'"'"'s two words' 'a
b'
code=$?

if [ "$code" -ne 0 ] && [ -r "$TFDIST_SLURM_EXITS/first" ]; then
  read -r code task < "$TFDIST_SLURM_EXITS/first"
  echo "tfdist: $task failed first (exit code $code)" >&2
fi
rm -rf -- "$TFDIST_SLURM_EXITS"
failures=$(cat -- "$state-failures" 2>/dev/null || echo 0)
if [ "$code" -eq 75 ]; then
  # Preempted, and its work is saved: not a failure.
  scontrol requeue "$SLURM_JOB_ID" && exit 75
elif [ "$code" -ne 0 ] && [ "$failures" -lt 3 ]; then
  echo $((failures + 1)) > "$state-failures"
  scontrol requeue "$SLURM_JOB_ID" && exit "$code"
fi
rm -f -- "$state-failures"
exit "$code"
