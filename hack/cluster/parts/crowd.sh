# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: many objects at once, and many rounds.
# shellcheck disable=SC2154,SC2317

volumes=50 snapshots_each=4
rounds=${ROUNDS:-200}

part_crowd() {
    on "$name-a" up
    on "$name-a" install
    quota
    many_at_once
    many_files
    schedule
    uninstall 1
    on "$name-a" down
    unchanged
}

quota() {
    say "a quota of one claim and one snapshot"
    k create namespace tight
    k apply --filename - <<'Y'
apiVersion: v1
kind: ResourceQuota
metadata: {name: quota, namespace: tight}
spec:
  hard:
    deltapath.storageclass.storage.k8s.io/requests.storage: 1Gi
    count/volumesnapshots.snapshot.storage.k8s.io: "1"
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: first, namespace: tight}
spec: {storageClassName: deltapath, volumeMode: Block, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: user, namespace: tight}
spec:
  terminationGracePeriodSeconds: 0
  containers: [{name: user, image: "busybox:1.37.0", command: [sleep, infinity], volumeDevices: [{name: first, devicePath: /dev/volume}]}]
  volumes: [{name: first, persistentVolumeClaim: {claimName: first}}]
Y
    k wait --namespace tight --for condition=ready --timeout 120s pod/user
    counted() { [ "$(k get resourcequota quota --namespace tight --output 'jsonpath={.status.used.deltapath\.storageclass\.storage\.k8s\.io/requests\.storage}')" = 1Gi ]; }
    await 60 "the quota counts the claim" counted || fail "the quota does not count the claim"
    refused() { # WHAT COMMAND...: for the quota, and for nothing else
        local what=$1
        shift
        if "$@" 2>"$scratch/refused"; then fail "$what"; fi
        grep -q "exceeded quota" "$scratch/refused" || fail "refused for another reason than the quota: $(cat "$scratch/refused")"
    }
    refused "a claim grows past its quota" \
        k patch persistentvolumeclaim first --namespace tight --patch '{"spec": {"resources": {"requests": {"storage": "2Gi"}}}}'
    one() { # NAME
        k create --filename - <<Y
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1, namespace: tight}
spec: {volumeSnapshotClassName: deltapath, source: {persistentVolumeClaimName: first}}
Y
    }
    # The quota counts a kind of object minutes after its CRD is there, at the latest, and refuses it until then.
    await 420 "a snapshot is taken" one first || fail "no snapshot is taken"
    k wait --namespace tight --for jsonpath='{.status.readyToUse}'=true --timeout 60s volumesnapshot/first
    refused "two snapshots are taken where one is allowed" one second
    k delete namespace tight --timeout 180s
}

many_at_once() {
    local number step volume=$scratch/volume.yaml pod=$scratch/pod.yaml
    say "$volumes claims and $((volumes * snapshots_each)) snapshots at once"
    for ((number = 0; number < volumes; number++)); do
        cat <<Y
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: crowd-$number, namespace: default}
spec: {storageClassName: deltapath, volumeMode: Block, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
Y
    done >"$volume"
    {
        cat <<'Y'
apiVersion: v1
kind: Pod
metadata: {name: crowd, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - name: user
      image: busybox:1.37.0
      command: [sh, -ec, "for d in /dev/crowd-*; do echo $d | dd of=$d bs=4096 conv=sync,fsync; done; touch /tmp/written; exec sleep infinity"]
      readinessProbe: {exec: {command: [test, -e, /tmp/written]}, periodSeconds: 1}
      volumeDevices:
Y
        for ((number = 0; number < volumes; number++)); do echo "        - {name: crowd-$number, devicePath: /dev/crowd-$number}"; done
        echo "  volumes:"
        for ((number = 0; number < volumes; number++)); do echo "    - {name: crowd-$number, persistentVolumeClaim: {claimName: crowd-$number}}"; done
    } >"$pod"
    step=$SECONDS
    k apply --filename "$volume" --filename "$pod"
    k wait --for condition=ready --timeout 600s pod/crowd
    say "the pod of $volumes volumes is ready after $((SECONDS - step)) s"
    for ((number = 0; number < volumes * snapshots_each; number++)); do
        cat <<Y
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: crowd-$number, namespace: default, labels: {test: crowd}}
spec: {volumeSnapshotClassName: deltapath, source: {persistentVolumeClaimName: crowd-$((number % volumes))}}
Y
    done >"$scratch/snapshots.yaml"
    step=$SECONDS
    k apply --filename "$scratch/snapshots.yaml"
    k wait --for jsonpath='{.status.readyToUse}'=true --timeout 900s --selector test=crowd volumesnapshot
    say "$((volumes * snapshots_each)) snapshots are ready after $((SECONDS - step)) s"
    step=$SECONDS
    k delete --timeout 900s --filename "$scratch/snapshots.yaml" >"$scratch/deleted"
    k delete --timeout 600s --filename "$pod" --filename "$volume" >>"$scratch/deleted"
    none() { [ -z "$(k get persistentvolumes,volumesnapshotcontents --output name)" ]; }
    await 300 "nothing of them is left" none || fail "volumes or contents are left: $(k get persistentvolumes,volumesnapshotcontents)"
    say "all are deleted after $((SECONDS - step)) s"
}

