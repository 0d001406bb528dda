# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: hack/alerts evaluates the alerts of the chart on the metrics of a
# running cluster. One second counts as one minute.
# shellcheck disable=SC2154,SC2317

part_alerts() {
    local volume stopped data pool=/var/lib/deltapath/pool record='/var/lib/deltapath/pool/volumes/*/record.json'
    (cd "$root/hack/alerts" && go build -o "$scratch/alerts" .)
    on "$name-a" up --nodes 2
    on "$name-a" install --distributed --chart --set 'driver.extraArgs={--pool-size=1Gi}'
    k apply --filename "$root/deploy/examples/block.yaml"
    k wait --for condition=ready --timeout 120s pod/block
    node=$(k get pod block --output 'jsonpath={.spec.nodeName}')
    volume=$(k get persistentvolumeclaim block --output 'jsonpath={.spec.volumeName}')
    fire "" 65

    say "a hashing thread that hangs, as if a disk did not answer"
    # PTRACE_SEIZE and PTRACE_INTERRUPT stop this thread alone, until perl ends.
    # shellcheck disable=SC2016 # perl's, and the node's shell
    on "$name-a" exec --node "${node#node}" bash -c 'exec perl -e '\''
        syscall(101, $_, $ARGV[0] + 0, 0, 0) == 0 or die "ptrace: $!" for 0x4206, 0x4207;
        sleep 1 until -e "/run/go-on"'\'' "$(grep -lx hashing /proc/[0-9]*/task/[0-9]*/comm | cut -d / -f 5)"' &
    stopped=$!
    k apply --filename - <<'Y'
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: block, namespace: default}
spec: {volumeSnapshotClassName: deltapath, source: {persistentVolumeClaimName: block}}
Y
    k wait --for 'jsonpath={.status.readyToUse}=true' --timeout 60s volumesnapshot/block
    fire DeltapathHashingStuck 70
    on "$name-a" exec --node "${node#node}" touch /run/go-on
    wait "$stopped"
    k delete volumesnapshot/block --timeout 60s
    fire "" 5

    say "a full pool"
    k exec block -- sh -c 'dd if=/dev/urandom of=/dev/volume bs=1M count=1000 conv=fsync 2>&1 | tail -n 1'
    fire DeltapathPoolNearlyFull 20

    say "a record that cannot be read"
    on "$name-a" exec --node "${node#node}" bash -c "cp -a $record /run/record; echo x >\$(echo $record)"
    restart
    fire DeltapathRecordsUnreadable 5
    on "$name-a" exec --node "${node#node}" bash -c "cp -a /run/record \$(echo $record)"
    restart

    say "a volume whose file is gone"
    data=$(on "$name-a" exec --node "${node#node}" bash -c "echo ${record%/*}/bytes/data.img")
    on "$name-a" exec --node "${node#node}" bash -c "mv $data $data.away"
    fire DeltapathVolumeUnhealthy 8
    on "$name-a" exec --node "${node#node}" bash -c "mv $data.away $data"
    k delete --filename "$root/deploy/examples/block.yaml" --timeout 120s
    k wait --for delete "persistentvolume/$volume" --timeout 120s

    say "a pool that is hidden"
    on "$name-a" exec --node 2 mount -t tmpfs tmpfs "$pool"
    fire DeltapathNotReady 10
    on "$name-a" exec --node 2 umount "$pool"

    say "a node without power"
    on "$name-a" off 2
    fire "DeltapathDown DeltapathNodeAway" 20
    on "$name-a" on 2
    k wait --for condition=Ready=True --timeout 120s node/node2

    say "certificates of ten days"
    helm_in upgrade deltapath "$root/deploy/chart/deltapath" --reset-then-reuse-values --set 'gateway.extraArgs={--certificate-lifetime=10d}'
    k patch deployment deltapath-certificates --namespace "$namespace" --type json \
        --patch '[{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--certificate-lifetime=10d"}]'
    for deployment in deltapath-controller deltapath-certificates; do
        k rollout status --namespace "$namespace" "deployment/$deployment" --timeout 120s
    done
    for secret in deltapath-snapshot-metadata-tls deltapath-router-tls; do
        k patch secret "$secret" --namespace "$namespace" --type json --patch '[{"op": "remove", "path": "/data"}]'
    done
    short() { k get secret deltapath-snapshot-metadata-tls deltapath-router-tls --namespace "$namespace" --output json | jq --exit-status '[.items[].data["tls.crt"] | select(.)] | length == 2'; }
    await 60 "there are new certificates" short || fail "no new certificates are made"
    sleep 10
    fire "DeltapathGatewayCertificateEnds DeltapathNodeCertificateEnds" 65
    on "$name-a" down
    unchanged
}

restart() {
    k delete pod --namespace "$namespace" --selector app.kubernetes.io/component=plugin --field-selector "spec.nodeName=$node"
    k rollout status --namespace "$namespace" daemonset/deltapath-plugin --timeout 120s
}
helm_in() { on "$name-a" exec helm --kube-context cluster --namespace "$namespace" "$@"; }
# The alerts that fire after so many seconds are these and no others: fire "ALERT..." SECONDS
fire() {
    local targets fired
    mapfile -t targets < <(k get pods --namespace "$namespace" --output json | jq -r '.items[] | . as $pod | .spec.containers[].ports[]? |
        select(.name == "metrics" or .name == "http" or .name == "router-http") | "\($pod.metadata.name)=\($pod.status.podIP):\(.containerPort)"')
    fired=$(on "$name-a" exec "$scratch/alerts" scrape "$root/deploy/chart/deltapath/templates/monitoring.yaml" "$2" "${targets[@]}" | paste -sd ' ')
    [ "$fired" = "$1" ] || fail "alerts that fire: ${fired:-none}; expected: ${1:-none}"
    say "what fires: ${fired:-nothing}"
}
