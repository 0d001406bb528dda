#!/usr/bin/env bash
# Everything that the manifests, scripts and pages promise, on real Kubernetes clusters of hack/cluster.sh. Says which
# part fails and goes on with the next; what is left on the machine afterwards fails too.
set -euo pipefail
# shellcheck source=hack/cluster/lib.sh
. "$(dirname "$0")/cluster/lib.sh"

parts=(kills single distributed pages troubles changes crowd)
usage="usage: cluster-test.sh [PART...]
  kills        nothing is left on the machine, however a cluster ends
  single       one driver on one node: installed twice, every example, the pages backup, backup-by-hand and uninstall
  distributed  a driver on each of two nodes: the examples, what works from node to node, a node without power, uninstall
  pages        the commands of docs/install.md for a cluster that is there, and those of docs/uninstall.md
  troubles     volumes in use while kubelet and driver are killed, a node loses its power, pods and claims are deleted under them
  changes      the driver is upgraded, and the API server is away for a minute in the middle of each call of a sidecar
  crowd        a quota, 50 claims and 200 snapshots at once, fsGroup on 100,000 files, ROUNDS=200 of a snapshot schedule
Without a PART all of them."
for part in "$@"; do
    case "$part" in
        -h | --help) echo "$usage" && exit 0 ;;
        *) [[ " ${parts[*]} " = *" $part "* ]] || fail "unknown argument $part
$usage" ;;
    esac
done
[ "$(id -u)" -eq 0 ] || fail "needs root, for namespaces and mounts"
if [ $# -ne 1 ]; then
    "$root/hack/cluster-deps.sh" >/dev/null
    [ $# -eq 0 ] || parts=("$@")
    passed=0 failed=0
    for part in "${parts[@]}"; do
        started=$SECONDS
        say "$part: begins"
        if "$0" "$part"; then
            passed=$((passed + 1))
            say "$part: passed in $((SECONDS - started)) s"
        else
            failed=$((failed + 1))
            say "$part: FAILED after $((SECONDS - started)) s"
        fi
    done
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
fi
"$root/hack/cluster-deps.sh" >/dev/null

name=test-$$
clusters=${DELTAPATH_CLUSTERS:-/var/tmp/deltapath-clusters}
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/deltapath-cluster-test-XXXXXX")
on() { # NAME COMMAND...
    local cluster=$1
    shift
    CLUSTER=$cluster "$root/hack/cluster.sh" "$@"
}
k() { on "$name-a" exec kubectl "$@"; }
cleanup() {
    on "$name-a" down
    rm -rf "$scratch"
}
trap 'cleanup >/dev/null 2>&1' EXIT
"$root/hack/cluster/machine.sh" >"$scratch/before"
unchanged() {
    "$root/hack/cluster/machine.sh" >"$scratch/after"
    diff "$scratch/before" "$scratch/after" >"$scratch/changed" || {
        cat "$scratch/changed"
        fail "the machine is not as it was: < is before, > is now"
    }
}
# The commands of a page, as a person copies them: those between "```sh" lines, in lists too, but for those that name a
# registry of the reader's.
commands_of() { awk '/^ *```sh$/ { on = 1; next } /^ *```$/ { on = 0 } on && !/REGISTRY/' "$root/$1"; }

# What of deltapath a cluster still has, of any kind of object.
objects() {
    local kinds
    kinds=$(on "$1" exec kubectl api-resources --verbs list --output name | grep -v '^events' | paste -sd ,)
    on "$1" exec kubectl get "$kinds" --all-namespaces --ignore-not-found --output name | grep -i deltapath
}

# A backup of a claim into another begins, slowly enough for something to happen to it: backup_of CLAIM RATE. Its process is
# $backup.
backup_of() {
    k apply --filename "$root/deploy/backup/cronjob.yaml"
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

# docs/uninstall.md, with volumes in use: uninstall NODES
uninstall() {
    local node
    say "uninstalling"
    k apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/ephemeral.yaml"
    k wait --for condition=ready --timeout 120s pod/block pod/ephemeral
    if on "$name-a" exec "$root/hack/remove.sh"; then fail "hack/remove.sh did not refuse while there were volumes"; fi
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
    "$root/hack/cluster/sweep.sh" --list "$clusters/$name-a" "$name-a" "node$1"
    # A node begins with the mounts of the machine, and other tests have theirs in /tmp.
    on "$name-a" exec --node "$1" cat /proc/mounts | grep deltapath | grep -v -e "$clusters" -e ' /tmp/' || true
}
no_devices() { [ -z "$(left_on "$1")" ]; }

# shellcheck source=/dev/null
. "$root/hack/cluster/parts/$1.sh"
"part_$1"
