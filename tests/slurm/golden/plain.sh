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
asked= job=
pass_on() { asked=$1; [ -z "$job" ] || kill -s "$1" "$job" 2>/dev/null; }
trap 'pass_on USR2' USR2
trap 'pass_on TERM' TERM
(
set -e
export PYTHONPATH=/shared/optimus-cc${PYTHONPATH:+:$PYTHONPATH}
cd '/home/me/my work'

# command
exec /shared/venv/bin/python -m launchers.slurm.job /shared/runs/.slurm/1a2b3c4d/array_1.runs
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
exec /shared/venv/bin/python -m launchers.slurm.job /shared/runs/.slurm/1a2b3c4d/array_1.runs --unbegun "$job"
fi
exit $code
