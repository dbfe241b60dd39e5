#!/bin/bash

# Parameters
#SBATCH --array=0-0
#SBATCH --cpus-per-task=4
#SBATCH --job-name=optimus_cc
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/.slurm/1a2b3c4d/array_1_%a.out
#SBATCH --requeue
#SBATCH --signal=B:USR2@120

# setup
set -e
export PYTHONPATH=/shared/optimus-cc${PYTHONPATH:+:$PYTHONPATH}
cd '/home/me/my work'

# command
exec /shared/venv/bin/python -m launchers.slurm.job /shared/runs/.slurm/1a2b3c4d/array_1.runs
