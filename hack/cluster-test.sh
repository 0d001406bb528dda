#!/usr/bin/env bash
# Everything that the manifests, scripts and pages promise, on real Kubernetes clusters of hack/cluster.sh. Says which
# part fails and continues with the next; what is left on the machine afterwards fails too.
set -euo pipefail
# shellcheck source=hack/cluster/lib.sh
. "$(dirname "$0")/cluster/lib.sh"

# The first are about the whole machine, so each runs alone. Of the others the longest begin first.
alone=(kills beside)
parts=("${alone[@]}" crowd changes chart overlays distributed alerts single troubles pages clients)
# It needs images that the user brings.
[ -z "${VELERO_IMAGE-}" ] || parts+=(velero)
usage="usage: cluster-test.sh [PART...]
  kills        nothing is left on the machine, however a cluster ends
  beside       two clusters in use: one is taken down, and the other does not notice
  crowd        a quota, 50 claims and 200 snapshots at once, fsGroup on 100,000 files, ROUNDS=200 of a snapshot schedule
  changes      the driver is upgraded, and the API server does not answer for a minute in the middle of each call of a sidecar
  chart        from kustomize to the chart, upgrade, rollback and uninstall over volumes in use; the chart on an empty cluster
  overlays     every overlay that the other parts do not install, with the smoke test of hack/e2e.sh
  distributed  a driver on each of two nodes: the examples, what works from node to node, a node without power, uninstall
  alerts       each alert of the chart fires for what the programs serve: a full pool, a node without power and more
  single       one driver on one node: installed twice, every example, the pages backup, backup-by-hand and uninstall
  troubles     volumes in use while kubelet and driver are killed, a node loses its power, pods and claims are deleted under them
  pages        the commands of docs/install.md for an existing cluster, and those of docs/uninstall.md
  clients      hack/clients-test.sh, on one node and on two
  velero       hack/velero-test.sh, through the gateway and the community's sidecar, and on two nodes; only with VELERO_IMAGE
               and VELERO_PLUGIN_IMAGE. VELERO_ARCHIVES=\"FILE ...\" are loaded first, as docker save writes them
Without a PART all of them. Two run at once, or as many as PARTS says, but kills and beside run alone."
for part in "$@"; do
    case "$part" in
        -h | --help) echo "$usage" && exit 0 ;;
        *) [[ " ${parts[*]} " = *" $part "* ]] || fail "unknown argument $part
$usage" ;;
    esac
done
at_once=${PARTS:-2}
[[ $at_once =~ ^[1-9][0-9]*$ ]] || fail "PARTS must be a number from 1 on, got $at_once"
[ "$(id -u)" -eq 0 ] || fail "needs root, for namespaces and mounts"
"$root/hack/cluster-deps.sh" >/dev/null

scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/deltapath-cluster-test-XXXXXX")
"$root/hack/cluster/machine.sh" >"$scratch/before"
# The clusters of parts that run at once are on the machine, too: then only the machine after all of them counts.
unchanged() {
    [ "${BESIDE-no}" = no ] || return 0
    "$root/hack/cluster/machine.sh" >"$scratch/after"
    diff "$scratch/before" "$scratch/after" >"$scratch/changed" || {
        cat "$scratch/changed"
        fail "the machine is not as it was: < is before, > is now"
    }
}
if [ $# -ne 1 ]; then
    trap 'rm -rf "$scratch"' EXIT
    [ $# -eq 0 ] || parts=("$@")
    run() { # PART
        local started=$SECONDS result=FAILED
        say "$1: begins"
        if "$0" "$1" 2>&1 | sed -u "s/^/$1: /"; then result=passed; fi
        say "$1: $result after $((SECONDS - started)) s"
        echo "$result" >>"$scratch/results"
    }
    started=$SECONDS
    for part in "${parts[@]}"; do
        if [[ " ${alone[*]} " = *" $part "* ]]; then run "$part"; fi
    done
    [ "$at_once" = 1 ] || export BESIDE=yes
    for part in "${parts[@]}"; do
        if [[ " ${alone[*]} " = *" $part "* ]]; then continue; fi
        while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
        run "$part" &
    done
    wait
    if (BESIDE=no unchanged); then echo passed; else echo FAILED; fi >>"$scratch/results"
    passed=$(grep -c passed "$scratch/results" || true) failed=$(grep -c FAILED "$scratch/results" || true)
    say "all parts, and the machine after them: $((SECONDS - started)) s"
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
fi

name=test-$$
clusters=${DELTAPATH_CLUSTERS:-/var/tmp/deltapath-clusters}
on() { # NAME COMMAND...
    local cluster=$1
    shift
    CLUSTER=$cluster "$root/hack/cluster.sh" "$@"
}
k() { on "$name-a" exec kubectl "$@"; }
# Where a part fails, its cluster is still there: what did not come up, and what the cluster said of late.
explain() {
    k get pods --all-namespaces --output wide | awk '{ split($3, ready, "/") } NR == 1 || ready[1] != ready[2] && $4 != "Completed"'
    k get events --all-namespaces --sort-by .lastTimestamp | tail -n 20
}
cleanup() {
    on "$name-a" down
    on "$name-b" down
    rm -rf "$scratch"
}
trap '[ $? -eq 0 ] || explain 2>/dev/null || true; cleanup >/dev/null 2>&1' EXIT
# The commands of a page, as a person copies them: those between "```sh" lines, in lists too, but for those that name a
# registry of the reader's.
commands_of() { awk '/^ *```sh$/ { on = 1; next } /^ *```$/ { on = 0 } on && !/REGISTRY/' "$root/$1"; }

# What of deltapath a cluster still has, of any kind of object.
objects() {
    local kinds found
    kinds=$(on "$1" exec kubectl api-resources --verbs list --output name | grep -v '^events' | paste -sd ,) ||
        fail "kubectl does not say which kinds of objects there are"
    found=$(on "$1" exec kubectl get "$kinds" --all-namespaces --ignore-not-found --output name) ||
        fail "kubectl does not say which objects there are"
    grep -i deltapath <<<"$found"
}

# The CronJob of the example has its time in the night, which may be now.
only_when_asked() { k patch cronjob cbt-backup-data --type merge --patch '{"spec": {"suspend": true}}'; }

# A backup of a claim into another begins, slowly enough for something to happen to it: backup_of CLAIM RATE. Its process is
# $backup.
backup_of() {
    k apply --filename "$root/deploy/backup/cronjob.yaml"
    only_when_asked
    k apply --filename - <<'Y'
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: backups, namespace: default}
spec: {storageClassName: deltapath, accessModes: [ReadWriteOnce], resources: {requests: {storage: 2Gi}}}
Y
    on "$name-a" exec "$root/.deps/image/cbt-backup/cbt-backup" run --pvc "$1" --namespace default --repository-claim backups \
        --repository all -- --limit-rate "$2" &
    # shellcheck disable=SC2034 # the parts wait for it
    backup=$!
    await 120 "the backup runs" k wait --for jsonpath='{.status.phase}'=Running --timeout 5s "pod/cbt-backup-$1"
}

# Writes every other block of 1 GiB of a pod's Block volume: a backup then reads a stream of 131,072 ranges, more than all
# that is between the driver and it can hold, so the stream is open until the backup has read most of them: dense POD
dense() {
    local minor
    minor=$(k exec "$1" -- stat -c %T /dev/volume)
    # shellcheck disable=SC2016 # perl's
    on "$name-a" exec perl -MIO::Handle -e 'system("mknod", "/run/dense", "b", 7, hex $ARGV[0]) == 0 or die;
        open my $device, "+<", "/run/dense" or die "open: $!";
        unlink "/run/dense";
        for my $number (0 .. 131071) {
            sysseek $device, $number * 8192, 0;
            syswrite($device, "x" x 4096) == 4096 or die "write: $!";
        }
        $device->sync or die "sync: $!"' "$minor"
}
# Whether a gateway passes a stream on now.
a_stream_is_open() {
    local pod
    for pod in $(k get pods --namespace "$namespace" --selector app.kubernetes.io/component=gateway --output name); do
        k get --raw "/api/v1/namespaces/$namespace/pods/${pod#pod/}:8080/proxy/metrics"
    done | awk '$1 == "deltapath_gateway_open_streams" { open += $2 } END { exit open == 0 }'
}

# docs/uninstall.md, with volumes in use: uninstall NODES
uninstall() {
    local node
    say "uninstalling"
    k apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/ephemeral.yaml"
    k wait --for condition=ready --timeout 120s pod/block pod/ephemeral
    if on "$name-a" exec "$root/hack/remove.sh" 2>"$scratch/refused"; then fail "hack/remove.sh did not refuse while there were volumes"; fi
    grep -q "of deltapath still" "$scratch/refused" || fail "hack/remove.sh failed, and not for the volumes: $(cat "$scratch/refused")"
    on "$name-a" exec "$root/hack/remove.sh" --volumes
    for ((node = 1; node <= $1; node++)); do
        await 60 "no device of deltapath is attached on node $node" no_devices "$node" ||
            fail "loop devices or mounts are left on node $node: $(left_on "$node")"
    done
    if objects "$name-a"; then fail "objects of deltapath are left"; fi
}
# What docs/uninstall.md says to look at, without the places of the cluster itself.
left_on() {
    # losetup shows the devices of all clusters.
    "$root/hack/cluster/sweep.sh" --list "$clusters/$name-a" "$name-a" "node$1" || return
    # A node begins with the mounts of the machine, and other tests have theirs in /tmp.
    on "$name-a" exec --node "$1" cat /proc/mounts | awk -v ours="$clusters" '/deltapath/ && !index($0, ours) && !/ \/tmp\//'
}
no_devices() {
    local left
    left=$(left_on "$1") && [ -z "$left" ]
}

# shellcheck source=/dev/null
. "$root/hack/cluster/parts/$1.sh"
"part_$1"
