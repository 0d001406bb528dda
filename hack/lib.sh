# shellcheck shell=bash
# What the cluster scripts share: versions, and how they speak. Sourced, not run; so what is set here is used there.
# shellcheck disable=SC2034

# The cluster that the manifests are checked against, and what is installed into it besides deltapath.
kind_version=v0.33.0
node_image=kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5
snapshotter_version=v8.7.0
snapshot_metadata_version=v1.1.0

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
image=deltapath:$version
gateway_image=deltapath-gateway:$version
router_image=deltapath-router:$version
earlier_image=cbt-earlier:$version
backup_example_image=backup-example:$version
cbt_backup_image=cbt-backup:$version
namespace=deltapath
: "${CLUSTER:=deltapath}"

say() { printf '==> %s\n' "$*"; }

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

need() {
    local program
    for program in "$@"; do
        command -v "$program" >/dev/null || fail "$program is missing: install it and run this again"
    done
}

# The program that runs containers, and kind's own choice of it.
container_engine() {
    case "${KIND_EXPERIMENTAL_PROVIDER:-}" in
        podman | nerdctl) echo "$KIND_EXPERIMENTAL_PROVIDER" ;;
        *) if command -v docker >/dev/null; then echo docker; else echo podman; fi ;;
    esac
}

# kubectl, on this cluster and on no other. hack/cluster.sh sets the context for what it runs.
: "${KUBE_CONTEXT:=kind-$CLUSTER}"
kube() { kubectl --context "$KUBE_CONTEXT" "$@"; }

# Tries a command until it succeeds: await SECONDS WHAT COMMAND...
await() {
    local seconds=$1 what=$2 end=$((SECONDS + $1))
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 1
    done
    say "$what, waited for at most $seconds s"
}

# What the tests of a cluster share.
examples=$root/deploy/examples
cluster_answers() {
    kube version >/dev/null 2>&1 || fail "no cluster answers at $KUBE_CONTEXT: hack/kind-up.sh makes one"
}
ready() { kube wait --for condition=ready --timeout 120s --namespace default "${@/#/pod/}"; }
taken() { kube wait --for jsonpath='{.status.readyToUse}'=true --timeout 120s --namespace default "${@/#/volumesnapshot/}"; }
# The nodes with a driver, into the list of this name.
drivers() {
    mapfile -t drivers < <(kube get pods --namespace "$namespace" --selector app.kubernetes.io/component=plugin \
        --output 'jsonpath={range .items[*]}{.spec.nodeName}{"\n"}{end}' | sort)
}
# What these make has the label test: $suite.
: "${suite:=any}"
# A claim from nothing or a source: claim NAME MODE SIZE [KIND SOURCE]
claim() {
    local source=
    case "${4-}" in
        VolumeSnapshot) source="dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: $5}" ;;
        PersistentVolumeClaim) source="dataSource: {kind: PersistentVolumeClaim, name: $5}" ;;
    esac
    kube apply --filename - <<C
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: $1, namespace: default, labels: {test: $suite}}
spec:
  storageClassName: deltapath
  volumeMode: $2
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: $3}}
  $source
C
}
# A pod that sleeps, with a claim of a filesystem at /NAME and of a device at /dev/NAME: pod NAME NODE CLAIM:MODE...
# Without a NODE it may go anywhere. It has the account $account.
pod() {
    local name=$1 node=$2 volumes='' mounts='' devices='' claim
    shift 2
    for claim in "$@"; do
        volumes+="{name: ${claim%:*}, persistentVolumeClaim: {claimName: ${claim%:*}}}, "
        case "$claim" in
            *:Block) devices+="{name: ${claim%:*}, devicePath: /dev/${claim%:*}}, " ;;
            *) mounts+="{name: ${claim%:*}, mountPath: /${claim%:*}}, " ;;
        esac
    done
    kube apply --filename - <<P
apiVersion: v1
kind: Pod
metadata: {name: $name, namespace: default, labels: {test: $suite}}
spec:
  terminationGracePeriodSeconds: 0
  serviceAccountName: ${account:-default}
  nodeSelector: {${node:+kubernetes.io/hostname: $node}}
  containers:
    - name: user
      image: busybox:1.37.0
      command: [sleep, infinity]
      volumeMounts: [$mounts]
      volumeDevices: [$devices]
  volumes: [$volumes]
P
}
snapshot() {
    kube apply --filename - <<S
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1, namespace: default, labels: {test: $suite}}
spec: {volumeSnapshotClassName: deltapath, source: {persistentVolumeClaimName: $2}}
S
    taken "$1"
}
delete_made() {
    kube delete --namespace default --ignore-not-found --timeout 180s --selector "test=$suite" pod,persistentvolumeclaim,volumesnapshot
}
# Waits until a pod is done, and shows what it said.
finished() {
    local phase
    for _ in $(seq 120); do
        phase=$(kube get pod "$1" --namespace default --output 'jsonpath={.status.phase}')
        case "$phase" in
            Succeeded) kube logs --namespace default "$1" --all-containers && return ;;
            Failed) kube logs --namespace default "$1" --all-containers && fail "the pod $1 failed" ;;
        esac
        sleep 1
    done
    fail "the pod $1 is $phase after 120 s"
}
# For a trap at the end: what_broke STATUS
what_broke() {
    [ "$1" -eq 0 ] && return
    say "what the cluster says"
    kube get pods,persistentvolumeclaims,volumesnapshots --namespace default --output wide || true
    kube get events --namespace default --sort-by .lastTimestamp | tail -n 20 || true
    kube logs --namespace "$namespace" --selector app.kubernetes.io/component=plugin --all-containers --tail 20 || true
    printf '%s: failed; docs/troubleshooting.md says where to look\n' "$(basename "$0")" >&2
}
