#!/usr/bin/env bash
# Takes deltapath out of a cluster in an order that leaves nothing behind: volumes and snapshots first, while there
# is a driver that deletes them, then the driver. Without --volumes it refuses while there are any. It goes by what the
# cluster says: where kubectl fails nothing more is deleted.
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: remove.sh [--volumes] [--context NAME]
  --volumes  delete the pods, claims and snapshots that use deltapath too, with their data"
context=() volumes=no
while [ $# -gt 0 ]; do
    case "$1" in
        --volumes) volumes=yes ;;
        --context) context=(--context "${2:?$usage}") && shift ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1
$usage" ;;
    esac
    shift
done
need kubectl
on() { kubectl "${context[@]}" "$@"; }
driver=deltapath.csi.dev

# Objects of a CRD, by its name; none where the cluster lacks it, as many lack that of groups.
custom() {
    local known
    known=$(on get customresourcedefinitions "$1" --ignore-not-found --output name) || return
    [ -z "$known" ] || on get "$1" --output "go-template=$2"
}
# Lines of "namespace name" and the like, of what belongs to this driver. The dollars are the templates' own.
claims() {
    on get persistentvolumes --output go-template='{{range .items}}{{if .spec.csi}}{{if eq .spec.csi.driver "'"$driver"'"}}{{if .spec.claimRef}}{{.spec.claimRef.namespace}} {{.spec.claimRef.name}}{{"\n"}}{{end}}{{end}}{{end}}{{end}}'
}
volumes() {
    on get persistentvolumes --output go-template='{{range .items}}{{if .spec.csi}}{{if eq .spec.csi.driver "'"$driver"'"}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}{{end}}'
}
snapshots() {
    custom volumesnapshotcontents.snapshot.storage.k8s.io '{{range .items}}{{if eq .spec.driver "'"$driver"'"}}{{.spec.volumeSnapshotRef.namespace}} {{.spec.volumeSnapshotRef.name}}{{"\n"}}{{end}}{{end}}'
}
contents() {
    custom volumesnapshotcontents.snapshot.storage.k8s.io '{{range .items}}{{if eq .spec.driver "'"$driver"'"}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}'
}
groups() {
    custom volumegroupsnapshotcontents.groupsnapshot.storage.k8s.io '{{range .items}}{{if eq .spec.driver "'"$driver"'"}}{{.spec.volumeGroupSnapshotRef.namespace}} {{.spec.volumeGroupSnapshotRef.name}}{{"\n"}}{{end}}{{end}}'
}
group_contents() {
    custom volumegroupsnapshotcontents.groupsnapshot.storage.k8s.io '{{range .items}}{{if eq .spec.driver "'"$driver"'"}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}'
}
# Of helm, by which the driver may have been installed, in any namespace.
# shellcheck disable=SC2016
releases() {
    on get csidrivers "$driver" --ignore-not-found --output go-template='{{with .metadata.annotations}}{{with index . "meta.helm.sh/release-name"}}{{index $.metadata.annotations "meta.helm.sh/release-namespace"}} {{.}}{{"\n"}}{{end}}{{end}}'
}
# Pods of a namespace that mount a claim; pods with an inline volume of the driver.
# shellcheck disable=SC2016
claim_pods() {
    on get pods --namespace "$1" --output go-template='{{range $pod := .items}}{{range .spec.volumes}}{{if .persistentVolumeClaim}}{{if eq .persistentVolumeClaim.claimName "'"$2"'"}}{{$pod.metadata.name}}{{"\n"}}{{end}}{{end}}{{end}}{{end}}'
}
# shellcheck disable=SC2016
inline_pods() {
    on get pods --all-namespaces --output go-template='{{range $pod := .items}}{{range .spec.volumes}}{{if .csi}}{{if eq .csi.driver "'"$driver"'"}}{{$pod.metadata.namespace}} {{$pod.metadata.name}}{{"\n"}}{{end}}{{end}}{{end}}{{end}}' |
        sort -u
}
# Reads one of these lists into `listed`. A kubectl that fails has not said that there is nothing.
list() {
    listed=$("$@") || fail "kubectl fails, so nobody knows whether there are ${1//_/ } of deltapath: nothing more is deleted.
Its own words stand above; run this again when it answers"
}
gone() {
    local found
    found=$("$1") && [ -z "$found" ]
}

# All of them once before the first deletion.
for kind in volumes claims contents snapshots group_contents groups inline_pods releases; do list "$kind"; done
[ -z "$listed" ] || need helm

if [ "$volumes" = no ]; then
    for kind in volumes contents group_contents inline_pods; do
        list "$kind"
        [ -z "$listed" ] || fail "there are $kind of deltapath still:
$listed
delete them, or say --volumes to have them deleted with their data"
    done
else
    say "deleting pods that use volumes of deltapath"
    list claims
    while read -r space claim; do
        [ -n "$claim" ] || continue
        list claim_pods "$space" "$claim"
        for pod in $listed; do
            on delete pod --namespace "$space" "$pod" --ignore-not-found --timeout 120s
        done
    done <<<"$listed"
    list inline_pods
    while read -r space pod; do
        [ -n "$pod" ] || continue
        on delete pod --namespace "$space" "$pod" --ignore-not-found --timeout 120s
    done <<<"$listed"

    say "deleting group snapshots, snapshots and claims"
    list groups
    while read -r space name; do
        [ -n "$name" ] || continue
        on delete volumegroupsnapshot --namespace "$space" "$name" --ignore-not-found --timeout 120s
    done <<<"$listed"
    list snapshots
    while read -r space name; do
        [ -n "$name" ] || continue
        on delete volumesnapshot --namespace "$space" "$name" --ignore-not-found --timeout 120s
    done <<<"$listed"
    list claims
    while read -r space name; do
        [ -n "$name" ] || continue
        on delete persistentvolumeclaim --namespace "$space" "$name" --ignore-not-found --timeout 120s
    done <<<"$listed"
    for kind in volumes contents group_contents; do
        await 120 "no $kind left" gone "$kind" && continue
        list "$kind"
        [ -z "$listed" ] || fail "$kind of deltapath do not go (a class with deletionPolicy Retain? a finalizer?):
$listed"
    done
fi

say "deleting the driver"
list releases
if [ -n "$listed" ]; then
    read -r namespace release <<<"$listed"
    helm uninstall "$release" --namespace "$namespace" "${context[@]/#--context/--kube-context}" --wait --timeout 180s
fi
# The manifests have that namespace. In another one, helm has removed all that is there.
if [ "$namespace" = deltapath ]; then
    on delete --kustomize "$root/deploy/overlays/distributed" --ignore-not-found --wait --timeout 180s
    on delete --kustomize "$root/deploy/overlays/attach" --ignore-not-found --wait --timeout 180s
fi
on delete snapshotmetadataservices.cbt.storage.k8s.io "$driver" --ignore-not-found
# Else Kubernetes keeps them for an hour.
on delete certificatesigningrequests --field-selector "spec.signerName=$driver/node" --ignore-not-found
say "done. On the nodes stays the directory /var/lib/deltapath, which no longer holds a volume: remove it.
    Snapshot controller and CRDs stay too, for other drivers may use them."
