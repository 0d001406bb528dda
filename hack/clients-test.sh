#!/usr/bin/env bash
# The community's snapshot-metadata-lister and snapshot-metadata-verifier in a pod of a cluster with deltapath in it: what a full and an
# incremental backup list, by name and by the handle of a deleted snapshot. With drivers on several nodes the pod is on
# another one than the volume. It removes what it made, and first what an earlier run left.
set -euo pipefail
suite=clients
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: clients-test.sh
The environment: KUBE_CONTEXT names the cluster (kind-\$CLUSTER), and SNAPSHOT_METADATA_SOURCE a checkout of
kubernetes-csi/external-snapshot-metadata, of which the tools are built. Without it a main of ours runs their released package."
[ $# -eq 0 ] || { [ "$1" = --help ] && echo "$usage" && exit 0; } || fail "unknown argument $1
$usage"
need kubectl go
cluster_answers

scratch=$(mktemp -d)
trap 'what_broke $?; rm -rf "$scratch"' EXIT
if [ -n "${SNAPSHOT_METADATA_SOURCE-}" ]; then
    say "building the tools of $SNAPSHOT_METADATA_SOURCE"
    # The tools ask for earlier releases of their own packages. In a workspace they are built with those beside them.
    export GOWORK=$scratch/go.work
    (
        cd "$SNAPSHOT_METADATA_SOURCE"
        go work init . ./client ./tools/snapshot-metadata-lister ./tools/snapshot-metadata-verifier
        CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$scratch/" ./tools/snapshot-metadata-lister ./tools/snapshot-metadata-verifier
    )
else
    say "no SNAPSHOT_METADATA_SOURCE: the community's package, in a main of ours"
    (cd "$root/hack/e2e" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$scratch/snapshot-metadata-verifier" ./verifier)
    ln "$scratch/snapshot-metadata-verifier" "$scratch/snapshot-metadata-lister"
fi

write() { # SOURCE MIB COUNT
    kube exec --namespace default user -- dd if="$1" of=/dev/disk bs=1M seek="$2" count="$3" conv=notrunc,fsync
}
tool() { # NAME SNAPSHOT [FLAG...]
    local name=$1 snapshot=$2
    shift 2
    kube exec --namespace default mover -- "/tmp/snapshot-metadata-$name" -namespace=default -snapshot="$snapshot" "$@"
}
lists() { # EXPECTED SNAPSHOT [FLAG...]
    local expected=$1 listed
    shift
    listed=$(tool lister "$@" | awk 'NR > 2 { print $4 "+" $5 }' | paste -sd ' ')
    [ "$listed" = "$expected" ] || fail "the lister lists $listed of $*, expected $expected"
}

delete_made
kube apply --filename "$examples/backup-account.yaml"
drivers
here=${drivers[0]} there=${drivers[-1]}
say "a volume on $here, three snapshots of it, and the tools on $there"
claim disk Block 256Mi
pod user "$here" disk:Block
ready user
write /dev/urandom 8 8
write /dev/urandom 200 1
snapshot disk-1 disk
write /dev/urandom 64 1
write /dev/zero 10 2
snapshot disk-2 disk
write /dev/urandom 255 1
snapshot disk-3 disk
for number in 1 2 3; do claim "copy-$number" Block 256Mi VolumeSnapshot "disk-$number"; done
claim target Block 256Mi
claim empty Block 256Mi
account=backup pod mover "$there" copy-1:Block copy-2:Block copy-3:Block target:Block empty:Block
ready mover
for name in lister verifier; do
    kube exec --stdin --namespace default mover -- sh -c "cat >/tmp/snapshot-metadata-$name && chmod +x /tmp/snapshot-metadata-$name" \
        <"$scratch/snapshot-metadata-$name"
done

say "full"
lists "8388608+8388608 209715200+1048576" disk-1
tool verifier disk-1 -source-device-path=/dev/copy-1 -target-device-path=/dev/target
say "incremental"
lists "10485760+2097152 67108864+1048576" disk-2 -previous-snapshot=disk-1
tool verifier disk-2 -previous-snapshot=disk-1 -source-device-path=/dev/copy-2 -target-device-path=/dev/target
if tool verifier disk-2 -previous-snapshot=disk-1 -source-device-path=/dev/copy-2 -target-device-path=/dev/empty; then
    fail "the verifier passes for a device that does not hold the base"
fi
say "incremental from a deleted snapshot, by its handle"
content=$(kube get volumesnapshot disk-2 --namespace default --output 'jsonpath={.status.boundVolumeSnapshotContentName}')
handle=$(kube get volumesnapshotcontent "$content" --output 'jsonpath={.status.snapshotHandle}')
kube delete volumesnapshot disk-2 --namespace default
kube wait --for delete --timeout 60s "volumesnapshotcontent/$content"
lists "267386880+1048576" disk-3 -previous-snapshot-id="$handle"
tool verifier disk-3 -previous-snapshot-id="$handle" -source-device-path=/dev/copy-3 -target-device-path=/dev/target

delete_made
kube delete --filename "$examples/backup-account.yaml"
say "lister and verifier work"
