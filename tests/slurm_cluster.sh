#!/usr/bin/env bash
# A real SLURM of two nodes on one Linux machine, for the tests:
#
#   tests/slurm_cluster.sh up DIR              starts it and waits until both nodes are idle; its logs are in DIR
#   tests/slurm_cluster.sh in DIR COMMAND ...  runs a command on its login node: sbatch, squeue, scontrol, ...
#   tests/slurm_cluster.sh down DIR            ends it, with every job
#
# `up` installs Debian's packages where they are missing, and exits with 77 and a reason where there can be no cluster.
#
# Everything lives in namespaces of its own: a network with a login node and two more hosts, their names, their /run and
# their processes. So "localhost" of one node is not the other's, as on a cluster; nothing on this machine is changed;
# and when the first process ends, the kernel removes all of it. The file system is shared, again as on a cluster. A
# node's own name is localhost to itself, as on some: gloo must be given an interface (GLOO_SOCKET_IFNAME=eth0).
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin  # where Debian puts the daemons, and not everybody looks
nodes=(n1 n2)

cannot() { echo "no SLURM here: $1" >&2; exit 77; }

install_packages() {
    if hash slurmctld slurmd munged ip 2>/dev/null; then return; fi  # unlike command -v it wants all of them
    command -v apt-get >/dev/null || cannot "slurmctld, slurmd, munged or ip is missing, and there is no apt-get"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        slurm-wlm munge iproute2; } >"$dir/install.log" 2>&1 ||
        cannot "apt-get cannot install slurm-wlm, munge and iproute2: $(tail -n 1 "$dir/install.log")"
}

write_configuration() {
    unset OMP_NUM_THREADS  # nproc would tell this number
    # cred_expire is also how long a requeued job waits before it starts again. Jobs share nodes, even exclusive ones
    # (FORCE), so that tests can run side by side. task/affinity binds processes to cores, as clusters do.
    cat >"$dir/slurm.conf" <<-CONFIGURATION
		ClusterName=test
		SlurmctldHost=login
		SlurmUser=root
		SlurmdUser=root
		AuthType=auth/munge
		AuthInfo=cred_expire=5
		StateSaveLocation=$dir/state
		SlurmdSpoolDir=$dir/spool.%n
		SlurmctldPidFile=/run/slurmctld.pid
		SlurmdPidFile=/run/slurmd.%n.pid
		SlurmctldLogFile=$dir/slurmctld.log
		SlurmdLogFile=$dir/slurmd.%n.log
		MailProg=/bin/true
		ProctrackType=proctrack/linuxproc
		TaskPlugin=task/affinity
		JobAcctGatherType=jobacct_gather/none
		SelectType=select/cons_tres
		SelectTypeParameters=CR_Core
		SlurmdParameters=config_overrides
		SchedulerParameters=sched_interval=2,bf_interval=2
		KillWait=30
		ReturnToService=2
		$(printf 'NodeName=%s CPUs='"$(nproc)"' RealMemory=1000\n' "${nodes[@]}")
		PartitionName=main Nodes=ALL Default=YES OverSubscribe=FORCE:8 State=UP
	CONFIGURATION
    echo "127.0.0.1 localhost" >"$dir/hosts"
    echo "10.0.0.1 login" >>"$dir/hosts"
    # Without this, looking up a name waits for name servers that the network of its own cannot reach.
    echo "hosts: files" >"$dir/nsswitch.conf"
}

login_node() {  # the first process in the namespaces; the others are its children
    hostname login
    mount -t tmpfs tmpfs /run
    ip link set lo up
    ip link add net0 type bridge
    ip address add 10.0.0.1/24 dev net0
    ip link set net0 up
    local number=10 node
    for node in "${nodes[@]}"; do
        ip netns add "$node"
        ip link add "to-$node" master net0 up type veth peer name eth0 netns "$node"
        ip -n "$node" link set lo up
        ip -n "$node" address add "10.0.0.$((number += 1))/24" dev eth0
        ip -n "$node" link set eth0 up
        echo "10.0.0.$number $node" >>"$dir/hosts"
    done
    mount --bind "$dir/hosts" /etc/hosts
    mount --bind "$dir/nsswitch.conf" /etc/nsswitch.conf

    mkdir -m 755 /run/munge
    (umask 077; head -c 128 /dev/urandom >/run/munge/key)
    munged --foreground --key-file=/run/munge/key --pid-file=/run/munge/pid --seed-file=/run/munge/seed &
    slurmctld -D &
    for node in "${nodes[@]}"; do
        mkdir -p "$dir/spool.$node"
        # not `ip netns exec`: it mounts a /sys without the cgroups that slurmd looks for
        nsenter --net="/run/netns/$node" unshare --uts --mount "$0" node "$dir" "$node" &
    done
    wait  # for ever: it also ends what its children leave behind
}

start_node() {
    hostname "$1"
    sed "s/ localhost$/ localhost $1/; /^10.* $1$/d" "$dir/hosts" >"$dir/hosts.$1"
    mount --bind "$dir/hosts.$1" /etc/hosts
    exec slurmd -D -N "$1"
}

login() { nsenter --target "$(cat "$dir/pid")" --net --mount --uts --wdns="$PWD" "$@"; }

up() {
    [[ $(id -u) == 0 ]] || cannot "only root can start one"
    unshare --net --uts --mount --pid --fork true 2>/dev/null || cannot "namespaces are not allowed"
    install_packages
    write_configuration
    # setsid: Ctrl-C in the tests' terminal is not for the daemons. --kill-child: ending unshare ends them all.
    setsid unshare --net --uts --mount --pid --fork --kill-child --mount-proc "$0" login "$dir" \
        </dev/null >"$dir/daemons.log" 2>&1 &
    echo "$!" >"$dir/pid"
    local tries
    for ((tries = 0; tries < 150; tries++)); do
        if [[ $(login sinfo --noheader --format=%D --states=idle 2>/dev/null) == "${#nodes[@]}" ]]; then return; fi
        sleep 0.2
    done
    tail -n 5 "$dir"/*.log >&2
    down
    cannot "the nodes did not come up"
}

down() {
    if [[ -f $dir/pid ]]; then
        kill -KILL "$(cat "$dir/pid")" 2>/dev/null || true
        rm "$dir/pid"
    fi
}

action=${1:?up, in or down} dir=$(realpath -m "${2:?a folder}")
mkdir -p "$dir"
export SLURM_CONF=$dir/slurm.conf
case $action in
up) up ;;
in) shift 2; login "$@" ;;
login) login_node ;;
node) start_node "$3" ;;
down) down ;;
*) echo "up, in or down, and not $action" >&2; exit 2 ;;
esac
