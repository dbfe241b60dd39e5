#!/bin/bash

# Parameters
#SBATCH --account=me
#SBATCH --array=0-11%4
#SBATCH --constraint='h100&ib'
#SBATCH --contiguous
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=optimus_cc
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --mem=1024512M
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/.slurm/1a2b3c4d/array_2_%a.out
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --requeue
#SBATCH --reservation=mine
#SBATCH --signal=B:USR2@120
#SBATCH --time=1440

# setup
set -e
module load cuda/12.8
module load nccl
export NCCL_SOCKET_IFNAME=ib0
export PYTHONPATH=/shared/optimus-cc${PYTHONPATH:+:$PYTHONPATH}
cd '/home/me/my work'

# command
exec /shared/venv/bin/python -m launchers.slurm.job /shared/runs/.slurm/1a2b3c4d/array_2.runs
