#!/usr/bin/env bash
# A real Kubernetes cluster on this machine, without Docker: each node is a set of namespaces with a containerd and a
# kubelet of its own. Nothing of the machine is changed. The cluster's name is CLUSTER (default: deltapath).
set -euo pipefail
# shellcheck source=hack/cluster/lib.sh
. "$(dirname "$0")/cluster/lib.sh"

usage="usage: cluster.sh COMMAND
  up [--nodes N]            make a cluster of 1 to 3 nodes (1), and load the images into it
  exec [--node N] COMMAND   run a command on a node (1), with kubectl set up
  load ARCHIVE...           load images, as docker save writes them, into all nodes
  install [--distributed | --overlay NAME] [--chart [--set KEY=VALUE]...]
                            install deltapath into it, as hack/kind-up.sh does
  off NODE                  cut the power of a node (2): its processes are killed, its mounts and loop devices gone
  on NODE                   start it again, with the disk that it had
  smoke [--if-built]        up, install, claims, two snapshots, the listed delta, down
  status                    what runs, and where its logs are
  down                      end it, and detach and remove what is left of it"

clusters=${DELTAPATH_CLUSTERS:-/var/tmp/deltapath-clusters}
[ "${1-}" != smoke ] || [ "$CLUSTER" != deltapath ] || CLUSTER=smoke-$$
export CLUSTER
[[ $CLUSTER =~ ^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$ ]] ||
    fail "CLUSTER=$CLUSTER: a name is 1 to 32 lower-case letters, digits and dashes, and begins with a letter"
dir=$clusters/$CLUSTER

root_only() { [ "$(id -u)" -eq 0 ] || fail "needs root, for namespaces and mounts"; }
# The process that watches over a cluster holds this lock for as long as it lives.
runs() { [ -e "$dir/lock" ] && ! flock --nonblock --conflict-exit-code 1 "$dir/lock" true; }
here_or_fail() { runs || fail "no cluster $CLUSTER runs: hack/cluster.sh up makes one"; }

# Why a machine cannot, each with what to do about it.
preflight() {
    local available controller try overlay=yes
    root_only
    need openssl curl runc nft ip perl pgrep setpriv
    [ -x /usr/lib/cni/ptp ] || fail "the CNI plugins are missing: make cluster-deps installs them"
    if ! built || ! [ -e "$root/.deps/image/archives/state" ]; then
        fail "the programs are not built yet: make cluster-deps builds them, once, in half an hour on two cores"
    fi
    [ -e /dev/loop-control ] || fail "no /dev/loop-control: modprobe loop"
    unshare --mount --propagation private --pid --net --uts --ipc --cgroup --fork true 2>/dev/null ||
        fail "this machine lets root make no namespaces (mount, pid, net, uts, ipc, cgroup); in a container, run it privileged"
    mkdir -p "$clusters"
    try=$(mktemp -d "$clusters/.try-XXXXXX")
    mkdir "$try"/{lower,upper,work,over}
    unshare --mount --propagation private mount -t overlay overlay \
        -o "lowerdir=$try/lower,upperdir=$try/upper,workdir=$try/work" "$try/over" 2>/dev/null || overlay=no
    rm -rf "$try"
    [ "$overlay" = yes ] ||
        fail "no overlay filesystem can be mounted over $clusters: modprobe overlay, or set DELTAPATH_CLUSTERS to a directory on ext4, xfs or btrfs"
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        for controller in cpu cpuset memory pids; do
            grep -qw "$controller" /sys/fs/cgroup/cgroup.subtree_control ||
                fail "the cgroup controller $controller is not handed down: echo +$controller >/sys/fs/cgroup/cgroup.subtree_control"
        done
    else
        for controller in cpu cpuacct cpuset devices freezer memory pids; do
            [ -e "/sys/fs/cgroup/$controller/cgroup.procs" ] ||
                fail "the cgroup controller $controller is not mounted at /sys/fs/cgroup/$controller"
        done
    fi
    available=$(awk '$1 == "MemAvailable:" { print int($2 / 1024) }' /proc/meminfo)
    [ "$available" -ge $((2048 + 1024 * nodes)) ] ||
        fail "$available MiB of memory are free, and $nodes nodes want $((2048 + 1024 * nodes))"
    available=$(df --output=avail -m "$clusters" | tail -n 1)
    [ "$available" -ge $((4096 + 2048 * nodes)) ] ||
        fail "$available MiB are free in $clusters, and $nodes nodes want $((4096 + 2048 * nodes))"
}

