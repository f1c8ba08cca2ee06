#!/bin/bash
#flux: --job-name=hpctrain
#flux: --nodes=4
#flux: --time-limit=7200s
#flux: --output=logs/hpctrain-{{id}}.out
#flux: --exclusive
# Written by hpctrain 0.1.0 from flux-run for a Flux machine of the El Capitan kind, MI300A nodes.
# Note: RCCL uses Slingshot only by a network plugin: load the site's, by --module
# shellcheck disable=SC1003,SC1110,SC1111,SC1112,SC2016,SC2088,SC2317  # values are meant literally; traps call the functions

set -euo pipefail

hpc_say() { printf 'hpctrain job: %s\n' "$*"; }
hpc_job=$(flux getattr jobid)
hpc_restarts=${HPCTRAIN_RESTARTS:-0}
hpc_nodes=$(flux getattr hostlist)

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

export OMP_NUM_THREADS=21

hpc_say "$hpc_job, restart $hpc_restarts of at most 0"
hpc_say '4 nodes, 16 ranks, 4 GPUs per node'
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
    flux run -N 4 -n 16 -c 21 -g 1 -opmi=cray-pals \
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
    hpc_say 'not run again: no restarts were allowed'
    hpc_code=1 # a batch system that requeues by exit code would not count
fi
exit "$hpc_code"
