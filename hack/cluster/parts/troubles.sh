# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: what happens to a node, its programs and its pods while volumes are in use.
# shellcheck disable=SC2154,SC2317

# The writer's file holds the numbers from 1 on, each written to the disk before the next.
writes() { [ "$(k exec writer -- tail -n 1 /data/log)" -gt "$1" ]; }
goes_on() { # WHAT: it writes on, and no number is missing. Where a pod was deleted by force two write for a while
    local last
    last=$(k exec writer -- tail -n 1 /data/log)
    await 120 "the pod writes after $1" writes "$last" || fail "the pod does not write after $1"
    # shellcheck disable=SC2016
    k exec writer -- awk '{ seen[$1] = 1; if ($1 > last) last = $1 } END { while (last > 0) if (!(last-- in seen)) exit 1 }' /data/log || fail "a number is missing after $1"
}
part_troubles() {
    local sum
    on "$name-a" up
    on "$name-a" install
    k apply --filename - <<'Y'
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: default}
spec: {storageClassName: deltapath, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: writer, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000}
  containers:
    - name: writer
      image: busybox:1.37.0
      command:
        - sh
        - -ec
        - |
          [ -e /data/random ] || dd if=/dev/urandom of=/data/random bs=1M count=256 conv=fsync
          n=$(tail -n 1 /data/log || echo 0)
          while :; do n=$((n + 1)) && echo $n >>/data/log && sync /data/log && sleep 0.05; done
      volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
---
# The same volume in a second pod: a part of it, and all of it, read-only.
apiVersion: v1
kind: Pod
metadata: {name: reader, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - name: reader
      image: busybox:1.37.0
      command: [sleep, infinity]
      volumeMounts:
        - {name: data, mountPath: /part, subPath: part}
        - {name: data, mountPath: /all, readOnly: true}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
Y
    k wait --for condition=ready --timeout 120s pod/writer pod/reader
    await 60 "the pod writes" writes 0 || fail "the pod does not write"
    say "fsGroup, subPath, readOnly, two pods on one volume"
    [ "$(k exec writer -- stat -c %u:%g /data/log)" = 1000:2000 ] || fail "the file is not the fsGroup's: $(k exec writer -- stat -c %u:%g /data/log)"
    k exec reader -- sh -c 'echo here >/part/file && cmp /part/file /all/part/file && ! touch /all/file'
    k exec writer -- grep -q here /data/part/file

    say "kubelet killed"
    on "$name-a" exec pkill -KILL -x kubelet
    await 60 "kubelet serves" k exec writer -- true
    goes_on "kubelet's end"

    say "the driver killed, in the middle of a backup"
    k apply --filename "$root/deploy/examples/block.yaml"
    k wait --for condition=ready --timeout 120s pod/block
    dense block
    backup_of block 32M
    await 60 "a stream is open" a_stream_is_open || fail "no stream is open"
    on "$name-a" exec pkill -KILL -x deltapath
    wait "$backup" || fail "the backup does not outlive the driver"
    k rollout status --namespace "$namespace" statefulset/deltapath-plugin --timeout 120s
    k delete --filename "$root/deploy/examples/block.yaml"
    goes_on "the driver's end"

    say "a pod deleted by force, and the node without power"
    sum=$(k exec writer -- sha256sum /data/random)
    k get pod writer --output json | jq 'del(.spec.nodeName, .status, .metadata.uid, .metadata.resourceVersion)' >"$scratch/writer.json"
    k delete pod writer --force --grace-period 0
    k create --filename "$scratch/writer.json"
    k wait --for condition=ready --timeout 120s pod/writer
    goes_on "the pod's end"
    on "$name-a" off 1
    on "$name-a" on 1
    await 120 "the API server answers" k get --raw /readyz || fail "the API server does not answer"
    await 180 "the pods run again" k exec reader -- test -e /part/file || fail "the pods do not run again"
    goes_on "the loss of power"
    [ "$(k exec writer -- sha256sum /data/random)" = "$sum" ] || fail "the volume holds other bytes"

    say "a claim deleted while pods use it"
    k delete persistentvolumeclaim data --wait=false
    goes_on "its claim's deletion"
    k delete pod writer reader
    await 60 "the claim goes" k wait --for delete --timeout 1s persistentvolumeclaim/data || fail "the claim does not go"
    k delete --filename "$root/deploy/backup/cronjob.yaml"
    uninstall 1
    on "$name-a" down
    unchanged
}
