#!/usr/bin/env bash
# Start a megamem command under torchrun, on one node or, run once per node, on many.
#   NPROC=2 launch/torchrun.sh train examples/01_sudoku_demo/bgpo.yaml
#   NNODES=4 NODE_RANK=0 NPROC=8 MASTER_ADDR=node0 launch/torchrun.sh train CONFIG.yaml parallel.tensor=8
# Exit status: that of the command; 75 means interrupted by a signal after saving, run it again.
set -euo pipefail
if [ $# -eq 0 ]; then
  echo "usage: [NPROC=8 NNODES=1 NODE_RANK=0 MASTER_ADDR=… MASTER_PORT=…] $0 COMMAND [ARGUMENT]..." >&2
  exit 2
fi
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "$NNODES" -eq 1 ]; then
  rendezvous=(--standalone)
elif [ -n "$MASTER_ADDR" ]; then
  # Static: only here do --node-rank and --master-addr count.
  rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --rdzv-id "$RUN_ID")
  rendezvous+=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
  echo "$0: NNODES = $NNODES needs MASTER_ADDR, the address of node 0" >&2
  exit 2
fi
exec "$PYTHON" -m megamem.platform.elastic "${rendezvous[@]}" --nproc-per-node "$NPROC" -m megamem.cli.main "$@"
