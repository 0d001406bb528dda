#!/usr/bin/env bash
# The first process of a cluster, in namespaces of its own: a bridge, and the nodes behind it, each in namespaces of its
# own again. When it ends, the kernel ends all of it. init.sh DIRECTORY NAME NODES
set -euo pipefail
dir=$1 name=$2 nodes=$3
here=$(cd "$(dirname "$0")" && pwd)

# shellcheck source=hack/cluster/mounts.sh
. "$here/mounts.sh"
leave_mounts_of_others "$dir" "$(cd "$here/../.." && pwd)" "${DELTAPATH_CACHE:-${XDG_CACHE_HOME:-$HOME}}"

hostname "$name"
ip link set lo up
ip link add bridge type bridge
ip address add 10.99.0.1/24 dev bridge
ip link set bridge up

# A cgroup namespace begins in the cgroup of whoever makes it.
enter_cgroup() {
    local hierarchy cgroup hierarchies=(/sys/fs/cgroup/*)
    # One for all controllers, whose directories are others' cgroups; before cgroup v2 a directory for each.
    [ ! -e /sys/fs/cgroup/cgroup.controllers ] || hierarchies=(/sys/fs/cgroup)
    for hierarchy in "${hierarchies[@]}"; do
        [ -e "$hierarchy/cgroup.procs" ] || continue
        cgroup=$hierarchy/deltapath-$name/$1
        mkdir -p "$cgroup"
        if [ -e "$cgroup/cpuset.cpus" ] && [ -e "$cgroup/notify_on_release" ]; then
            for part in "$hierarchy/deltapath-$name" "$cgroup"; do
                cat "$hierarchy/cpuset.cpus" >"$part/cpuset.cpus"
                cat "$hierarchy/cpuset.mems" >"$part/cpuset.mems"
            done
        fi
        [ ! -e "$hierarchy/deltapath-$name/cgroup.subtree_control" ] ||
            sed 's/[a-z]*/+&/g' "$hierarchy/deltapath-$name/cgroup.controllers" >"$hierarchy/deltapath-$name/cgroup.subtree_control"
        echo "$BASHPID" >"$cgroup/cgroup.procs"
    done
}

# Runs a node until it ends, and again after its power was cut: then it waits until its file `off` is gone.
run() {
    local node=$1 starter pid
    while :; do
        (
            enter_cgroup "$node"
            exec unshare --mount --propagation private --pid --net --uts --ipc --cgroup --fork --kill-child --mount-proc \
                "$here/node.sh" "$dir" "$node" "$nodes"
        ) >>"$dir/$node/logs/node.log" 2>&1 &
        starter=$!
        # unshare makes the namespaces before it forks.
        until [ "$(cat "/proc/$starter/comm" 2>/dev/null)" = unshare ] && pid=$(pgrep -P "$starter"); do
            kill -0 "$starter" 2>/dev/null || { cat "$dir/$node/logs/node.log" && exit 1; }
            sleep 0.1
        done
        # The kernel removes that of a node whose power was cut some time after it.
        ip link delete "$node" 2>/dev/null || true
        ip link add "$node" type veth peer name eth0 netns "$pid"
        ip link set "$node" master bridge up
        echo "$pid" >"$dir/$node/pid"
        wait "$starter" || true
        [ -e "$dir/$node/off" ] || return 0
        while [ -e "$dir/$node/off" ]; do sleep 0.2; done
    done
}
for ((number = 1; number <= nodes; number++)); do run "node$number" & done
wait -n
echo "a node ended"
