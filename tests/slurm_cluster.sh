#!/bin/bash
# Runs a command in a Slurm cluster of this one machine; as root, on Debian or Ubuntu:
#
#   tests/slurm_cluster.sh python -m pytest tests/test_cluster.py
#
# The cluster has four CPUs and two GPUs, whatever the machine has, and no accounting. The script installs slurm-wlm and
# munge if they are missing, and keeps its files in /tmp/slurm_cluster. It refuses if the machine is part of a cluster.
set -euo pipefail
STATE=/tmp/slurm_cluster NODE=$(hostname -s)
fail() { echo "tests/slurm_cluster.sh: error: $*" >&2; exit 2; }

[ "$(id -u)" = 0 ] || fail "only root can set up a cluster: run this as root, for example in a container"
[ ! -e /etc/slurm/slurm.conf ] || fail "/etc/slurm/slurm.conf: this machine is already in a cluster: use a container"
if ! command -v slurmctld slurmd munged > /dev/null; then
    command -v apt-get > /dev/null || fail "there is no apt-get: install slurmctld, slurmd and munged by hand"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge
fi
stop() {
    for name in slurmd slurmctld munged; do
        pid=$(cat $STATE/$name.pid 2> /dev/null) || continue
        while grep -qsx $name "/proc/$pid/comm" && kill "$pid"; do sleep 0.2; done
    done
    rm -rf $STATE
}
stop  # removes what a killed cluster left
trap stop EXIT
mkdir -p -m 755 $STATE/spool $STATE/state $STATE/munge
head -c 1024 /dev/urandom > $STATE/munge/key
chmod 400 $STATE/munge/key
chown -R munge: $STATE/munge
runuser -u munge -- munged --socket=$STATE/munge/socket --key-file=$STATE/munge/key --pid-file=$STATE/munge/munged.pid \
    --log-file=$STATE/munge/log --seed-file=$STATE/munge/seed
ln -s munge/munged.pid $STATE/munged.pid
cat > $STATE/gres.conf << END
Name=gpu File=/dev/null
Name=gpu File=/dev/zero
END
cat > $STATE/slurm.conf << END
ClusterName=test
SlurmctldHost=$NODE(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$STATE/munge/socket,cred_expire=5
StateSaveLocation=$STATE/state
SlurmdSpoolDir=$STATE/spool
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.pid
SlurmctldLogFile=$STATE/slurmctld.log
SlurmdLogFile=$STATE/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=1
KillWait=20
MinJobAge=60
SchedulerParameters=sched_interval=1,sched_min_interval=200000,batch_sched_delay=0
GresTypes=gpu
NodeName=$NODE NodeAddr=127.0.0.1 CPUs=4 Gres=gpu:2 State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$STATE/slurm.conf
trap 'scancel --user=root; while [ -n "$(squeue -h)" ]; do sleep 0.2; done; stop' EXIT  # cancels jobs of failed tests
slurmctld
slurmd
for _ in $(seq 60); do
    [ "$(sinfo -h -o %T 2> /dev/null)" != idle ] || break
    sleep 0.5
done
[ "$(sinfo -h -o %T)" = idle ] || fail "the node does not come up: $(tail -n 3 $STATE/slurmctld.log $STATE/slurmd.log)"
"$@"
