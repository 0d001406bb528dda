#!/usr/bin/env bash
# A Velero with changed block tracking that the user brings, in a cluster with deltapath in it: a full backup of a filesystem and a
# device, four incremental ones, the third while node agent, driver and gateway are killed, and restores elsewhere and in place. It
# removes what it made, and first what an earlier run left.
set -euo pipefail
suite=velero
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: velero-test.sh
The environment: KUBE_CONTEXT names the cluster (kind-\$CLUSTER), VELERO_IMAGE the image of Velero, and VELERO_PLUGIN_IMAGE that of
velero-plugin-for-aws. Both are in the cluster, or it can pull them."
[ $# -eq 0 ] || { [ "$1" = --help ] && echo "$usage" && exit 0; } || fail "unknown argument $1
$usage"
: "${VELERO_IMAGE:?"is not set
$usage"}" "${VELERO_PLUGIN_IMAGE:?"is not set
$usage"}"
need kubectl go
cluster_answers
trap 'what_broke $?' EXIT

velero() { kube --namespace velero "$@"; }
# All files of the filesystem and the device, with their hashes: hashes NAMESPACE
hashes() { kube exec --namespace "$1" user -- sh -c 'sync; find /data -type f ! -path "*/lost+found*" | sort | xargs sha256sum; sha256sum /dev/disk'; }
# Waits for the end of an object of Velero: ended KIND NAME
ended() {
    local phase
    for _ in $(seq 600); do
        phase=$(velero get "$1" "$2" --output 'jsonpath={.status.phase}')
        case "$phase" in
            Completed) return ;;
            *Failed*) break ;;
        esac
        sleep 1
    done
    velero get "$1" "$2" --output yaml
    velero logs deployment/velero --tail 400 | grep -E 'level=(error|warning)' || true
    say "$1 $2 is $phase"
    return 1
}
backup() { # NAME
    velero apply --filename - <<B
apiVersion: velero.io/v1
kind: Backup
metadata: {name: $1, namespace: velero}
spec:
  includedNamespaces: [default]
  labelSelector: {matchLabels: {test: $suite}}
  snapshotMoveData: true
  datamover: velero-block
  storageLocation: store
  volumeSnapshotLocations: []
B
}
# A backup reads of a claim at least and at most so many MiB: reads BACKUP CLAIM LEAST MOST
reads() {
    local bytes
    bytes=$(velero get dataupload --selector "velero.io/backup-name=$1" \
        --output "jsonpath={.items[?(@.spec.sourcePVC=='$2')].status.incrementalBytes}")
    say "$1: $bytes bytes of $2"
    ((${bytes:-0} >= $3 << 20 && ${bytes:-0} <= $4 << 20)) || fail "$1 read ${bytes:-no} bytes of $2, expected $3 to $4 MiB"
}
# Restores a backup into a namespace, and checks that all has these hashes there: restore NAME BACKUP NAMESPACE HASHES
restore() {
    velero apply --filename - <<R
apiVersion: velero.io/v1
kind: Restore
metadata: {name: $1, namespace: velero}
spec: {backupName: $2, namespaceMapping: {default: $3}}
R
    ended restore "$1" || fail "the restore $1 failed"
    kube wait --for condition=ready --timeout 120s --namespace "$3" pod/user
    diff <(hashes "$3") <(echo "$4") || fail "what $1 restored is not what was backed up"
}
# Its objects have finalizers of a server that may be gone before them.
velero_is_gone() {
    local object
    for object in $(velero get backuprepositories,backups,restores,datauploads,datadownloads --output name); do
        velero patch "$object" --type merge --patch '{"metadata": {"finalizers": null}}'
    done
    ! kube get namespace velero
}
remove() {
    local content
    kube delete --ignore-not-found --timeout 180s namespace restored
    delete_made
    kube delete --ignore-not-found --wait=false namespace velero
    await 180 "Velero is gone" velero_is_gone || fail "the namespace velero is not deleted: kubectl get namespace velero --output yaml says why"
    kube delete --ignore-not-found crd,clusterrolebinding --selector component=velero
    # Where a data upload was never begun, Velero leaves the snapshot's content behind, with the policy Retain.
    for content in $(kube get volumesnapshotcontents --no-headers \
        --output custom-columns=NAME:.metadata.name,OF:.spec.volumeSnapshotRef.name | awk '$2 ~ /^velero-/ { print $1 }'); do
        kube patch volumesnapshotcontent "$content" --type merge --patch '{"spec": {"deletionPolicy": "Delete"}}'
        kube delete --timeout 60s volumesnapshotcontent "$content"
    done
    kube delete --namespace default --ignore-not-found pod velero-cli
    kube label volumesnapshotclass deltapath velero.io/csi-volumesnapshot-class-
}

