#!/usr/bin/env bash
# The smoke test: every example of deploy/examples against the cluster of kind-up.sh or cluster.sh. It snapshots a volume twice,
# lists the delta with a client pod, and makes and verifies full and incremental backups. It cleans up behind itself,
# and before itself what an earlier run left.
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: e2e.sh [--keep] [--smoke] [--no-growth]
  --keep         leave volumes and pods as they are at the end
  --smoke        end after the listed delta
  --no-growth    root on the nodes lacks CAP_SYS_RESOURCE, which ext4 wants to grow while it is mounted: expects the
                 driver to say so"
keep=no smoke=no growth=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --keep) keep=yes ;;
        --smoke) smoke=yes ;;
        --no-growth) growth=no ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1
$usage" ;;
    esac
    shift
done
need kubectl
cluster_answers

apply() { kube apply --filename "$examples/$1"; }
# The same for the Filesystem volume: its names begin with "files".
as_files() { sed 's/block-/files-/g; s/block\.img/files.img/g' "$examples/$1"; }

cleanup() {
    say "deleting what the examples made"
    for name in backup-incremental.yaml backup-full.yaml; do
        as_files "$name" | kube delete --ignore-not-found --wait=false --filename -
    done
    kube delete --ignore-not-found --timeout 180s --filename "$examples"
    for name in backup-incremental.yaml backup-full.yaml; do
        as_files "$name" | kube delete --ignore-not-found --timeout 180s --filename -
    done
}

trap 'what_broke $?' EXIT
cleanup

say "a Block volume and a Filesystem volume"
apply block.yaml
apply filesystem.yaml
ready block
ready files

say "first snapshots"
apply snapshot.yaml
taken block-1
taken files-1

say "changing 1 MiB at 256 MiB of the one, adding a file to the other"
kube exec --namespace default block -- dd if=/dev/urandom of=/dev/volume bs=1M count=1 seek=256 conv=fsync
kube exec --namespace default files -- sh -c 'dd if=/dev/urandom of=/data/second bs=1M count=4 && sync'

say "second snapshots"
apply snapshot-again.yaml
taken block-2
taken files-2

say "listing the delta with a client pod"
apply backup-account.yaml
apply list-blocks.yaml
finished list-blocks
delta=$(kube logs --namespace default list-blocks)
grep -Eq '^ +268435456 +1048576$' <<<"$delta" ||
    fail "the delta is to be one extent of 1048576 bytes at 268435456, and is:
$delta"

if [ "$smoke" = yes ]; then
    [ "$keep" = yes ] || cleanup
    say "volumes, snapshots and the delta work"
    exit 0
fi

say "full and incremental backup of the Block volume, verified byte by byte"
apply backup-full.yaml
finished block-1-backup
apply backup-incremental.yaml
finished block-2-backup

say "the same of the Filesystem volume; its snapshots are allowed to be read as devices"
for snapshot in files-1 files-2; do
    content=$(kube get volumesnapshot "$snapshot" --namespace default \
        --output 'jsonpath={.status.boundVolumeSnapshotContentName}')
    kube annotate --overwrite volumesnapshotcontent "$content" \
        snapshot.storage.kubernetes.io/allow-volume-mode-change=true
done
as_files backup-full.yaml | kube apply --filename -
finished files-1-backup
as_files backup-incremental.yaml | kube apply --filename -
finished files-2-backup

say "restore into a larger volume, restore as a device, clone, ephemeral volume"
for example in restore restore-as-block clone ephemeral; do
    apply "$example.yaml"
done
for pod in files-restored files-as-block files-clone ephemeral; do
    ready "$pod"
done
[ "$(kube logs --namespace default files-as-block | tr -d ' ')" = 53ef ] ||
    fail "the device of files-1 does not begin as an ext4 does"

say "expansion, attributes, group snapshot"
apply expansion.yaml
if [ "$growth" = yes ]; then
    kube wait --for jsonpath='{.status.capacity.storage}'=2Gi --timeout 120s --namespace default \
        persistentvolumeclaim/files
    size=$(kube exec --namespace default files -- df -k /data | awk 'NR == 2 { print $2 }')
    [ "$size" -gt 1500000 ] || fail "the filesystem did not grow with its volume: $size KiB"
else
    refusal='{.status.conditions[?(@.type=="NodeResizeError")].message}'
    kube wait --for "jsonpath=$refusal" --timeout 120s --namespace default persistentvolumeclaim/files
    said=$(kube get persistentvolumeclaim files --namespace default --output "jsonpath=$refusal")
    [[ $said = *CAP_SYS_RESOURCE* ]] || fail "the filesystem is to want CAP_SYS_RESOURCE to grow, and: $said"
fi
apply modify.yaml
kube wait --for jsonpath='{.status.currentVolumeAttributesClassName}'=deltapath-sequential --timeout 120s \
    --namespace default persistentvolumeclaim/block
apply group.yaml
ready group
apply group-snapshot.yaml
kube wait --for jsonpath='{.status.readyToUse}'=true --timeout 120s --namespace default volumegroupsnapshot/group

[ "$keep" = yes ] || cleanup
say "all examples work"
