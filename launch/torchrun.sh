#!/usr/bin/env bash
# Start a megamem command under torchrun, on one node or, run once per node, on many.
#   NPROC=2 launch/torchrun.sh train examples/01_sudoku_demo/bgpo.yaml
#   NNODES=4 NODE_RANK=0 NPROC=8 MASTER_ADDR=node0 launch/torchrun.sh train CONFIG.yaml parallel.tensor=8
set -euo pipefail
if [ $# -eq 0 ]; then
  echo "usage: [NPROC=8 NNODES=1 NODE_RANK=0 MASTER_ADDR=… MASTER_PORT=…] $0 COMMAND [ARGUMENT]..." >&2
  exit 2
fi
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "$NNODES" -eq 1 ]; then
  rendezvous=(--standalone)
else
  rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi
exec "$PYTHON" -m megamem.platform.elastic "${rendezvous[@]}" --nproc-per-node "$NPROC" -m megamem.cli.main "$@"