certificates() {
    local user node
    mkdir -p "$dir/pki"
    cd "$dir/pki"
    new_key() { openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null || openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }
    certificate() { # NAME SUBJECT [EXTENSION [CA]]
        local ca=${4-ca}
        new_key "$1.key"
        openssl req -new -key "$1.key" -subj "$2" -out "$1.csr"
        openssl x509 -req -in "$1.csr" -days 365 -CA "$ca.crt" -CAkey "$ca.key" -CAcreateserial -out "$1.crt" 2>/dev/null \
            -extfile <(printf 'basicConstraints=CA:FALSE\nkeyUsage=digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n%s\n' "${3-}")
        cat >"$1.kubeconfig" <<K
apiVersion: v1
kind: Config
clusters: [{name: cluster, cluster: {server: "https://10.99.0.11:6443", certificate-authority: $dir/pki/ca.crt}}]
users: [{name: $1, user: {client-certificate: $dir/pki/$1.crt, client-key: $dir/pki/$1.key}}]
contexts: [{name: cluster, context: {cluster: cluster, user: $1}}]
current-context: cluster
K
    }
    new_key ca.key
    openssl req -x509 -new -key ca.key -days 365 -subj "/CN=$CLUSTER" -out ca.crt
    # By which aggregated API servers know the API server: of a CA that signs nothing else.
    new_key front-proxy-ca.key
    openssl req -x509 -new -key front-proxy-ca.key -days 365 -subj "/CN=$CLUSTER front proxy" -out front-proxy-ca.crt
    certificate front-proxy /CN=front-proxy-client '' front-proxy-ca
    new_key accounts.key
    openssl pkey -in accounts.key -pubout -out accounts.pub
    certificate apiserver /CN=kube-apiserver "subjectAltName=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local,IP:10.99.0.11,IP:10.96.0.1"
    certificate admin /O=system:masters/CN=admin
    for user in controller-manager scheduler proxy; do certificate "$user" "/CN=system:kube-$user"; done
    for ((node = 1; node <= nodes; node++)); do
        certificate "node$node" "/O=system:nodes/CN=system:node:node$node" "subjectAltName=DNS:node$node,IP:10.99.0.1$node"
    done
    cd - >/dev/null
}

# Runs beside the cluster and after it: when anything of it is killed, all of it ends and is swept up.
watch_over() {
    local status=0
    exec {lock}>"$dir/lock"
    # A command that looks whether the cluster runs holds it for a moment.
    flock --timeout 5 "$lock" || exit 1
    # Each ends with its parent: setpriv here, unshare's first process with unshare, all others with that one.
    setpriv --pdeathsig KILL unshare --mount --propagation private --pid --net --uts --ipc --fork --kill-child --mount-proc \
        "$root/hack/cluster/init.sh" "$dir" "$CLUSTER" "$nodes" {lock}>&- &
    echo $! >"$dir/unshare.pid"
    wait $! || status=$?
    "$root/hack/cluster/sweep.sh" "$dir" "$CLUSTER" {lock}>&-
    echo "the cluster ended with status $status"
}

