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
asked= job=
pass_on() { asked=$1; [ -z "$job" ] || kill -s "$1" "$job" 2>/dev/null; }
trap 'pass_on USR2' USR2
trap 'pass_on TERM' TERM
(
set -e
module load cuda/12.8
module load nccl
export NCCL_SOCKET_IFNAME=ib0
export PYTHONPATH=/shared/optimus-cc${PYTHONPATH:+:$PYTHONPATH}
cd '/home/me/my work'

# command
exec /shared/venv/bin/python -m launchers.slurm.job /shared/runs/.slurm/1a2b3c4d/array_2.runs
) &
job=$!
[ -z "$asked" ] || kill -s "$asked" "$job"
while wait "$job"; kill -0 "$job" 2>/dev/null; do :; done
wait "$job"  # each signal ends a wait
code=$?
case $code in
140 | 143) [ -n "$asked" ] || sleep 1 ;;  # it died of one, which may be on its way to this shell, too
*) asked= ;;
esac
trap '' USR2 TERM
if [ -n "$asked" ]; then
export PYTHONPATH=/shared/optimus-cc${PYTHONPATH:+:$PYTHONPATH}
cd '/home/me/my work'
exec /shared/venv/bin/python -m launchers.slurm.job /shared/runs/.slurm/1a2b3c4d/array_2.runs --unbegun "$job"
fi
exit $code
