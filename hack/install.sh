#!/usr/bin/env bash
# Installs deltapath into a cluster whose nodes have the images, as docs/install.md says: the CRDs, the snapshot
# controller, driver and gateway. Run again, it brings them up to date. hack/kind-up.sh and hack/cluster.sh call it.
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: install.sh [--distributed | --overlay NAME] [--chart [--set KEY=VALUE]...]
  --distributed   a driver on each node, instead of one driver on one node
  --overlay NAME  another directory of deploy/overlays than kind or kind-distributed
  --chart         by helm, also over what kustomize installed; not with --overlay
The environment: KUBE_CONTEXT names the cluster (kind-\$CLUSTER), and DELTAPATH_CRDS a directory with the CRDs, where they
are not to be fetched."
overlay=kind chart=no values=(--set loopDeviceNodes=true)
while [ $# -gt 0 ]; do
    case "$1" in
        --distributed) overlay=kind-distributed ;;
        --chart) chart=yes ;;
        --set) values+=(--set "${2:?$usage}") && shift ;;
        --overlay) overlay=${2:?$usage} && shift ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1
$usage" ;;
    esac
    shift
done
need kubectl
if [ "$chart" = yes ]; then
    need helm
    case "$overlay" in
        kind) ;;
        kind-distributed) values+=(--set mode=distributed) ;;
        *) fail "--chart is not for the overlay $overlay: helm install takes its values" ;;
    esac
fi
[ -d "$root/deploy/overlays/$overlay" ] || fail "deploy/overlays has no $overlay"

say "installing the CRDs of snapshots $snapshotter_version and of the CBT service $snapshot_metadata_version"
if [ -n "${DELTAPATH_CRDS-}" ]; then
    kube apply --server-side --filename "$DELTAPATH_CRDS"
else
    kube apply --server-side --kustomize \
        "https://github.com/kubernetes-csi/external-snapshotter/client/config/crd?ref=$snapshotter_version"
    kube apply --server-side --filename \
        "https://raw.githubusercontent.com/kubernetes-csi/external-snapshot-metadata/$snapshot_metadata_version/client/config/crd/cbt.storage.k8s.io_snapshotmetadataservices.yaml"
fi
# kubectl fails at once where a CRD is so new that it has no conditions.
established() {
    kube wait --for condition=established --timeout 5s \
        crd/volumesnapshots.snapshot.storage.k8s.io crd/volumesnapshotclasses.snapshot.storage.k8s.io \
        crd/volumesnapshotcontents.snapshot.storage.k8s.io \
        crd/volumegroupsnapshotclasses.groupsnapshot.storage.k8s.io \
        crd/snapshotmetadataservices.cbt.storage.k8s.io
}
await 60 "the CRDs are established" established || fail "the CRDs are not established after 60 s: kubectl describe crd says why"

say "installing the snapshot controller"
kube apply --server-side --kustomize "$root/deploy/snapshot-controller/base"

if [ "$chart" = yes ]; then
    say "installing deltapath by chart, ${values[*]}"
    helm upgrade --install deltapath "$root/deploy/chart/deltapath" --kube-context "$KUBE_CONTEXT" --namespace "$namespace" \
        --create-namespace --take-ownership "${values[@]}"
else
    say "installing deltapath, overlay $overlay"
    kube apply --server-side --kustomize "$root/deploy/overlays/$overlay"
fi

say "waiting until all of it runs"
kube rollout status --namespace kube-system deployment/snapshot-controller --timeout 180s
plugin=statefulset gateway=deployment/deltapath-gateway
case "$overlay" in *distributed) plugin=daemonset gateway=deployment/deltapath-controller ;; esac
runs() { kube rollout status --namespace "$namespace" "$1" --timeout 300s; }
if ! runs "$plugin/deltapath-plugin" || ! runs "$gateway"; then
    kube get pods --namespace "$namespace" --output wide
    kube describe pods --namespace "$namespace" | tail -n 40
    fail "deltapath does not run; docs/troubleshooting.md says where to look"
fi