# Runs a command in the namespaces of the cluster, where the process ids of the nodes are known.
in_cluster() {
    local init
    init=$(pgrep -P "$(cat "$dir/unshare.pid")") || fail "the cluster $CLUSTER is ending"
    exec nsenter --target "$init" --mount --pid --net "$@"
}
# Runs a command in a node's namespaces.
on_node() {
    local node=$1
    shift
    [ -e "$dir/node$node/pid" ] || fail "node $node of the cluster $CLUSTER is off: hack/cluster.sh on $node"
    in_cluster nsenter --target "$(cat "$dir/node$node/pid")" --mount --pid --net --uts --ipc --cgroup --wd="$PWD" \
        env KUBECONFIG="$dir/pki/admin.kubeconfig" KUBECACHEDIR="$dir/kubectl" KUBE_CONTEXT=cluster DELTAPATH_CRDS="$cluster_cache/crds" \
        PATH="$cluster_cache/bin:$kubernetes_bin:$PATH" "$@"
}
control() { (on_node 1 "$@"); }
containerd_runs() { (on_node "$1" ctr version); }
nodes_of() { find "$dir" -maxdepth 1 -name 'node[0-9]' | wc -l; }

load_archives() {
    local archive node
    for archive in "$@"; do
        [ -r "$archive" ] || fail "no archive $archive; docker save writes one, and make cluster-deps makes ours"
    done
    for ((node = 1; node <= $(nodes_of); node++)); do
        printf '%s\0' "$@" | xargs -0 -n 1 -P 3 "$0" load-one "$node"
    done
}

up() {
    local nodes=1 started=$SECONDS node
    while [ $# -gt 0 ]; do
        case "$1" in
            --nodes) nodes=${2-} && shift ;;
            *) fail "unknown argument $1
$usage" ;;
        esac
        shift
    done
    [[ $nodes =~ ^[1-3]$ ]] || fail "--nodes $nodes: 1, 2 or 3"
    root_only
    if runs; then
        [ "$(nodes_of)" -eq "$nodes" ] ||
            fail "the cluster $CLUSTER has $(nodes_of) nodes and $nodes are asked for: hack/cluster.sh down, then again"
        say "the cluster $CLUSTER is there already"
        return
    fi
    preflight
    [ ! -e "$dir" ] || down
    say "making the cluster $CLUSTER of $nodes nodes"
    mkdir -p "$clusters"
    mkdir -m 0700 "$dir"
    for ((node = 1; node <= nodes; node++)); do mkdir -p "$dir/node$node/logs"; done
    certificates
    setsid --fork "$0" watch-over "$nodes" >"$dir/cluster.log" 2>&1 </dev/null
    started() { [ "$(find "$dir"/node* -maxdepth 1 -name pid -size +0 | wc -l)" -eq "$nodes" ]; }
    await 20 "the nodes are started" started || fail "the nodes do not start: $(tail -n 5 "$dir/cluster.log" "$dir"/node*/logs/node.log)"
    answering() { control kubectl get --raw /readyz; }
    await 60 "the API server answers" answering || fail "the API server does not answer: $dir/node1/logs/kube-apiserver.log"
    for ((node = 1; node <= nodes; node++)); do await 30 "containerd of node $node runs" containerd_runs "$node" || break; done
    [ "$node" -gt "$nodes" ] || fail "containerd does not run: $dir/node$node/logs/containerd.log"
    say "loading images"
    load_archives "$cluster_cache"/images/*.tar "$root"/.deps/image/archives/*.tar
    ready() { [ "$(control kubectl get nodes --no-headers | grep -cw Ready)" -eq "$nodes" ]; }
    await 60 "the nodes are ready" ready || fail "not all nodes are ready: $dir/node*/logs/kubelet.log"
    say "done in $((SECONDS - started)) s: CLUSTER=$CLUSTER hack/cluster.sh exec kubectl get nodes
KUBECONFIG=$dir/pki/admin.kubeconfig (in the cluster's network: hack/cluster.sh exec sets it)"
}

