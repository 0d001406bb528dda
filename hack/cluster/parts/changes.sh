# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: the API server goes away in the middle of each call of a sidecar, and the driver is
# upgraded, while volumes are in use.
# shellcheck disable=SC2154,SC2317

part_changes() {
    on "$name-a" up
    on "$name-a" install
    k apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/filesystem.yaml" \
        --filename "$root/deploy/examples/group.yaml"
    k wait --for condition=ready --timeout 120s pod/block pod/files pod/group
    upgrade
    api_server_away
    # The one of uninstall is smaller.
    k delete --filename "$root/deploy/examples/block.yaml"
    uninstall 1
    on "$name-a" down
    unchanged
}

# A metric of the driver: how many volumes or snapshots it has.
count_of() {
    k get --raw "/api/v1/namespaces/$namespace/pods/deltapath-plugin-0:9810/proxy/metrics" | awk -v name="$1" '$1 == name { print $2 }'
}

upgrade() {
    local other=docker.io/library/deltapath:another-version
    dense block
    say "the driver's image is exchanged while a pod writes and a backup reads"
    # shellcheck disable=SC2016 # the pod's shell expands it
    k exec block -- sh -c 'n=0; while :; do n=$((n + 1)); echo $n | dd of=/dev/volume bs=4096 seek=$((n % 1000)) count=1 conv=notrunc,sync,fsync 2>/dev/null || echo $n; done' >"$scratch/refused" &
    local writer=$!
    on "$name-a" exec ctr --namespace k8s.io images tag "docker.io/library/$image" "$other"
    backup_of block 16M
    await 60 "a stream is open" a_stream_is_open || fail "no stream is open"
    k set image --namespace "$namespace" statefulset/deltapath-plugin "deltapath=$other"
    k rollout status --namespace "$namespace" statefulset/deltapath-plugin --timeout 180s
    [ "$(k get pod deltapath-plugin-0 --namespace "$namespace" --output jsonpath='{.spec.containers[?(@.name=="deltapath")].image}')" = "$other" ] ||
        fail "the driver's pod has the old image"
    kill -0 "$backup" || fail "the backup was over before the driver's image was exchanged"
    wait "$backup" || fail "the backup does not outlive the exchange"
    kill -0 "$writer" || fail "the pod stopped writing"
    kill "$writer"
    ! [ -s "$scratch/refused" ] || fail "writes failed: $(head -n 3 "$scratch/refused")"
    k exec block -- dd if=/dev/volume of=/dev/null bs=1M count=16
    k delete --filename "$root/deploy/backup/cronjob.yaml"
    k delete persistentvolumeclaim backups
    k delete volumesnapshot --selector app.kubernetes.io/managed-by=cbt-backup
}

# How many calls of a method the driver has answered: calls METHOD
calls() { on "$name-a" exec sh -c 'cat /var/log/pods/*_deltapath-plugin-0_*/deltapath/*.log' | grep -c "rpc{method=\"$1\".* done code=Ok"; }
# The API server is away for a minute, from the middle of calls on: the driver is stopped while they are asked for, so they are
# under way when the API server goes. The driver then ends them, and no sidecar can write that down. The API server is stopped, too,
# so that connections to it hang.
away() { # WHAT METHODS COMMAND...: the command asks for calls of these methods
    local what=$1 methods=$2 method end
    shift 2
    say "the API server is away, while $what"
    for method in $methods; do calls "$method" >"$scratch/$method" || true; done
    on "$name-a" exec pkill -STOP -x deltapath
    "$@"
    sleep 8
    end=$((SECONDS + 60))
    on "$name-a" exec pkill -STOP -x kube-apiserver
    on "$name-a" exec pkill -CONT -x deltapath
    while [ "$SECONDS" -lt "$end" ]; do sleep 1; done
    for method in $methods; do
        [ "$(calls "$method")" -gt "$(cat "$scratch/$method")" ] || fail "no $method was under way when the API server went"
    done
    on "$name-a" exec pkill -CONT -x kube-apiserver
    await 60 "the API server answers" k get --raw /readyz || fail "the API server does not answer"
}
api_server_away() {
    local examples=$root/deploy/examples
    sed 's/\bfiles\b/more/g' "$examples/filesystem.yaml" >"$scratch/more.yaml"
    away "two snapshots are taken and a volume is made" "CreateSnapshot CreateVolume" \
        k apply --filename "$examples/snapshot.yaml" --filename "$scratch/more.yaml"
    k wait --for condition=ready --timeout 180s pod/more
    k wait --for jsonpath='{.status.readyToUse}'=true --timeout 180s volumesnapshot/block-1 volumesnapshot/files-1
    away "a snapshot is restored and a volume cloned" CreateVolume \
        k apply --filename "$examples/restore.yaml" --filename "$examples/clone.yaml"
    k wait --for condition=ready --timeout 180s pod/files-restored pod/files-clone
    away "a volume grows" ControllerExpandVolume \
        k patch persistentvolumeclaim block --type merge --patch '{"spec": {"resources": {"requests": {"storage": "2Gi"}}}}'
    grown() { [ "$(k exec block -- blockdev --getsize64 /dev/volume)" = $((2 << 30)) ]; }
    await 180 "the device has its size" grown || fail "the device does not grow"
    away "a volume changes its attributes" ControllerModifyVolume \
        k patch persistentvolumeclaim block --type merge --patch '{"spec": {"volumeAttributesClassName": "deltapath-sequential"}}'
    k wait --for jsonpath='{.status.currentVolumeAttributesClassName}'=deltapath-sequential --timeout 180s persistentvolumeclaim/block
    away "a group snapshot is taken" CreateVolumeGroupSnapshot k apply --filename "$examples/group-snapshot.yaml"
    k wait --for jsonpath='{.status.readyToUse}'=true --timeout 180s volumegroupsnapshot/group
    say "nothing was made twice"
    [ "$(count_of deltapath_volumes)" = "$(k get persistentvolumes --output name | wc -l)" ] ||
        fail "the driver has $(count_of deltapath_volumes) volumes, and the cluster $(k get persistentvolumes --output name | wc -l)"
    [ "$(count_of deltapath_snapshots)" = "$(k get volumesnapshotcontents --output name | wc -l)" ] ||
        fail "the driver has $(count_of deltapath_snapshots) snapshots, and the cluster $(k get volumesnapshotcontents --output name | wc -l)"
    # Pods first: a volume is deleted once no pod uses it.
    k delete pod more files-restored files-clone
    away "snapshots and volumes are deleted" "DeleteVolumeGroupSnapshot DeleteSnapshot DeleteVolume" \
        k delete --wait=false --ignore-not-found --filename "$examples/group-snapshot.yaml" --filename "$examples/snapshot.yaml" \
        --filename "$examples/restore.yaml" --filename "$examples/clone.yaml" --filename "$scratch/more.yaml"
    none_of_them() { [ "$(count_of deltapath_snapshots)" = 0 ] && [ "$(count_of deltapath_volumes)" = 4 ]; }
    await 240 "the driver has none of them" none_of_them ||
        fail "the driver has $(count_of deltapath_snapshots) snapshots and $(count_of deltapath_volumes) volumes, and is to have 0 and 4"
}
