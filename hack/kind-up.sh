#!/usr/bin/env bash
# A kind cluster with deltapath in it: cluster, snapshot CRDs and controller, the CBT CRD, images, driver, gateway.
# Run again, it brings an existing cluster up to date. The cluster's name is CLUSTER (default: deltapath).
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: kind-up.sh [--distributed] [--no-build]
  --distributed  two worker nodes with a driver each, instead of one node
  --no-build     take the images $image, $gateway_image and $backup_image as they are"
overlay=kind controller=base nodes=1 build=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --distributed) overlay=kind-distributed controller=distributed nodes=3 ;;
        --no-build) build=no ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1
$usage" ;;
    esac
    shift
done
need kind kubectl openssl
engine=$(container_engine)
need "$engine"
"$engine" info >/dev/null 2>&1 || fail "$engine does not answer: is it running, and may you use it?"
[ -e /dev/loop-control ] || [ "$(uname -s)" != Linux ] || fail "no /dev/loop-control: modprobe loop"
case "$(kind version)" in
    *"$kind_version"*) ;;
    *) say "kind is not $kind_version, which this was written for; going on" ;;
esac

if kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
    say "the cluster $CLUSTER is there already"
    found=$(kube get nodes --no-headers | wc -l)
    [ "$found" -eq "$nodes" ] ||
        fail "the cluster $CLUSTER has $found nodes and $nodes are asked for: hack/kind-down.sh, then again"
else
    say "creating the cluster $CLUSTER ($nodes nodes, $node_image)"
    {
        echo "kind: Cluster"
        echo "apiVersion: kind.x-k8s.io/v1alpha4"
        echo "nodes:"
        echo "  - role: control-plane"
        for ((node = 1; node < nodes; node++)); do echo "  - role: worker"; done
    } | kind create cluster --name "$CLUSTER" --image "$node_image" --config - --wait 120s ||
        fail "kind made no cluster; its own words stand above"
fi

if [ "$build" = yes ]; then
    say "building $image, $gateway_image and $backup_image"
    make --no-print-directory -C "$root" image gateway-image backup-image ENGINE="$engine"
fi
for loaded in "$image" "$gateway_image" "$backup_image"; do
    say "loading $loaded into the nodes"
    if [ "$engine" = docker ]; then
        kind load docker-image --name "$CLUSTER" "$loaded"
    else
        # Images of other engines go by an archive, under the name that the manifests use.
        archive=$(mktemp)
        "$engine" tag "$loaded" "docker.io/library/$loaded"
        "$engine" save --output "$archive" "docker.io/library/$loaded"
        kind load image-archive --name "$CLUSTER" "$archive"
        rm -f "$archive"
    fi
done

say "installing the CRDs of snapshots $snapshotter_version and of the CBT service $snapshot_metadata_version"
kube apply --server-side --kustomize \
    "https://github.com/kubernetes-csi/external-snapshotter/client/config/crd?ref=$snapshotter_version"
kube apply --server-side --filename \
    "https://raw.githubusercontent.com/kubernetes-csi/external-snapshot-metadata/$snapshot_metadata_version/client/config/crd/cbt.storage.k8s.io_snapshotmetadataservices.yaml"
kube wait --for condition=established --timeout 60s \
    crd/volumesnapshots.snapshot.storage.k8s.io crd/volumesnapshotclasses.snapshot.storage.k8s.io \
    crd/volumesnapshotcontents.snapshot.storage.k8s.io \
    crd/volumegroupsnapshotclasses.groupsnapshot.storage.k8s.io \
    crd/snapshotmetadataservices.cbt.storage.k8s.io

say "installing the snapshot controller"
kube apply --server-side --kustomize "$root/deploy/snapshot-controller/$controller"

say "installing deltapath, overlay $overlay"
kube apply --server-side --kustomize "$root/deploy/overlays/$overlay"

say "waiting until all of it runs"
kube rollout status --namespace kube-system deployment/snapshot-controller --timeout 180s
driver=statefulset/deltapath-plugin gateway=deployment/deltapath-gateway
[ "$overlay" = kind ] || driver=daemonset/deltapath-plugin gateway=daemonset/deltapath-gateway
runs() { kube rollout status --namespace "$namespace" "$1" --timeout 300s; }
if ! runs "$driver" || ! runs "$gateway"; then
    kube get pods --namespace "$namespace" --output wide
    kube describe pods --namespace "$namespace" | tail -n 40
    fail "deltapath does not run; docs/troubleshooting.md says where to look"
fi
say "done: kubectl --context kind-$CLUSTER get pods --namespace $namespace; next: hack/e2e.sh"