remove
say "an S3 server and Velero"
kube run velero-cli --namespace default --image "$VELERO_IMAGE" --restart Never --command -- /velero install --dry-run --output yaml \
    --image "$VELERO_IMAGE" --plugins "$VELERO_PLUGIN_IMAGE" --features EnableCSI --use-node-agent --use-volume-snapshots=false \
    --no-default-backup-location --no-secret --velero-pod-cpu-request 0 --node-agent-pod-cpu-request 0
finished velero-cli | sed -n '/^apiVersion/,$p' | kube apply --filename -
kube label volumesnapshotclass deltapath velero.io/csi-volumesnapshot-class=true
velero apply --filename - <<'S'
apiVersion: v1
kind: Pod
metadata: {name: store, namespace: velero, labels: {app: store}}
spec:
  containers:
    - name: store
      image: busybox:1.37.0
      command: [sh, -c, "until [ -x /tmp/store ]; do sleep 1; done; mkdir -p /store/velero && exec /tmp/store --access backup --secret backup-secret --port :7070 posix /store"]
      volumeMounts: [{name: store, mountPath: /store}]
  volumes: [{name: store, emptyDir: {}}]
---
apiVersion: v1
kind: Service
metadata: {name: store, namespace: velero}
spec: {selector: {app: store}, ports: [{port: 7070}]}
---
apiVersion: v1
kind: Secret
metadata: {name: store, namespace: velero}
stringData:
  cloud: |
    [default]
    aws_access_key_id = backup
    aws_secret_access_key = backup-secret
---
apiVersion: velero.io/v1
kind: BackupStorageLocation
metadata: {name: store, namespace: velero}
spec:
  default: true
  provider: aws
  objectStorage: {bucket: velero}
  credential: {name: store, key: cloud}
  config: {region: us-east-1, s3ForcePathStyle: "true", s3Url: "http://store.velero.svc:7070"}
S
# A data upload that loses its node agent before it begins waits for this time, 30 minutes by default.
velero patch daemonset node-agent --type json \
    --patch '[{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--data-mover-prepare-timeout=1m"}]'
velero wait --for condition=ready --timeout 60s pod/store
velero exec --stdin store -- sh -c 'cat >/tmp/part && chmod 755 /tmp/part && mv /tmp/part /tmp/store' <"$("$root/hack/s3-server.sh")"
velero rollout status --timeout 180s deployment/velero
velero rollout status --timeout 180s daemonset/node-agent
velero wait --for jsonpath='{.status.phase}'=Available --timeout 180s backupstoragelocation/store

say "a filesystem and a device, and a full backup"
claim data Filesystem 1Gi
claim disk Block 256Mi
pod user "" data:Filesystem disk:Block
ready user
change() { # NAME, MiB of it in a file, and on the device from the MiB AT
    kube exec --namespace default user -- sh -c "dd if=/dev/urandom of=/data/$1 bs=1M count=$2 && dd if=/dev/urandom of=/dev/disk bs=1M seek=$3 count=$2 conv=notrunc && sync"
}
change first 60 8
full=$(hashes default)
backup full
ended backup full || fail "the backup failed"
reads full data 60 80
reads full disk 60 60

for number in 1 2; do
    say "incremental backup $number"
    change "more-$number" 2 $((100 + 10 * number))
    backup "incremental-$number"
    ended backup "incremental-$number" || fail "the backup failed"
    reads "incremental-$number" data 2 16
    reads "incremental-$number" disk 2 2
done

say "an incremental backup, while node agent, driver and gateway go"
change more-3 120 130
backup incremental-3
moves() { velero get dataupload --selector velero.io/backup-name=incremental-3 --output 'jsonpath={.items[*].status.phase}' | grep -q InProgress; }
# It takes a second or two, so this does not sleep.
for _ in $(seq 300); do ! moves || break; done
moves || fail "the mover was not seen at work"
velero delete pod --selector name=node-agent --force --grace-period 0
kube delete pod --namespace "$namespace" --selector app.kubernetes.io/component=plugin --force --grace-period 0
kube delete pod --namespace "$namespace" --selector app.kubernetes.io/component=gateway --wait=false
if ended backup incremental-3; then
    reads incremental-3 disk 120 120
else
    say "the backup that was disturbed failed; the next one must not"
fi
velero rollout status --timeout 180s daemonset/node-agent
change more-4 1 250
last=$(hashes default)
backup incremental-4
ended backup incremental-4 || fail "the backup after it failed"
reads incremental-4 disk 1 121

say "restores to another namespace: the first backup, and the last"
restore first full restored "$full"
kube delete --timeout 180s namespace restored
restore last incremental-4 restored "$last"
say "a restore in place of what is lost"
kube delete --namespace default --timeout 180s pod/user persistentvolumeclaim/data persistentvolumeclaim/disk
restore in-place incremental-4 default "$last"
remove
say "Velero works"
