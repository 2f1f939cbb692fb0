#!/usr/bin/env bash
# What slurm.sbatch starts as a task: torchrun for one node, or one process. Not for use by hand.
set -euo pipefail
# shellcheck source=env.sh
. "$LAUNCH_DIR/env.sh"

case $LAUNCH in
torchrun) command=("$LAUNCH_DIR/torchrun.sh") ;;
srun) command=("$PYTHON" -m megamem.cli.main) ;;
esac

# A signal reaches the command as well; this shell only has to outlive it.
trap : TERM USR1
status=0
NODE_RANK=$SLURM_NODEID "${command[@]}" "$@" || status=$?
# Interrupted and saved (75), or ended by USR1 before it could listen (138), is no failure: --kill-on-bad-exit would kill
# the other tasks while they end.
if [ "$status" -eq 75 ] || [ "$status" -eq 138 ]; then
  touch "$TASK_LOGS/interrupted"
  exit 0
fi
exit "$status"
