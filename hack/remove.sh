#!/usr/bin/env bash
# Takes deltapath out of a cluster in an order that leaves nothing behind: volumes and snapshots first, while there
# is a driver that deletes them, then the driver. Without --volumes it refuses while there are any.
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

# Lines of "namespace name" and the like, of what belongs to this driver. The dollars are the templates' own.
claims() {
    on get persistentvolumes --output go-template='{{range .items}}{{if .spec.csi}}{{if eq .spec.csi.driver "'"$driver"'"}}{{if .spec.claimRef}}{{.spec.claimRef.namespace}} {{.spec.claimRef.name}}{{"\n"}}{{end}}{{end}}{{end}}{{end}}'
}
volumes() {
    on get persistentvolumes --output go-template='{{range .items}}{{if .spec.csi}}{{if eq .spec.csi.driver "'"$driver"'"}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}{{end}}'
}
snapshots() {
    on get volumesnapshotcontents --output go-template='{{range .items}}{{if eq .spec.driver "'"$driver"'"}}{{.spec.volumeSnapshotRef.namespace}} {{.spec.volumeSnapshotRef.name}}{{"\n"}}{{end}}{{end}}'
}
contents() {
    on get volumesnapshotcontents --output go-template='{{range .items}}{{if eq .spec.driver "'"$driver"'"}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}'
}
groups() {
    on get volumegroupsnapshotcontents --output go-template='{{range .items}}{{if eq .spec.driver "'"$driver"'"}}{{.spec.volumeGroupSnapshotRef.namespace}} {{.spec.volumeGroupSnapshotRef.name}}{{"\n"}}{{end}}{{end}}'
}
group_contents() {
    on get volumegroupsnapshotcontents --output go-template='{{range .items}}{{if eq .spec.driver "'"$driver"'"}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}'
}
# Pods of a namespace that mount a claim; pods with an inline volume of the driver.
# shellcheck disable=SC2016
pods_with() {
    on get pods --namespace "$1" --output go-template='{{range $pod := .items}}{{range .spec.volumes}}{{if .persistentVolumeClaim}}{{if eq .persistentVolumeClaim.claimName "'"$2"'"}}{{$pod.metadata.name}}{{"\n"}}{{end}}{{end}}{{end}}{{end}}'
}
# shellcheck disable=SC2016
inline_pods() {
    on get pods --all-namespaces --output go-template='{{range $pod := .items}}{{range .spec.volumes}}{{if .csi}}{{if eq .csi.driver "'"$driver"'"}}{{$pod.metadata.namespace}} {{$pod.metadata.name}}{{"\n"}}{{end}}{{end}}{{end}}{{end}}'
}
gone() { [ -z "$("$1")" ]; }

if [ "$volumes" = no ]; then
    for kind in volumes contents group_contents inline_pods; do
        gone "$kind" || fail "there are $kind of deltapath still:
$("$kind")
delete them, or say --volumes to have them deleted with their data"
    done
else
    say "deleting pods that use volumes of deltapath"
    while read -r space claim; do
        [ -n "$claim" ] || continue
        for pod in $(pods_with "$space" "$claim"); do
            on delete pod --namespace "$space" "$pod" --ignore-not-found --timeout 120s
        done
    done < <(claims)
    while read -r space pod; do
        [ -n "$pod" ] || continue
        on delete pod --namespace "$space" "$pod" --ignore-not-found --timeout 120s
    done < <(inline_pods | sort -u)

    say "deleting group snapshots, snapshots and claims"
    while read -r space name; do
        [ -n "$name" ] || continue
        on delete volumegroupsnapshot --namespace "$space" "$name" --ignore-not-found --timeout 120s
    done < <(groups)
    while read -r space name; do
        [ -n "$name" ] || continue
        on delete volumesnapshot --namespace "$space" "$name" --ignore-not-found --timeout 120s
    done < <(snapshots)
    while read -r space name; do
        [ -n "$name" ] || continue
        on delete persistentvolumeclaim --namespace "$space" "$name" --ignore-not-found --timeout 120s
    done < <(claims)
    for kind in volumes contents group_contents; do
        await 120 "no $kind left" gone "$kind" ||
            fail "$kind of deltapath do not go (a class with deletionPolicy Retain? a finalizer?):
$("$kind")"
    done
fi

say "deleting the driver"
on delete --kustomize "$root/deploy/overlays/distributed" --ignore-not-found --wait --timeout 180s
on delete --kustomize "$root/deploy/overlays/attach" --ignore-not-found --wait --timeout 180s
on delete snapshotmetadataservices.cbt.storage.k8s.io "$driver" --ignore-not-found
say "done. On the nodes stays the directory /var/lib/deltapath, which no longer holds a volume: remove it.
    Snapshot controller and CRDs stay too, for other drivers may use them."
