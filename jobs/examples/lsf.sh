#!/bin/bash
#BSUB -J hpctrain
#BSUB -nnodes 4
#BSUB -W 02:00
#BSUB -P abc123
#BSUB -o logs/hpctrain-%J.out
#BSUB -Q "75"
#BSUB -wa USR2 -wt 5
# Written by hpctrain 0.1.0 from lsf-jsrun for a Summit-like LSF cluster.
# shellcheck disable=SC1003,SC1110,SC1111,SC1112,SC2016,SC2088,SC2317  # values are meant literally; traps call the functions

set -euo pipefail

hpc_say() { printf 'hpctrain job: %s\n' "$*"; }
hpc_job=$LSB_JOBID-${LSB_JOBINDEX:-0}
hpc_count=logs"/.restarts-$hpc_job" # LSF keeps the id of a requeued job, and no count
hpc_restarts=$(cat "$hpc_count" 2>/dev/null || echo 0)
hpc_nodes=${LSB_MCPU_HOSTS:-unknown}

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
trap 'hpc_pass_on TERM "TERM"' TERM
trap 'hpc_pass_on USR2 "USR2"' USR2

export OMP_NUM_THREADS=7

hpc_say "$hpc_job, restart $hpc_restarts of at most 10"
hpc_say '4 nodes, 24 ranks, 6 GPUs per node'
hpc_say "nodes: $hpc_nodes"
hpc_say "since $(date -u +%Y-%m-%dT%H:%M:%SZ) on $(hostname) in $PWD"
hpc_say "modules: ${LOADEDMODULES:-none}"
hpc_command=(python train.py)
hpc_say "command: $(printf '%q ' "${hpc_command[@]}")"

if [ -n "$hpc_signalled" ]; then
    hpc_say "the signal $hpc_signalled came before the ranks were started"
    hpc_code=143
    [ "$hpc_signalled" = TERM ] || hpc_code=75
else
    hpc_say "the ranks start after $SECONDS s"
    jsrun -n 24 -r 6 -a 1 -g 1 -c 7 -b packed:7 \
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
hpc_say "exit code $hpc_code after $SECONDS s"

if [ "$hpc_code" -eq 75 ]; then # the work is saved and not finished
    if [ "$hpc_restarts" -lt 10 ]; then
        echo "$((hpc_restarts + 1))" >"$hpc_count"
        hpc_say "requeued for restart $((hpc_restarts + 1)) of 10"
        exit 75 # the directive -Q requeues it
    fi
    hpc_say 'not run again: 10 restarts were allowed'
    hpc_code=1 # a batch system that requeues by exit code would not count
fi
exit "$hpc_code"
