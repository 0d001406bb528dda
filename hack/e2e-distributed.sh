#!/usr/bin/env bash
# What many nodes promise beyond hack/e2e.sh (docs/router.md), in a cluster with a driver on each of two nodes or more: from one
# node to another volumes are restored and cloned, no pod waits for ever, every node is asked for every snapshot. It cleans
# up behind itself, and before itself what an earlier run left.
set -euo pipefail
suite=distributed
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: e2e-distributed.sh [--keep]
  --keep         leave volumes and pods as they are at the end"
keep=no
while [ $# -gt 0 ]; do
    case "$1" in
        --keep) keep=yes ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1
$usage" ;;
    esac
    shift
done
need kubectl
cluster_answers

drivers
[ "${#drivers[@]}" -ge 2 ] || fail "drivers run on ${#drivers[@]} nodes, and 2 are wanted: hack/kind-up.sh --distributed"

cleanup() {
    say "deleting what this test made"
    kube delete --namespace default --ignore-not-found --timeout 180s volumegroupsnapshot/spread
    delete_made
}
trap 'what_broke $?' EXIT
node_of() { kube get pod "$1" --namespace default --output 'jsonpath={.spec.nodeName}'; }
sum_of() { kube exec --namespace default "$1" -- sha256sum "$2" | cut -d ' ' -f 1; }
# What came to a node from others.
received() {
    local driver
    driver=$(kube get pods --namespace "$namespace" --selector app.kubernetes.io/component=plugin \
        --field-selector "spec.nodeName=$1" --output 'jsonpath={.items[0].metadata.name}')
    kube get --raw "/api/v1/namespaces/$namespace/pods/$driver:9810/proxy/metrics" |
        awk '$1 == "deltapath_transfer_received_bytes_total" { print $2 }'
}

cleanup
here=${drivers[0]} there=${drivers[1]}
say "volumes on $here, and one on $there"
claim source Filesystem 256Mi
claim disk Block 256Mi
pod user "$here" source:Filesystem disk:Block
claim other Block 64Mi
pod other "$there" other:Block
ready user other
kube exec --namespace default user -- sh -ec \
    'dd if=/dev/urandom of=/source/first bs=1M count=32; dd if=/dev/urandom of=/dev/disk bs=1M count=8 seek=8 conv=fsync; sync'
first=$(sum_of user /source/first)
snapshot source-1 source
snapshot disk-1 disk

say "a pod that brings another volume, which is on $there, restores a snapshot of $here, and waits for nothing"
before=$(received "$there")
claim restored Filesystem 256Mi VolumeSnapshot source-1
kube delete pod other --namespace default --timeout 120s
pod stranger "" other:Block restored:Filesystem
ready stranger
[ "$(node_of stranger)" = "$there" ] || fail "the pod is on $(node_of stranger), and its volume on $there"
[ "$(sum_of stranger /restored/first)" = "$first" ] || fail "what is restored on $there is not what the snapshot holds"
whole=$(($(received "$there") - before))
[ "$whole" -ge $((32 << 20)) ] || fail "$whole bytes came to $there, and the snapshot holds more"

say "one that brings a new volume, tied to $there, clones a volume of $here"
claim cloned Filesystem 256Mi PersistentVolumeClaim source
claim new Filesystem 64Mi
pod tied "$there" cloned:Filesystem new:Filesystem
ready tied
[ "$(sum_of tied /cloned/first)" = "$first" ] || fail "what is cloned on $there is not what the volume holds"

say "of a later snapshot only what changed is copied to where an earlier one was restored"
kube exec --namespace default user -- sh -ec 'dd if=/dev/urandom of=/source/second bs=1M count=2; sync
    dd if=/dev/urandom of=/dev/disk bs=1M count=1 seek=64 conv=fsync'
second=$(sum_of user /source/second)
snapshot source-2 source
snapshot disk-2 disk
before=$(received "$there")
claim later Filesystem 256Mi VolumeSnapshot source-2
pod later "$there" later:Filesystem
ready later
[ "$(sum_of later /later/first) $(sum_of later /later/second)" = "$first $second" ] ||
    fail "what is restored on $there is not what the second snapshot holds"
delta=$(($(received "$there") - before))
[ "$delta" -lt $((8 << 20)) ] || fail "$delta bytes came to $there, and 2 MiB have changed"
say "$whole bytes came for the first restore, $delta for the second"

say "every node gets the changed blocks of a snapshot of $here"
kube apply --filename "$examples/backup-account.yaml"
for node in "${drivers[@]}"; do
    kube delete pod "list-$node" --namespace default --ignore-not-found --timeout 120s
    sed "s/name: list-blocks/name: list-$node/; s/=block-/=disk-/g; s/^metadata:/&\n  labels: {test: distributed}/
        s/^spec:/&\n  nodeName: $node/" "$examples/list-blocks.yaml" | kube apply --filename -
    finished "list-$node"
    kube logs --namespace default "list-$node" | grep -Eq '^ +67108864 +1048576$' || fail "$node got another delta"
done

say "a device grows and changes its attributes, on each node"
for claim in user:disk stranger:other; do
    kube patch persistentvolumeclaim "${claim#*:}" --namespace default --type merge \
        --patch '{"spec": {"resources": {"requests": {"storage": "512Mi"}}, "volumeAttributesClassName": "deltapath-sequential"}}'
    kube wait --for jsonpath='{.status.capacity.storage}'=512Mi --timeout 120s --namespace default "persistentvolumeclaim/${claim#*:}"
    kube wait --for jsonpath='{.status.currentVolumeAttributesClassName}'=deltapath-sequential --timeout 120s --namespace default \
        "persistentvolumeclaim/${claim#*:}"
    grown() { [ "$(kube exec --namespace default "${1%:*}" -- blockdev --getsize64 "/dev/${1#*:}")" = $((512 << 20)) ]; }
    await 60 "the device of ${claim#*:} has its size" grown "$claim" || fail "the device of ${claim#*:} does not grow"
done

say "a group of volumes on two nodes is refused with the reason"
kube apply --filename - <<G
apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshot
metadata: {name: spread, namespace: default}
spec: {volumeGroupSnapshotClassName: deltapath, source: {selector: {matchLabels: {test: distributed}}}}
G
refused() {
    { kube get volumegroupsnapshotcontents,volumegroupsnapshots --namespace default --output jsonpath='{.items[*].status.error.message}' &&
        kube get events --namespace default --field-selector involvedObject.name=spread --output jsonpath='{.items[*].message}'; } |
        grep -q FailedPrecondition
}
await 60 "it is refused" refused || fail "a group of volumes on two nodes is not refused"

[ "$keep" = yes ] || cleanup
say "everything works from any node"
