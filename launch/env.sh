# shellcheck shell=bash
# Every variable of the launch scripts, once. Override any of them in the environment, or in the file named by SITE_ENV
# (fabric settings of a cluster, for example: launch/site.example.env). Empty means: found out at the start.
if [ -n "${SITE_ENV:-}" ]; then
  # shellcheck source=/dev/null
  . "$SITE_ENV"
fi

# Where this job runs.
: "${PYTHON:=python}"                    # interpreter that has megamem
: "${NPROC:=${SLURM_GPUS_ON_NODE:-1}}"   # processes on a node: one per GPU
: "${NNODES:=1}"                         # nodes                        (torchrun.sh; slurm.sbatch asks Slurm)
: "${NODE_RANK:=0}"                      # index of this node           (torchrun.sh)
: "${MASTER_ADDR:=}"                     # address of node 0            (torchrun.sh needs it with several nodes)
: "${MASTER_PORT:=}"                     # free port on node 0          (torchrun.sh: 29500)
: "${RUN_ID:=none}"                      # a name for this start, the same on all nodes; tells starts apart

# Slurm and MPI.
: "${LAUNCH:=torchrun}"                  # slurm.sbatch: torchrun, one task per node; or srun, one task per GPU
: "${LAUNCH_DIR:=}"                      # slurm.sbatch: this folder; default: launch/ where the job was submitted
: "${LOGS:=logs}"                        # slurm.sbatch: folder for logs, on a disk that every node sees
: "${MAX_RESTARTS:=100}"                 # slurm.sbatch: restarts after which an interrupted job is not queued again
: "${CONTAINER_IMAGE:=}"                 # slurm.sbatch: image for pyxis; empty: no container
: "${CONTAINER_MOUNTS:=}"                # slurm.sbatch: host:container,… ; must hold the repository and the run folder
: "${MPI_ARGS:=}"                        # mpirun.sh: more arguments for mpirun, e.g. --hostfile FILE

# torchrun's --signals-to-handle and --shutdown-timeout, in its spelling for the environment, which a torch that is too old
# for them ignores: signals handed on to the processes, and the seconds these have to save before they are killed. More
# than saving takes (train.grace in the configuration is compared with that), less than the cluster leaves to the job.
: "${PET_SIGNALS_TO_HANDLE:=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
: "${PET_SHUTDOWN_TIMEOUT:=120}"

# CPU runs: one thread per process, and no spinning while waiting, or processes on the same cores slow each other down.
: "${OMP_NUM_THREADS:=1}"
: "${OMP_WAIT_POLICY:=PASSIVE}"
: "${GOMP_SPINCOUNT:=0}"

# Megatron-core: tensor parallelism on Hopper and older needs one queue so that communication starts before compute.
: "${CUDA_DEVICE_MAX_CONNECTIONS:=1}"

export PYTHON NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT RUN_ID LAUNCH LAUNCH_DIR LOGS
export PET_SIGNALS_TO_HANDLE PET_SHUTDOWN_TIMEOUT
export OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT CUDA_DEVICE_MAX_CONNECTIONS