down() {
    root_only
    if runs; then
        say "ending the cluster $CLUSTER"
        kill -KILL "$(cat "$dir/unshare.pid")" 2>/dev/null || true
        flock --timeout 300 "$dir/lock" true || fail "the cluster does not end: $dir/cluster.log"
    fi
    if ! [ -e "$dir" ]; then
        say "there is no cluster $CLUSTER"
        return
    fi
    "$root/hack/cluster/sweep.sh" "$dir" "$CLUSTER" || fail "not all of the cluster $CLUSTER could be removed; $dir stays"
    rm -rf --one-file-system "$dir"
    rm -rf "$clusters"/.try-*
    rmdir "$clusters" 2>/dev/null || true
}

off() {
    local place=$dir/node$1 pid
    pid=$(cat "$place/pid") || fail "node $1 is off already"
    say "cutting the power of node $1"
    touch "$place/off"
    rm "$place/pid"
    (in_cluster sh -c "kill -KILL $pid && while kill -0 $pid 2>/dev/null; do sleep 0.1; done")
    "$root/hack/cluster/sweep.sh" "$dir" "$CLUSTER" "node$1" || fail "not all of node $1 could be detached"
}
on() {
    rm "$dir/node$1/off" 2>/dev/null || fail "node $1 is on already"
    say "starting node $1"
    await 60 "containerd of node $1 runs" containerd_runs "$1" || fail "node $1 does not start: $dir/node$1/logs"
}

# In a cluster of its own, which goes again also where a step fails.
smoke() {
    local started=$SECONDS
    case "$*" in
        "") ;;
        --if-built)
            if [ "$(id -u)" -ne 0 ] || ! built; then
                say "no cluster smoke test: it needs root and what make cluster-deps builds"
                return
            fi
            ;;
        *) fail "unknown argument $*
$usage" ;;
    esac
    "$root/hack/image-rootfs.sh" --archives
    [ ! -e "$dir" ] || fail "there is a cluster $CLUSTER; give the smoke test a name of its own by CLUSTER"
    trap '"$0" down' EXIT
    "$0" up
    "$0" install
    "$0" exec "$root/hack/e2e.sh" --smoke
    say "smoke test passed in $((SECONDS - started)) s"
}

status() {
    local node
    here_or_fail
    control kubectl get nodes --output wide
    control kubectl get pods --all-namespaces --output wide
    for ((node = 1; node <= $(nodes_of); node++)); do echo "logs of node$node: $dir/node$node/logs"; done
}

command=${1-}
[ $# -eq 0 ] || shift
case "$command" in
    up) up "$@" ;;
    down) [ $# -eq 0 ] || fail "down takes no arguments"; down ;;
    status) [ $# -eq 0 ] || fail "status takes no arguments"; status ;;
    exec)
        node=1
        if [ "${1-}" = --node ]; then
            node=${2-}
            shift 2 || fail "--node wants a number"
        fi
        here_or_fail
        [ -e "$dir/node$node" ] || fail "the cluster $CLUSTER has no node $node"
        [ $# -gt 0 ] || fail "exec wants a command"
        on_node "$node" "$@"
        ;;
    load)
        here_or_fail
        [ $# -gt 0 ] || fail "load wants archives"
        load_archives "$@"
        ;;
    install)
        case "${1-}" in
            "" | --distributed) ;;
            --overlay | --chart) ;;
            *) fail "unknown argument $1
$usage" ;;
        esac
        here_or_fail
        on_node 1 "$root/hack/install.sh" "$@"
        ;;
    off | on)
        here_or_fail
        [ -e "$dir/node${1:-2}/logs" ] || fail "the cluster $CLUSTER has no node ${1:-2}"
        "$command" "${1:-2}"
        ;;
    smoke) smoke "$@" ;;
    # The script's own calls of itself.
    load-one)
        said=$( (on_node "$1" ctr --namespace k8s.io images import "$2") 2>&1) || fail "loading $2: $said"
        ;;
    watch-over) nodes=$1 && watch_over ;;
    -h | --help) echo "$usage" ;;
    "") fail "which command?
$usage" ;;
    *) fail "unknown argument $command
$usage" ;;
esac
