#!/bin/bash
#SBATCH --job-name=run1
#SBATCH --nodes=2
#SBATCH --ntasks=4
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
#SBATCH --gpu-bind=none
#SBATCH --exclusive
#SBATCH hetjob
#SBATCH --job-name=run1
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
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
module load cuda
. venv/bin/activate
# Starts the step, and queues the job again. Gets Slurm's signals in place of the shell.
exec python3 -P -m tfdist.launchers.slurm.job --num_workers=4 --num_ps=1 --chief --max_restarts=3 --max_preemptions=100 --pre_kill_secs=120 --task_logs=slurm-%j -- \
  srun --het-group=0,1 --cpus-per-task=8 --distribution=block --kill-on-bad-exit=1 --unbuffered --container-image=me/train:1 \
  python3 -P -m tfdist.launchers.slurm.task --num_workers=4 --num_ps=1 --chief --port=0 --grace_period_secs=30 -- train.py '--name=it'"'"'s two words' 'a
b'
