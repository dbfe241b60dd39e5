#!/bin/bash

# Parameters
#SBATCH --array=0-2
#SBATCH --cpus-per-task=2
#SBATCH --job-name=optimus_cc
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/.slurm/1a2b3c4d/array_1_%a.out
#SBATCH --signal=B:USR2@30
#SBATCH --time=2

# setup
set -e
export PYTHONPATH=/shared/optimus-cc${PYTHONPATH:+:$PYTHONPATH}
cd '/home/me/my work'

# command
exec /shared/venv/bin/python -m launchers.slurm.job /shared/runs/.slurm/1a2b3c4d/array_1.runs
