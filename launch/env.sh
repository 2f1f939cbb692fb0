# Every variable of the launch scripts, once. Override any of them in the environment, or in the file named by SITE_ENV
# (fabric settings of a cluster, for example).
if [ -n "${SITE_ENV:-}" ]; then
  # shellcheck source=/dev/null
  . "$SITE_ENV"
fi

# Where this job runs.
: "${PYTHON:=python}"         # interpreter that has megamem
: "${NNODES:=1}"              # nodes
: "${NODE_RANK:=0}"           # index of this node
: "${NPROC:=1}"               # processes on this node: one per GPU
: "${MASTER_ADDR:=127.0.0.1}" # address of node 0
: "${MASTER_PORT:=29500}"     # free port on node 0; unused with one node

# CPU runs: one thread per process, and no spinning while waiting, or processes on the same cores slow each other down.
: "${OMP_NUM_THREADS:=1}"
: "${OMP_WAIT_POLICY:=PASSIVE}"
: "${GOMP_SPINCOUNT:=0}"

# Megatron-core: tensor parallelism on Hopper and older needs one queue so that communication starts before compute.
: "${CUDA_DEVICE_MAX_CONNECTIONS:=1}"

export PYTHON NNODES NODE_RANK NPROC MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT CUDA_DEVICE_MAX_CONNECTIONS
