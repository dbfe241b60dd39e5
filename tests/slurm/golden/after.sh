#!/bin/bash

# Parameters
#SBATCH --account=me
#SBATCH --constraint='h100&ib'
#SBATCH --cpus-per-task=1
#SBATCH --job-name=optimus_cc_after
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/.slurm/1a2b3c4d/after.out
#SBATCH --partition=gpu
#SBATCH --qos=long

# setup
set -e
module load cuda/12.8
module load nccl
export NCCL_SOCKET_IFNAME=ib0
export PYTHONPATH=/shared/optimus-cc${PYTHONPATH:+:$PYTHONPATH}
cd '/home/me/my work'

# command
python -m analysis table /shared/runs a b
