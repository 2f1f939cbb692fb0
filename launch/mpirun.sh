#!/usr/bin/env bash
# Start a megamem command under Open MPI's mpirun.
#   NPROC=8 launch/mpirun.sh train CONFIG.yaml parallel.tensor=8                                      one node
#   NNODES=4 NPROC=8 MPI_ARGS="--hostfile hosts" launch/mpirun.sh train CONFIG.yaml                   four nodes
# Several nodes need mpi4py (pip install -e .[mpi]), or MASTER_ADDR and MASTER_PORT. Inside a Slurm allocation mpirun
# finds the nodes itself. SIGTERM or SIGUSR1 to this script: the run saves and ends with status 75.
set -euo pipefail
if [ $# -eq 0 ]; then
  echo "usage: [NPROC=8 NNODES=1 MPI_ARGS=… MASTER_ADDR=… MASTER_PORT=…] $0 COMMAND [ARGUMENT]..." >&2
  exit 2
fi
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# mpirun hands the environment to the processes of its own node only; these go to all.
shared=()
while read -r name; do
  shared+=(-x "$name")
done < <(compgen -e | grep -E '^(MASTER|OMP|GOMP|CUDA|NCCL|GLOO|UCX|TORCH|NVTE|PYTHON)')
read -r -a more <<<"$MPI_ARGS"

# mpirun answers SIGTERM by killing everything at once, but hands SIGUSR1 on. So it runs in a session of its own, where
# only this shell's signals reach it.
mpi=""
trap '[ -z "$mpi" ] || kill -USR1 "$mpi" || true' TERM USR1 HUP
trap '[ -z "$mpi" ] || kill -TERM "$mpi" || true' INT
setsid mpirun -n $((NNODES * NPROC)) --map-by "ppr:$NPROC:node" --bind-to none "${shared[@]}" "${more[@]}" \
  "$PYTHON" -m megamem.cli.main "$@" &
mpi=$!
while kill -0 "$mpi" 2>/dev/null; do
  wait "$mpi" || true # a trap ends it early
done
wait "$mpi"