many_files() {
    local step
    say "fsGroup on 100,000 files"
    k apply --filename - <<'Y'
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: tree, namespace: default}
spec: {storageClassName: deltapath, accessModes: [ReadWriteOnce], resources: {requests: {storage: 2Gi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: planter, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  restartPolicy: Never
  containers:
    - name: planter
      image: busybox:1.37.0
      command: [sh, -ec, "for d in $(seq 1000); do mkdir /tree/$d; (cd /tree/$d; touch $(seq 100)); done; sync"]
      volumeMounts: [{name: tree, mountPath: /tree}]
  volumes: [{name: tree, persistentVolumeClaim: {claimName: tree}}]
Y
    k wait --for jsonpath='{.status.phase}'=Succeeded --timeout 300s pod/planter
    k delete pod planter
    step=$SECONDS
    k apply --filename - <<'Y'
apiVersion: v1
kind: Pod
metadata: {name: gardener, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 3000, fsGroupChangePolicy: Always}
  containers: [{name: gardener, image: "busybox:1.37.0", command: [sleep, infinity], volumeMounts: [{name: tree, mountPath: /tree}]}]
  volumes: [{name: tree, persistentVolumeClaim: {claimName: tree}}]
Y
    k wait --for condition=ready --timeout 300s pod/gardener
    say "the pod is ready after $((SECONDS - step)) s"
    [ "$(k exec gardener -- find /tree -type f -group 3000 | wc -l)" = 100000 ] || fail "not all files are the group's"
    k exec gardener -- sh -c 'echo here >/tree/500/50'
    k delete pod/gardener persistentvolumeclaim/tree
}

# As a backup schedule does, for many rounds: some blocks change, a snapshot is taken, the blocks that changed since the
# last one are listed, and the snapshot before goes.
schedule() {
    local round blocks numbers listed step=$SECONDS client=$scratch/backup-example
    say "$rounds rounds of a schedule, each delta compared with what was written"
    (cd "$root/deploy/backup-example" && go build -o "$client" .)
    k apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/backup-account.yaml"
    k wait --for condition=ready --timeout 120s pod/block
    RANDOM=42
    for ((round = 0; round <= rounds; round++)); do
        # 1 GiB has 262,144 blocks of 4 KiB.
        numbers=($(((RANDOM << 15 | RANDOM) % 262144)))
        while ((RANDOM % 12 > 0)); do numbers+=($(((RANDOM << 15 | RANDOM) % 262144))); done
        blocks=$(printf '%s\n' "${numbers[@]}" | sort -nu)
        # shellcheck disable=SC2086,SC2016 # words, on purpose, and the pod's shell expands them
        k exec block -- sh -ec 'for b; do dd if=/dev/urandom of=/dev/volume bs=4096 count=1 seek=$b conv=notrunc,fsync 2>/dev/null; done' _ $blocks
        k create --filename - <<Y >/dev/null
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: round-$round, namespace: default}
spec: {volumeSnapshotClassName: deltapath, source: {persistentVolumeClaimName: block}}
Y
        k wait --for jsonpath='{.status.readyToUse}'=true --timeout 120s "volumesnapshot/round-$round" >/dev/null
        ((round > 0)) || continue
        listed=$(on "$name-a" exec "$client" list -kubeconfig "$clusters/$name-a/pki/admin.kubeconfig" -namespace default \
            -service-account backup -snapshot "round-$round" -base "round-$((round - 1))" |
            awk '$2 ~ /^[0-9]+$/ && NF == 2 { for (at = $1; at < $1 + $2; at += 4096) print at / 4096 }')
        [ "$listed" = "$blocks" ] || fail "round $round lists $(tr '\n' ' ' <<<"$listed"), and written are $(tr '\n' ' ' <<<"$blocks")"
        k delete volumesnapshot "round-$((round - 1))" >/dev/null
        ((round % 50 > 0)) || say "$round rounds, $((SECONDS - step)) s"
    done
    k delete volumesnapshot "round-$rounds"
    k delete --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/backup-account.yaml"
}
