#!/bin/bash
#BSUB -J hpctrain
#BSUB -nnodes 4
#BSUB -W 02:00
#BSUB -P abc123
#BSUB -o logs/hpctrain-%J.out
#BSUB -Q "75 124 137"
#BSUB -wa USR2 -wt 5
# Written by hpctrain 0.1.0 from lsf-jsrun for a Summit-like LSF cluster.
# shellcheck disable=SC1003,SC1110,SC1111,SC1112,SC2016,SC2088,SC2317  # values are meant literally; traps call the functions

set -euo pipefail

hpc_say() { printf 'hpctrain job: %s\n' "$*"; }
hpc_job=$LSB_JOBID-${LSB_JOBINDEX:-0}
hpc_run=$hpc_job
hpc_nodes=${LSB_MCPU_HOSTS:-unknown}

# Where the ranks say which checkpoints are complete, which host has failed, and why they end.
export HPCTRAIN_NOTES="$PWD/logs/.restarts-$hpc_run"
mkdir -p -- "$HPCTRAIN_NOTES"
rm -f -- "$HPCTRAIN_NOTES/failed" "$HPCTRAIN_NOTES/code"
hpc_restarts=$(cat "$HPCTRAIN_NOTES/count" 2>/dev/null || echo 0) # LSF keeps the id of a requeued job, and no count

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
hpc_each_node=(jsrun -n 4 -r 1 -a 1 -c 1)

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
if [ "$hpc_code" -ne 0 ] && [ -s "$HPCTRAIN_NOTES/code" ]; then
    hpc_code=$(cat "$HPCTRAIN_NOTES/code") # of the rank that ended first; launchers have codes of their own
fi
hpc_say "exit code $hpc_code after $SECONDS s"
if [ "$hpc_code" -ne 0 ]; then
    hpc_sweep "$hpc_since"
    # Nodes that are gone do not answer, and a cancelled job may start nothing any more.
    timeout 60 "${hpc_each_node[@]}" bash -c "$(declare -f hpc_sweep); hpc_sweep $hpc_since" ||
        hpc_say 'not every node was looked at for shared memory of killed ranks (hpctrain doctor --clean)'
fi

case "$hpc_code" in
    75 | 124 | 137)
        hpc_saved=$(cat "$HPCTRAIN_NOTES"/checkpoint-* 2>/dev/null || true)
        hpc_failed=$(cat "$HPCTRAIN_NOTES/failed" 2>/dev/null || true)
        if [ "$hpc_restarts" -ge 10 ]; then
            hpc_say 'not run again: 10 restarts were allowed'
        elif [ -e "$HPCTRAIN_NOTES/saved" ] && [ "$hpc_saved" = "$(cat "$HPCTRAIN_NOTES/saved")" ] &&
            { [ -n "$hpc_saved" ] || [ "$hpc_code" -ne 75 ]; }; then
            hpc_say "not run again: no new checkpoint since the last restart (${hpc_saved:-none was ever reported})"
        else
            printf '%s\n' "$hpc_saved" >"$HPCTRAIN_NOTES/saved"
            [ -z "$hpc_failed" ] || hpc_say "failed: ${hpc_failed//$'\n'/ }; LSF may use it again (bmod -R keeps a job away from a host)"
            echo "$((hpc_restarts + 1))" >"$HPCTRAIN_NOTES/count"
            hpc_say "requeued for restart $((hpc_restarts + 1)) of 10"
            exit "$hpc_code" # the directive -Q requeues it
        fi
        hpc_code=1 # the directive -Q requeues by exit code, and does not count
        ;;
esac
rm -rf -- "$HPCTRAIN_NOTES"
exit "$hpc_code"
