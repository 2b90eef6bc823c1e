#!/bin/sh
# Four runs, each with its own seed and 16 CPUs: sbatch examples/recipes/slurm.sh
#SBATCH --job-name=shmvec
#SBATCH --array=1-4
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --hint=nomultithread
#SBATCH --mem=8G
#SBATCH --time=01:00:00
#SBATCH --output=%x-%A-%a.log

# From Slurm 22.05 on, srun does not inherit --cpus-per-task: without it, the run has one CPU.
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores \
    python examples/recipes/slurm.py --seed "$SLURM_ARRAY_TASK_ID"
