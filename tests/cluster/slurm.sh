#!/bin/sh
# A Slurm cluster of this machine alone, to try things on: sh tests/cluster/slurm.sh start|stop FOLDER
# Needs Debian's slurm-wlm and munge, and root, as the daemons do. Everything is written below FOLDER.
set -eu
verb=$1
folder=$(mkdir -p "$2" && cd "$2" && pwd)
export SLURM_CONF="$folder/slurm.conf"

start() {
    cores=$(nproc)
    mkdir -p "$folder/state" "$folder/spool" /run/munge
    chown munge: /run/munge
    cat >"$SLURM_CONF" <<CONF
ClusterName=alone
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
JobRequeue=1
KillWait=30
OverTimeLimit=0
ReturnToService=2
SchedulerParameters=sched_interval=1,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$cores State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    pgrep -x munged >/dev/null || runuser -u munge -- munged
    slurmctld
    slurmd
    for _ in $(seq 30); do
        sinfo --noheader --format=%T 2>/dev/null | grep -q idle && return
        sleep 1
    done
    tail "$folder"/*.log >&2
    return 1
}

stop() {
    for name in slurmd slurmctld; do
        if [ -f "$folder/$name.pid" ]; then
            kill "$(cat "$folder/$name.pid")" || true
        fi
    done
}

"$verb"
