#!/bin/bash
#SBATCH --job-name=hpctrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-task=1
#SBATCH --time=02:00:00
#SBATCH --partition=batch
#SBATCH --account=abc123
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --network=disable_rdzv_get
# Written by hpctrain 0.1.0 from slurm-srun for Frontier (OLCF).
# Note: give --module rocm/VERSION, of the ROCm that your torch was built for, and the PrgEnv and cpe of the PyTorch page
# Note: where RCCL hangs, --env NCCL_SOCKET_IFNAME=hsn0
# shellcheck disable=SC1003,SC1110,SC1111,SC1112,SC2016,SC2088,SC2317  # values are meant literally; traps call the functions
# hpctrain lint: ignore J21 (the site asks for it)

set -euo pipefail

hpc_say() { printf 'hpctrain job: %s\n' "$*"; }
hpc_job=$SLURM_JOB_ID
hpc_nodes=$SLURM_JOB_NODELIST
hpc_log_start=$(stat -L -c %s "/proc/$$/fd/2")

# Shared memory that killed ranks have left on this node: named as MPI libraries name theirs, this
# user's, made since this job began, and neither open nor mapped anywhere.
hpc_since=$(date +%s)
hpc_sweep() {
    local file number place
    for file in /dev/shm/mpich_shm_* /dev/shm/vader_segment.* /dev/shm/sm_segment.* /dev/shm/osc_rdma.* /dev/shm/psm*_shm.*; do
        if [ ! -f "$file" ] || [ ! -O "$file" ] || [ -L "$file" ]; then continue; fi
        [ "$(stat -c %Y -- "$file")" -ge "$1" ] || continue
        number=$((0x$(stat -c %D -- "$file")))
        place=$(printf '%02x:%02x %d' $((number >> 8 & 0xfff)) \
            $((number & 0xff | number >> 12 & 0xfff00)) "$(stat -c %i -- "$file")")
        grep -qsE -- " $place( |\$)" /proc/[0-9]*/maps && continue
        [ -z "$(find /proc/[0-9]*/fd -lname "*/${file##*/}" -print -quit 2>/dev/null)" ] || continue
        rm -f -- "$file" && printf 'hpctrain job: removed %s, left by killed ranks on %s\n' "$file" "$(hostname)"
    done
}

# The warning before the end reaches this shell alone: it is passed on to the ranks.
hpc_pid=''
hpc_signalled=''
hpc_pass_on() {
    hpc_signalled=$1
    hpc_say "signal $1 after $SECONDS s"
    if [ -n "$hpc_pid" ] && [ -n "$2" ]; then
        kill -s "$2" "$hpc_pid" || hpc_say 'the ranks have ended already'
    fi
}
trap 'hpc_pass_on TERM ""' TERM
trap 'hpc_pass_on USR2 "USR2"' USR2

# Scripts of a site are not written for a strict shell.
set +u
module load rocm
module load rccl-net-plugin
set -u

export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export NCCL_CROSS_NIC=1
export NCCL_NET_GDR_LEVEL=PHB
export HSA_FORCE_FINE_GRAIN_PCIE=1
export FI_MR_CACHE_MONITOR=kdreg2
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=2048
export FI_CXI_RX_MATCH_MODE=hybrid
export FI_CXI_RDZV_PROTO=alt_read
export FI_CXI_RDZV_EAGER_SIZE=0
export FI_CXI_RDZV_THRESHOLD=0
export FI_CXI_RDZV_GET_MIN=0
export OMP_NUM_THREADS=7
export MIOPEN_USER_DB_PATH=/tmp/hpctrain-miopen"-$hpc_job"
export MIOPEN_CUSTOM_CACHE_DIR=/tmp/hpctrain-miopen"-$hpc_job"
export SRUN_CPUS_PER_TASK=7 # in Slurm 22.05 to 23.02 srun does not take it from the job

hpc_say "$hpc_job, restart 0 of at most 0"
hpc_say '4 nodes, 32 ranks, 8 GPUs per node'
hpc_say "nodes: $hpc_nodes"
hpc_say "since $(date -u +%Y-%m-%dT%H:%M:%SZ) on $(hostname) in $PWD"
hpc_say "modules: ${LOADEDMODULES:-none}"
hpc_command=(python train.py)
hpc_say "command: $(printf '%q ' "${hpc_command[@]}")"
hpc_each_node=(srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --mpi=none)

if [ -n "$hpc_signalled" ]; then
    hpc_say "the signal $hpc_signalled came before the ranks were started"
    hpc_code=143
    [ "$hpc_signalled" = TERM ] || hpc_code=75
else
    hpc_say "the ranks start after $SECONDS s"
    srun --nodes=4 --ntasks=32 --ntasks-per-node=8 --mpi=cray_shasta --kill-on-bad-exit=1 --gpu-bind=closest \
        bash -c 'mkdir -p -- "$MIOPEN_USER_DB_PATH" "$MIOPEN_CUSTOM_CACHE_DIR"; exec "$@"' hpctrain-rank \
        "${hpc_command[@]}" &
    hpc_pid=$!
    while :; do # a signal ends `wait`, not the ranks
        hpc_signalled=''
        hpc_code=0
        wait "$hpc_pid" || hpc_code=$?
        [ -n "$hpc_signalled" ] || break
    done
    hpc_pid=''
fi
if [ "$hpc_code" -gt 128 ] && [ -f "/proc/$$/fd/2" ]; then
    # srun answers with the ranks it had to kill; the log has the one that failed first.
    hpc_ends=$(tail -c "+$((hpc_log_start + 1))" "/proc/$$/fd/2" |
        sed -n 's/^srun: error: \([^ :]*\): tasks\{0,1\} [0-9,-]*: /\1 /p')
    hpc_first=$(sed -n '/ Exited with exit code [0-9]*$/{s/.* //p;q}' <<<"$hpc_ends")
    hpc_code=${hpc_first:-$hpc_code}
fi
hpc_say "exit code $hpc_code after $SECONDS s"
if [ "$hpc_code" -ne 0 ]; then
    hpc_sweep "$hpc_since"
    # Nodes that are gone do not answer, and a cancelled job may start nothing any more.
    timeout 60 "${hpc_each_node[@]}" --overlap bash -c "$(declare -f hpc_sweep); hpc_sweep $hpc_since" ||
        hpc_say 'not every node was looked at for shared memory of killed ranks (hpctrain doctor --clean)'
fi

if [ "$hpc_code" -eq 75 ]; then # the work is saved and not finished
    hpc_say 'not run again: no restarts were allowed'
    hpc_code=1 # a batch system that requeues by exit code would not count
fi
exit "$hpc_code"
