#!/bin/bash

# Parameters
#SBATCH --account=me
#SBATCH --constraint='h100&ib'
#SBATCH --cpus-per-task=96
#SBATCH --gpus-per-node=8
#SBATCH --job-name=optimus_cc_after
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --mem=1024512M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/.slurm/1a2b3c4d/after.out
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --time=1440

# setup
set -e
module load cuda/12.8
module load nccl
export NCCL_SOCKET_IFNAME=ib0
export PYTHONPATH=/shared/optimus-cc${PYTHONPATH:+:$PYTHONPATH}
cd '/home/me/my work'

# command
/shared/venv/bin/python /shared/optimus-cc/run.py task=evaluate run=/shared/runs/a cluster.ranks_per_node=8 || failed=1
/shared/venv/bin/python /shared/optimus-cc/run.py task=evaluate 'run='"'"'/shared/runs/b\'"'"'s'"'"'' parallel=single parallel.tensor_parallel_size=8 parallel.pipeline_parallel_size=1 parallel.data_parallel_size=1 cluster.ranks_per_node=8 'evaluation.tasks=[piqa,race]' evaluation.limit=100 'evaluation.data_dir='"'"'/data/zero shot'"'"'' || failed=1
python -m analysis table /shared/runs a 'b'"'"'s'
exit ${failed:-0}
